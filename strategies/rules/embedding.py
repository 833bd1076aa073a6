"""Table lookup: factors v (vocabulary, padded), e (embedding dim, padded) and the dims of the indices. A sliced
vocabulary looks up with an offset and a mask, and leaves a partial sum; rows past the end are never looked up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.arguments import named
from strategies.rules.index_checks import check_inside
from strategies.rules.registry import local_function, rule
from strategies.rules.sharding import Dims, Local, Sharding, sharding


@local_function
def lookup_slice(table: Tensor, indices: Tensor, start: int, padding: int, total: int) -> Tensor:
    """Rows of a vocabulary slice: table [v/n, e], global indices [...] -> [..., e], zeros for rows of other slices.

    Raises IndexError on the CPU for an index outside the `total` rows, as the unsliced table would (a GPU would have to
    wait for it).
    """
    check_inside(indices, 0, total, f"embedding: an index lies outside the table of {total} rows")
    own = indices - start
    inside = (own >= 0) & (own < table.shape[0])
    # the row padding_idx gets no gradient; if another slice has it, no row of this one is exempt
    padding = padding - start if start <= padding < start + table.shape[0] else -1
    rows = torch.ops.aten.embedding.default(table, own.clamp(0, table.shape[0] - 1), padding)
    return torch.where(inside.unsqueeze(-1), rows, rows.new_zeros(()))


def _embedding(operator: Operator, local: Local) -> Ref:
    if local.slices("v") == 1:
        return local.call(operator.target, *local.args, **local.kwargs)
    options = named(operator.target, local.args, local.kwargs)
    start = local.position("v", local.operand_shape(0)[0])
    return local.call(
        "local.lookup_slice", options["weight"], options["indices"], start, options["padding_idx"], local.size("v")
    )


@rule("embedding")
def embedding(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """embedding(table [v, e], indices [...]) -> [..., e]. Where the gradient depends on counts over all indices, only e
    is a factor."""
    options = named(operator.target, operator.args, operator.keywords)
    if options["sparse"]:
        return None  # the gradient is not a dense tensor
    counts = options["scale_grad_by_freq"]
    dims: Dims = tuple(None if counts else f"i{i}" for i in range(len(specs[1].shape)))
    table: Dims = (None if counts else "v", "e")
    return sharding(
        [table, dims],
        [(*dims, "e")],
        specs,
        operator.results,
        sums=[] if counts else ["v"],
        local=_embedding,
        padded=("v", "e"),
    )


@rule("embedding_bag")
def embedding_bag(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """Sums, means or maxima of bags of rows: table [v, e], indices, offsets, weights of the samples -> [bags, e]. The
    bags are counted through all indices, so only e is a factor."""
    if named(operator.target, operator.args, operator.keywords)["sparse"]:
        return None  # the gradient is not a dense tensor
    whole: list[Dims] = [(None,) * len(spec.shape) for spec in specs[1:]]
    results: list[Dims] = [(None, "e") if len(spec.shape) == 2 else (None,) for spec in operator.results]
    return sharding([(None, "e"), *whole], results, specs, operator.results, padded=("e",))


@local_function
def one_hot_slice(indices: Tensor, start: int, classes: int) -> Tensor:
    """Classes start, start + 1, ... of a one-hot code: indices [...] -> [..., classes]."""
    own = torch.arange(start, start + classes, device=indices.device)
    return (indices.unsqueeze(-1) == own).to(torch.int64)


def _one_hot(operator: Operator, local: Local) -> Ref:
    if local.slices("c") == 1:
        return local.call(operator.target, *local.args)
    classes = local.result_shape()[-1]
    return local.call("local.one_hot_slice", local.args[0], local.position("c", classes), classes)


@rule("one_hot")
def one_hot(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """indices [...] -> [..., c]."""
    dims = tuple(f"i{i}" for i in range(len(specs[0].shape)))
    return sharding([dims], [(*dims, "c")], specs, operator.results, local=_one_hot, padded=("c",))
