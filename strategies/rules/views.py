"""Operators that show the same elements in another shape: reshapes by matching factors of the two shapes, permutations,
expansions.

A reshape splits both shapes into runs of dims with equal products, e.g. (6, 4, 5) -> (8, 3, 5) has the runs (6, 4) |
(8, 3) and (5) | (5). Only the leading dim of a run can be sliced (then every slice is one contiguous piece on both
sides), into a divisor of the greatest common divisor of the two leading dims: 2 here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.notation import broadcast_dims
from strategies.rules.registry import rule
from strategies.rules.sharding import Dims, Local, Sharding, sharding


def matched(before: Sequence[int], after: Sequence[int]) -> tuple[Dims, Dims, dict[str, int], set[str]]:
    """Factors of a reshape: dims before, dims after, per factor the number that its slice count must divide, and the
    factors of dims that stay as they are (these may have padded slices)."""
    left: list[str | None] = [None] * len(before)
    right: list[str | None] = [None] * len(after)
    sizes: dict[str, int] = {}
    alone: set[str] = set()
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
        alone |= {factor} if (first, second) == (i, j) else set()
        i, j = i + 1, j + 1
    return tuple(left), tuple(right), sizes, alone


def _reshape(operator: Operator, local: Local) -> Ref:
    """Slices may not be contiguous, so every view becomes a reshape to the local shape."""
    return local.call("aten.reshape.default", local.args[0], local.result_shape())


@rule(*"_unsafe_view flatten ravel reshape reshape_as squeeze unflatten unsqueeze view view_as".split())
def reshape(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    result = operator.results[0]
    if result.dtype != specs[0].dtype or 0 in result.shape:
        return None  # a reinterpretation of bits, or nothing to slice
    left, right, sizes, alone = matched(specs[0].shape, result.shape)
    like = [right] * (len(specs) - 1)  # the tensor whose shape is asked for
    return sharding([left, *like], [right], specs, operator.results, local=_reshape, sizes=sizes, padded=alone)


def _order(operator: Operator, rank: int) -> list[int]:
    """For every dim of the result the operand's dim that it is."""
    order, arguments = list(range(rank)), operator.args[1:]
    if operator.op in ("t", "numpy_T"):
        order.reverse()
    elif operator.op in ("adjoint", "mH", "mT"):
        order[-2:] = order[:-3:-1]
    elif operator.op == "permute":
        order = [dim % rank for dim in arguments[0]]
    elif operator.op in ("movedim", "moveaxis"):
        sources, targets = ([dim % rank for dim in ((a,) if isinstance(a, int) else a)] for a in arguments)
        order = [dim for dim in order if dim not in sources]
        for target, source in sorted(zip(targets, sources, strict=True)):
            order.insert(target, source)
    elif rank:
        a, b = (dim % rank for dim in arguments)
        order[a], order[b] = b, a
    return order


@rule(*"adjoint mH mT moveaxis movedim numpy_T permute swapaxes swapdims t transpose".split())
def permutation(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """The same dims in another order."""
    names = [f"d{i}" for i in range(len(specs[0].shape))]
    result: Dims = tuple(names[i] for i in _order(operator, len(names)))
    return sharding([tuple(names)], [result], specs, operator.results, padded=names)


def _expand(operator: Operator, local: Local) -> Ref:
    return local.call("aten.expand.default", local.args[0], local.result_shape())


@rule("broadcast_to", "expand", "expand_as")
def expand(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """Dims that are new or grow from size 1 are factors of the result alone: every slice expands the same operand."""
    shape = operator.results[0].shape
    result = tuple(f"d{i}" for i in range(len(shape)))
    (dims,) = broadcast_dims(specs[:1], shape)
    like = [result] * (len(specs) - 1)  # the tensor whose shape is asked for
    return sharding([dims, *like], [result], specs, operator.results, local=_expand, padded=result)


def _repeat(operator: Operator, local: Local) -> Ref:
    counts = [count // local.slices(f"m{i}") if count > 1 else count for i, count in enumerate(operator.args[1])]
    return local.call(operator.target, local.args[0], counts)


@rule("repeat")
def repeat(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """Dims that are repeated once pass. The others can be sliced by complete copies: a slice repeats its operand fewer
    times."""
    counts, own = operator.args[1], len(specs[0].shape)
    result: Dims = tuple(f"m{i}" if count > 1 else f"d{i}" for i, count in enumerate(counts))
    operand: Dims = tuple(name if name is not None and name[0] == "d" else None for name in result[len(counts) - own :])
    sizes = {f"m{i}": count for i, count in enumerate(counts) if count > 1}
    return sharding([operand], [result], specs, operator.results, local=_repeat, sizes=sizes)
