"""Operators that move or select elements: reshapes by matching factors of the two shapes, permutations, slices, joins.

A reshape splits both shapes into runs of dims with equal products, e.g. (6, 4, 5) -> (8, 3, 5) has the runs (6, 4) | (8, 3) and
(5) | (5). Only the leading dim of a run can be sliced (then every slice is one contiguous piece on both sides), into a divisor of
the greatest common divisor of the two leading dims: 2 here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from strategies.graph import Operator, Ref, TensorSpec
from strategies.rules.registry import rule
from strategies.rules.sharding import Dims, Local, Sharding, sharding


def matched(before: Sequence[int], after: Sequence[int]) -> tuple[Dims, Dims, dict[str, int]]:
    """Factors of a reshape: dims before, dims after, and per factor the number that its slice count must divide."""
    left: list[str | None] = [None] * len(before)
    right: list[str | None] = [None] * len(after)
    sizes: dict[str, int] = {}
    i = j = 0
    while i < len(before) and j < len(after):
        if before[i] == 1 or after[j] == 1:  # a dim of size 1 belongs to no run
            i, j = (i + 1, j) if before[i] == 1 else (i, j + 1)
            continue
        first, second, a, b = i, j, before[i], after[j]
        while a != b:
            if a < b:
                i += 1
                a *= before[i]
            else:
                j += 1
                b *= after[j]
        factor = f"r{len(sizes)}"
        left[first] = right[second] = factor
        sizes[factor] = math.gcd(before[first], after[second])
        i, j = i + 1, j + 1
    return tuple(left), tuple(right), sizes


def _reshape(operator: Operator, local: Local) -> Ref:
    """Slices may not be contiguous, so every view becomes a reshape to the local shape."""
    return local.call("aten.reshape.default", local.args[0], local.result_shape())


@rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as")
def reshape(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    (result,) = operator.results
    if result.dtype != specs[0].dtype or 0 in result.shape:
        return None  # a reinterpretation of bits
    left, right, sizes = matched(specs[0].shape, result.shape)
    rest: list[Dims] = [(None,) * len(spec.shape) for spec in specs[1:]]
    return sharding([left, *rest], [right], specs, operator.results, local=_reshape, sizes=sizes)


def _named(rank: int) -> list[str | None]:
    return [f"d{i}" for i in range(rank)]


def _moved(operator: Operator, specs: Sequence[TensorSpec], order: Sequence[int]) -> Sharding:
    names = _named(len(order))
    return sharding([tuple(names)], [tuple(names[i] for i in order)], specs, operator.results)


@rule("transpose", "t", "numpy_T", "permute", "movedim", "swapaxes", "transpose_copy", "permute_copy")
def permutation(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    rank = len(specs[0].shape)
    order = list(range(rank))
    if operator.op in ("t", "numpy_T"):
        order.reverse()
    elif operator.op.startswith("permute"):
        order = [dim % rank for dim in operator.args[1]]
    elif operator.op == "movedim":
        moved = [[dim % rank for dim in ((arg,) if isinstance(arg, int) else arg)] for arg in operator.args[1:3]]
        order = [dim for dim in order if dim not in moved[0]]
        for source, target in sorted(zip(*moved, strict=True), key=lambda pair: pair[1]):
            order.insert(target, source)
    elif rank:
        a, b = operator.args[1] % rank, operator.args[2] % rank
        order[a], order[b] = b, a
    return _moved(operator, specs, order)


@rule("squeeze", "unsqueeze")
def squeeze(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    left, right, sizes = matched(specs[0].shape, operator.results[0].shape)
    return sharding([left], [right], specs, operator.results, local=_reshape, sizes=sizes)


def _expand(operator: Operator, local: Local) -> Ref:
    return local.call("aten.expand.default", local.args[0], local.result_shape())


@rule("expand", "expand_as", "broadcast_to")
def expand(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    shape, own = operator.results[0].shape, specs[0].shape
    skip = len(shape) - len(own)
    dims = tuple(f"d{skip + i}" if size == shape[skip + i] else None for i, size in enumerate(own))
    rest: list[Dims] = [(None,) * len(spec.shape) for spec in specs[1:]]
    return sharding([dims, *rest], [tuple(_named(len(shape)))], specs, operator.results, local=_expand)


@rule("slice", "select", "narrow", "index_select", "flip", "roll", "cumsum", "cumprod", "sort", "topk", "argsort", "diff", "tril", "triu")
def along_one_dim(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """Operators that need one dim (or two, for triangles) whole and treat the others element by element."""
    rank = len(specs[0].shape)
    if rank == 0 or operator.op in ("tril", "triu") and rank < 2:
        return None
    names = _named(rank)
    whole = _whole_dims(operator, rank)
    if whole is None:
        return None
    dims = tuple(None if i in whole else name for i, name in enumerate(names))
    if operator.op == "slice" and specs[0].shape == operator.results[0].shape:
        dims = tuple(names)
        return sharding([dims], [dims], specs, operator.results, local=_identity)
    out = tuple(name for i, name in enumerate(dims) if i not in whole) if operator.op == "select" else dims
    rest: list[Dims] = [(None,) * len(spec.shape) for spec in specs[1:]]
    return sharding([dims, *rest], [out] * len(operator.results), specs, operator.results)


def _identity(operator: Operator, local: Local) -> Ref:
    return local.call("aten.alias.default", local.args[0])


def _whole_dims(operator: Operator, rank: int) -> set[int] | None:
    arguments, keywords = operator.args[1:], operator.keywords
    if operator.op in ("tril", "triu"):
        return {rank - 1, rank - 2}
    if operator.op in ("flip", "roll"):
        named = keywords.get("dims", arguments[-1] if len(arguments) == (1 if operator.op == "flip" else 2) else None)
        return {dim % rank for dim in ((named,) if isinstance(named, int) else named)} if named else None
    defaults = {"slice": (0, 0), "select": (0, 0), "narrow": (0, 0), "index_select": (0, 0), "cumsum": (0, 0), "cumprod": (0, 0),
                "sort": (0, -1), "argsort": (0, -1), "topk": (1, -1), "diff": (1, -1)}  # fmt: skip
    position, default = defaults[operator.op]
    dim = keywords.get("dim", arguments[position] if len(arguments) > position else default)
    return {dim % rank} if isinstance(dim, int) and not isinstance(dim, bool) else None


@rule("cat", "concat")
def cat(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    rank = len(operator.results[0].shape)
    if any(len(spec.shape) != rank for spec in specs):
        return None  # torch lets empty one-dimensional tensors through
    dim = operator.keywords.get("dim", operator.args[1] if len(operator.args) > 1 else 0) % rank
    dims = tuple(None if i == dim else name for i, name in enumerate(_named(rank)))
    return sharding([dims] * len(specs), [dims], specs, operator.results)


@rule("stack")
def stack(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    rank = len(operator.results[0].shape)
    dim = operator.keywords.get("dim", operator.args[1] if len(operator.args) > 1 else 0) % rank
    names = _named(rank - 1)
    out = (*names[:dim], None, *names[dim:])
    return sharding([tuple(names)] * len(specs), [out], specs, operator.results)


@rule("split", "chunk", "split_with_sizes", "unbind", "tensor_split")
def split(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    rank = len(specs[0].shape)
    position = 1 if operator.op == "unbind" else 2
    dim = operator.keywords.get("dim", operator.args[position] if len(operator.args) > position else 0) % rank
    dims = tuple(None if i == dim else name for i, name in enumerate(_named(rank)))
    out = tuple(name for i, name in enumerate(dims) if i != dim) if operator.op == "unbind" else dims
    return sharding([dims], [out] * len(operator.results), specs, operator.results)
