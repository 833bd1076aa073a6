"""Table lookup: factors v (vocabulary), e (embedding dim) and the dims of the indices. A sliced vocabulary looks up
with an offset and a mask, and leaves a partial sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strategies.graph import Operator, Ref, TensorSpec
from strategies.rules.registry import local_function, rule
from strategies.rules.sharding import Local, Sharding, sharding


@local_function
def lookup_slice(table: Tensor, indices: Tensor, start: int, padding: int, total: int) -> Tensor:
    """Rows of a vocabulary slice: table [v/n, e], global indices [...] -> [..., e], zeros for rows of other slices.

    Raises IndexError on the CPU for an index outside the `total` rows, as the whole table would (a GPU would have to
    wait for it).
    """
    if indices.device.type == "cpu" and indices.numel() and not (0 <= indices.min() and indices.max() < total):
        found = f"smallest {indices.min()}, largest {indices.max()}"
        raise IndexError(f"embedding: an index lies outside the table of {total} rows ({found}).")
    own = indices - start
    inside = (own >= 0) & (own < table.shape[0])
    # the row padding_idx gets no gradient; if another slice has it, no row of this one is exempt
    padding = padding - start if start <= padding < start + table.shape[0] else -1
    rows = torch.ops.aten.embedding.default(table, own.clamp(0, table.shape[0] - 1), padding)
    return torch.where(inside.unsqueeze(-1), rows, rows.new_zeros(()))


def _options(operator: Operator) -> dict[str, object]:
    return dict(zip(("padding_idx", "scale_grad_by_freq", "sparse"), operator.args[2:], strict=False))


def _embedding(operator: Operator, local: Local) -> Ref:
    if local.slices("v") == 1:
        return local.call(operator.target, *local.args)
    table, indices = local.args[:2]
    rows = local.operand_shape(0)[0]
    padding = _options(operator).get("padding_idx", -1)
    return local.call(
        "local.lookup_slice", table, indices, local.position("v", rows), padding, rows * local.slices("v")
    )


@rule("embedding")
def embedding(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """embedding(table [v, e], indices [...]) -> [..., e]."""
    options = _options(operator)
    if options.get("scale_grad_by_freq") or options.get("sparse"):
        return None  # the gradient depends on counts over the whole batch, or is not a dense tensor
    dims = tuple(f"i{i}" for i in range(len(specs[1].shape)))
    return sharding([("v", "e"), dims], [(*dims, "e")], specs, operator.results, sums=["v"], local=_embedding)
