"""Operators that make a larger tensor from one or several: the dims that grow stay replicated, the others pass.

Repetition is an exception: where each element is repeated in its place every slice is repeated locally, and where a
complete dim is repeated the repetitions are a factor.
"""

from __future__ import annotations

from collections.abc import Sequence

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.arguments import named
from strategies.rules.registry import rule
from strategies.rules.selections import dim_of, named_dims, passing, same_dims
from strategies.rules.sharding import Dims, Local, Sharding, sharding


@rule("constant_pad_nd", "pad")
def pad(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """pad(x, (last dim's left, right, the dim before's left, ...)), in every mode."""
    rank, widths = len(specs[0].shape), operator.args[1]
    return same_dims(operator, specs, [rank - 1 - i // 2 for i, width in enumerate(widths) if width])


def _joined(operator: Operator, specs: Sequence[TensorSpec], new: int, kept: Sequence[int] | None = None) -> Sharding:
    """Tensors joined along dim `new` of the result; `kept` are the result's dims that the tensors have (None: all)."""
    dims = passing(len(operator.results[0].shape), [new])
    own = dims if kept is None else tuple(dims[i] for i in kept)
    return sharding([own] * len(specs), [dims], specs, operator.results, padded=named_dims(dims))


@rule("stack")
def stack(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """Tensors joined along a new dim."""
    rank = len(operator.results[0].shape)
    new = dim_of(operator, rank)
    return _joined(operator, specs, new, [i for i in range(rank) if i != new])


STACKS: dict[str, tuple[int, dict[int, tuple[int, ...]]]] = {
    "column_stack": (1, {1: (0,)}),
    "dstack": (2, {1: (1,), 2: (0, 1)}),
    "hstack": (1, {}),
    "row_stack": (0, {1: (1,)}),
    "vstack": (0, {1: (1,)}),
}
"""The dim along which tensors are joined; and the result's dims that tensors of too few dims have."""


@rule(*STACKS)
def stacks(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """Tensors of equal rank joined along a given dim, after missing dims are added."""
    new, lacking = STACKS[operator.op]
    ranks = {len(spec.shape) for spec in specs}
    (rank, *others) = ranks
    if others or rank == 0:
        return None
    if operator.op == "hstack" and rank == 1:
        new = 0
    return _joined(operator, specs, new, lacking.get(rank))


@rule("meshgrid")
def meshgrid(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """Vectors [d0], [d1], ... -> each spread over all dims; indexing "xy" swaps the first two."""
    operands = [tuple(f"d{i}" for _ in spec.shape) for i, spec in enumerate(specs)]
    result = [f"d{i}" for i in range(len(specs))]
    if operator.keywords.get("indexing") == "xy" and len(result) > 1:
        result[:2] = result[1::-1]
    return sharding(operands, [tuple(result)] * len(specs), specs, operator.results, padded=result)


@rule("repeat_interleave")
def repeat_interleave(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """Each entry of a dim (without one: of the flattened tensor) repeated in its place, so a slice of the dim is
    repeated by itself. Where each entry is repeated as often as a tensor says, the dim stays replicated."""
    options = named(operator.target, operator.args, operator.keywords)
    if "self" not in options:
        return None  # places of repeated entries, in a number that depends on values
    rank, dim = len(specs[0].shape), options["dim"]
    if len(specs) > 1:
        if dim is None:
            return None
        dims = passing(rank, [dim % rank])
        return sharding([dims, (None,) * len(specs[1].shape)], [dims], specs, operator.results)
    if dim is None:
        own: Dims = tuple("d0" if i == 0 else None for i in range(rank))
        return sharding([own], [("d0",) if rank else (None,)], specs, operator.results)
    dims = passing(rank, ())
    padded = [name for i, name in enumerate(named_dims(dims)) if i != dim % rank]
    return sharding([dims], [dims], specs, operator.results, padded=padded)


def _tile(operator: Operator, local: Local) -> Ref:
    own = operator.args[1]
    counts = [count // local.slices(f"n{i - len(own)}") for i, count in enumerate(own)]
    return local.call(operator.target, local.args[0], counts)


@rule("tile")
def tile(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x repeated along dims, counted from the right: dims that are repeated once pass, and the repetitions of the
    others are factors of the result (in complete repetitions)."""
    shape, counts = operator.results[0].shape, operator.args[1]
    times = (1,) * (len(shape) - len(counts)) + tuple(counts)
    result = tuple(f"n{i - len(shape)}" if n > 1 else f"d{i}" for i, n in enumerate(times))
    operand = tuple(None if n > 1 else f"d{i}" for i, n in enumerate(times))[len(shape) - len(specs[0].shape) :]
    sizes = {name: n for name, n in zip(result, times, strict=True) if n > 1}
    padded = [name for name in result if name.startswith("d")]
    return sharding([operand], [result], specs, operator.results, local=_tile, sizes=sizes, padded=padded)
