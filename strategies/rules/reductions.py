"""Reductions. A sum over a sliced dim leaves a partial sum, a mean a partial sum of local means divided by the slices;
the others need the dims whole over which they reduce."""

from __future__ import annotations

from collections.abc import Sequence

from strategies.graph import Operator, Ref, TensorSpec
from strategies.rules.pointwise import pointwise
from strategies.rules.registry import rule
from strategies.rules.sharding import Dims, Local, Sharding, sharding

SECOND = frozenset({"linalg_vector_norm"})
"""Operators whose dims are the second argument after the tensor (the first is the order)."""
LAST = frozenset({"mode"})
"""Operators that reduce the last dim if none is given; the others reduce all."""


def _reduced(operator: Operator, rank: int) -> frozenset[int]:
    """The dims that the call reduces."""
    arguments = operator.args[2:] if operator.op in SECOND else operator.args[1:]
    dims = operator.keywords.get("dim", arguments[0] if arguments else None)
    if dims is None and operator.op in LAST:
        dims = -1
    if dims is None or dims == () or isinstance(dims, bool):  # a bool is `unbiased` of a call without dims
        dims = tuple(range(rank))
    named = (dims,) if isinstance(dims, int) else tuple(dims)
    return frozenset(dim % rank for dim in named) if rank else frozenset()


def _reduction(operator: Operator, specs: Sequence[TensorSpec], *, additive: bool) -> Sharding:
    """x [d0, d1, ...] -> the dims that are not reduced, with size 1 in place of the others if the result keeps them."""
    rank = len(specs[0].shape)
    reduced, keeps = _reduced(operator, rank), len(operator.results[0].shape) == rank
    names = [f"d{i}" for i in range(rank)]
    operand: Dims = tuple(name if additive or i not in reduced else None for i, name in enumerate(names))
    result: Dims = tuple(None if i in reduced else name for i, name in enumerate(names) if keeps or i not in reduced)
    sums = [names[i] for i in sorted(reduced)] if additive else []
    local = _mean if operator.op == "mean" else None
    return sharding([operand], [result] * len(operator.results), specs, operator.results, sums=sums, local=local)


def _mean(operator: Operator, local: Local) -> Ref:
    value = local.call(operator.target, *local.args, **local.kwargs)
    slices = local.slices(*(f"d{dim}" for dim in _reduced(operator, len(local.operand_shape()))))
    return value if slices == 1 else local.call("aten.div.Tensor", value, slices)


@rule("sum", "mean", "count_nonzero")
def additive(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    return _reduction(operator, specs, additive=True)


@rule(
    *"all amax amin any argmax argmin linalg_vector_norm logsumexp median mode prod std std_mean var var_mean".split()
)
def whole_dims(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    return _reduction(operator, specs, additive=False)


@rule("max", "min")
def extremum(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """Of two tensors: pointwise. Over a dim, or all: that dim whole."""
    return pointwise(operator, specs) if len(specs) == 2 else _reduction(operator, specs, additive=False)
