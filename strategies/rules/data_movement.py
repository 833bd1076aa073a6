"""Operators that only move elements: the same elements in another shape, parts of a tensor, several tensors as one, and
repetition.

A reshape splits both shapes into runs of dims with equal products, e.g. (6, 4, 5) -> (8, 3, 5) has the runs (6, 4) |
(8, 3) and (5) | (5). Only the leading dim of a run can be sliced (then every slice is one contiguous piece on both
sides), into a divisor of the greatest common divisor of the two leading dims: 2 here.

In the others the dims that elements are taken from, or that grow, stay replicated; the others pass, and may have padded
slices. Repetition is an exception: where each element is repeated in its place every slice is repeated locally, and
where a complete dim is repeated the repetitions are a factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.notation import notation
from strategies.rules.registry import arguments, dim_of, local_function, rule
from strategies.rules.sharding import Dims, Local, Sharding, broadcast_dims, numbered, sharding
from strategies.rules.table import line


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


def reshaped(operator: Operator, local: Local) -> Ref:
    """Slices may not be contiguous, so every view becomes a reshape to the local shape."""
    return local.call("aten.reshape.default", local.args[0], local.result_shape())


@rule(*"_unsafe_view flatten ravel reshape reshape_as squeeze unflatten unsqueeze view view_as".split())
def reshape(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """Views of another shape: dims that are split or joined are sliced by their outermost factor."""
    result = operator.results[0]
    if result.dtype != specs[0].dtype or 0 in result.shape:
        return None  # a reinterpretation of bits, or nothing to slice
    left, right, sizes, alone = matched(specs[0].shape, result.shape)
    operands = [left, *[right] * (len(specs) - 1)]  # the second one has the wanted shape
    return sharding(operator, specs, operands, [right], local=reshaped, sizes=sizes, padded=alone)


@rule("to", "type_as")
def converted(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """The same elements in another precision. A second operand gives its dtype alone: it is sliced along where its
    dims are as long as the first one's, and replicated along the others."""
    (first, *others), dims = specs, numbered(len(specs[0].shape))
    along = [
        tuple(d if n == m else None for d, n, m in zip(_last(dims, rank), _last(first.shape, rank), shape, strict=True))
        for rank, shape in ((len(one.shape), one.shape) for one in others)
    ]
    return sharding(operator, specs, [dims, *along], [dims], padded=dims)


def _last(values: Sequence[Any], count: int) -> tuple[Any, ...]:
    """The last of some values; None in place of those that are too few."""
    return (*(None,) * (count - len(values)), *values[max(len(values) - count, 0) :])


def _order(operator: Operator, rank: int) -> list[int]:
    """The operand's dim that each dim of the result is."""
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
    dims = numbered(len(specs[0].shape))
    return sharding(operator, specs, [dims], [tuple(dims[i] for i in _order(operator, len(dims)))], padded=dims)


def _expand(operator: Operator, local: Local) -> Ref:
    return local.call("aten.expand.default", local.args[0], local.result_shape())


@rule("broadcast_to", "expand", "expand_as")
def expand(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """Dims that are new or grow from size 1 are factors of the result alone: every slice expands the same operand."""
    shape = operator.results[0].shape
    result = numbered(len(shape))
    operands = [*broadcast_dims(specs[:1], shape), *[result] * (len(specs) - 1)]  # the second one has the wanted shape
    return sharding(operator, specs, operands, [result], local=_expand, padded=result)


def _repeated(operator: Operator, specs: Sequence[TensorSpec], name: str, first: int) -> Sharding:
    """x repeated along dims: those that are repeated once are factors d0, d1, ..., the repetitions of the others are
    factors of the result alone (in complete repetitions), called `name` with numbers from `first`. A slice repeats its
    operand fewer times."""
    shape, counts = operator.results[0].shape, operator.args[1]
    times = (1,) * (len(shape) - len(counts)) + tuple(counts)
    result = tuple(f"{name}{first + i}" if n > 1 else f"d{i}" for i, n in enumerate(times))
    sizes = {factor: n for factor, n in zip(result, times, strict=True) if n > 1}
    operand = tuple(None if factor in sizes else factor for factor in result)[len(shape) - len(specs[0].shape) :]

    def program(operator: Operator, local: Local) -> Ref:
        own = [n // local.slices(factor) if n > 1 else n for n, factor in zip(times, result, strict=True)]
        return local.call(operator.target, local.args[0], own[len(shape) - len(counts) :])

    padded = [factor for factor in result if factor not in sizes] if operator.op == "tile" else ()
    return sharding(operator, specs, [operand], [result], local=program, sizes=sizes, padded=padded)


@rule("repeat")
def repeat(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x repeated along all dims of the result."""
    return _repeated(operator, specs, "m", 0)


@rule("tile")
def tile(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x repeated along dims, which count from the right."""
    return _repeated(operator, specs, "n", -len(operator.results[0].shape))


@rule("repeat_interleave")
def repeat_interleave(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """Each entry of a dim (without one: of the flattened tensor) repeated in its place, so a slice of the dim is
    repeated by itself. Where each entry is repeated as often as a tensor says, the dim stays replicated."""
    options, rank = arguments(operator), len(specs[0].shape)
    if "self" not in options or (len(specs) > 1 and options["dim"] is None):
        return None  # places of repeated entries, in a number that depends on values
    local = _repeat_interleave if options.get("output_size") is not None else None
    if options["dim"] is None:
        return sharding(operator, specs, [numbered(rank, range(1, rank))], [("d0",) if rank else (None,)], local=local)
    dim = options["dim"] % rank
    if len(specs) > 1:
        dims = numbered(rank, [dim])
        return sharding(operator, specs, [dims, (None,) * len(specs[1].shape)], [dims])
    dims = numbered(rank)
    return sharding(operator, specs, [dims], [dims], padded=numbered(rank, [dim]), local=local)


def _repeat_interleave(operator: Operator, local: Local) -> Ref:
    dim = arguments(operator)["dim"]
    return local.itself(output_size=local.result_shape()[0 if dim is None else dim])


@local_function
def triangle_slice(x: Tensor, lower: bool, diagonal: int, row: int, column: int) -> Tensor:
    """The lower or upper triangle of a matrix, of which x is the block that begins at (row, column)."""
    return x.tril(diagonal + row - column) if lower else x.triu(diagonal + row - column)


def _triangle(operator: Operator, local: Local) -> Ref:
    """The last two dims are a matrix, with the rest set to zero."""
    shape = local.operand_shape(0)
    row, column = (local.position(f"d{i}", shape[i]) for i in (len(shape) - 2, len(shape) - 1))
    diagonal = arguments(operator)["diagonal"]
    return local.call("local.triangle_slice", local.args[0], operator.op == "tril", diagonal, row, column)


line("... -> ...", "tril triu", padded=True, local=_triangle)


def _identity(operator: Operator, local: Local) -> Ref:
    return local.call("aten.alias.default", local.args[0])


def _every(operator: Operator, local: Local) -> Ref:
    """Equal slices that begin at multiples of the step: each takes the same elements of its own."""
    given, shape = local.arguments, local.operand_shape()
    local.slices(f"d{given['dim'] % len(shape)}")
    return local.itself(start=(given["start"] or 0) % given["step"], end=shape[given["dim"]])


@rule("slice")
def slice_(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x[start:end:step] along one dim. A slice of everything passes; of one that takes one of every `step` elements to
    the end, as gate and up that are interleaved, slices are as many as divide the result."""
    before, after = specs[0].shape, operator.results[0].shape
    if before == after:
        return notation("... -> ...", operator, specs, padded=True, local=_identity)
    given, dim = arguments(operator), dim_of(operator, len(before))
    step, start = given["step"], given["start"]
    if not (isinstance(step, int) and isinstance(start, int | None)) or after[dim] * step != before[dim] or step == 1:
        return notation("... -> ... ; !dim", operator, specs, padded=True)
    dims, others = numbered(len(before)), numbered(len(before), [dim])
    return sharding(operator, specs, [dims], [dims], local=_every, sizes={f"d{dim}": after[dim]}, padded=others)


@rule("diag_embed")
def diag_embed(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """The last dim as the diagonal of two dims."""
    rank, options = len(operator.results[0].shape), arguments(operator)
    result = numbered(rank, [options["dim1"] % rank, options["dim2"] % rank])
    return sharding(operator, specs, [(*filter(None, result), None)], [result], padded=result)


STACKS: dict[str, tuple[int, dict[int, tuple[int, ...]]]] = {
    "column_stack": (1, {1: (0,)}),
    "dstack": (2, {1: (1,), 2: (0, 1)}),
    "hstack": (1, {}),
    "row_stack": (0, {1: (1,)}),
    "vstack": (0, {1: (1,)}),
}
"""The dim along which tensors are joined; and the result's dims that tensors of too few dims have."""


@rule("stack", *STACKS)
def stacks(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """Tensors of equal rank joined along a given dim, or along a new one, after missing dims are added."""
    ranks, every = {len(spec.shape) for spec in specs}, len(operator.results[0].shape)
    (rank, *others) = ranks
    if operator.op == "stack":
        new = dim_of(operator, every)
        own: Sequence[int] = [i for i in range(every) if i != new]
    elif others or rank == 0:
        return None
    else:
        new, lacking = STACKS[operator.op] if (operator.op, rank) != ("hstack", 1) else (0, {})
        own = lacking.get(rank, range(every))
    dims = numbered(every, [new])
    return sharding(operator, specs, [tuple(dims[i] for i in own)] * len(specs), [dims], padded=dims)


@rule("meshgrid")
def meshgrid(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """Vectors [d0], [d1], ... -> each spread over all dims; indexing "xy" swaps the first two."""
    operands = [tuple(f"d{i}" for _ in spec.shape) for i, spec in enumerate(specs)]
    result = list(numbered(len(specs)))
    if operator.keywords.get("indexing") == "xy" and len(result) > 1:
        result[:2] = result[1::-1]
    return sharding(operator, specs, operands, [tuple(result)] * len(specs), padded=result)
