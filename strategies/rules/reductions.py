"""Reductions: sums over sliced dims are partial sums; a mean divides by the number of slices too, so that its partial
sums add up to the mean. Other reductions (max, product, norms, ...) keep the dims that they reduce whole.

A dim that is not reduced may have padded slices where the slope is finite for every argument.
"""

from __future__ import annotations

from collections.abc import Sequence

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.arguments import named
from strategies.rules.pointwise import pointwise
from strategies.rules.registry import rule
from strategies.rules.sharding import Dims, Local, Sharding, sharding

LAST = frozenset({"kthvalue", "mode"})
"""Operators that reduce the last dim if none is given; the others reduce all."""
STEEP = frozenset({"linalg_matrix_norm", "linalg_norm", "linalg_vector_norm", "norm", "prod", "std", "std_mean"})
"""Operators whose gradient may be infinite, or not a number, where the argument is special."""


def _reduced(operator: Operator, rank: int) -> frozenset[int]:
    """The dims that the call reduces."""
    dims = named(operator.target, operator.args, operator.keywords).get("dim")
    if dims is None and operator.op in LAST:
        dims = -1
    if dims is None or dims in ((), []):
        dims = tuple(range(rank))
    each = (dims,) if isinstance(dims, int) else tuple(dims)
    return frozenset(dim % rank for dim in each) if rank else frozenset()


def _reduction(operator: Operator, specs: Sequence[TensorSpec], *, additive: bool) -> Sharding:
    """x [d0, d1, ...] -> the dims that are not reduced, with size 1 in place of the others if the result keeps them."""
    rank = len(specs[0].shape)
    reduced, keeps = _reduced(operator, rank), len(operator.results[0].shape) == rank
    names = [f"d{i}" for i in range(rank)]
    operand: Dims = tuple(name if additive or i not in reduced else None for i, name in enumerate(names))
    result: Dims = tuple(None if i in reduced else name for i, name in enumerate(names) if keeps or i not in reduced)
    return sharding(
        [operand],
        [result] * len(operator.results),
        specs,
        operator.results,
        sums=[names[i] for i in sorted(reduced)] if additive else [],
        local=_mean if operator.op == "mean" else None,
        uneven=() if operator.op in STEEP else [name for name in result if name],
    )


def _mean(operator: Operator, local: Local) -> Ref:
    value = local.call(operator.target, *local.args, **local.kwargs)
    slices = local.slices(*(f"d{dim}" for dim in _reduced(operator, len(local.operand_shape()))))
    return value if slices == 1 else local.call("aten.div.Tensor", value, slices)


@rule("count_nonzero", "mean", "nansum", "sum")
def additive(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    return _reduction(operator, specs, additive=True)


@rule(
    *"""
all amax amin aminmax any argmax argmin kthvalue linalg_matrix_norm linalg_norm linalg_vector_norm logsumexp median mode
nanmean nanmedian norm prod std std_mean var var_mean _is_all_true _is_any_true
""".split()
)
def whole_dims(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    return _reduction(operator, specs, additive=False)


@rule("max", "min")
def extremum(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """Of two tensors: pointwise. Over a dim, or all: that dim whole."""
    return pointwise(operator, specs) if len(specs) == 2 else _reduction(operator, specs, additive=False)


@rule("quantile", "nanquantile")
def quantile(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x over one dim, or over all; several quantiles [q] stand in front of the result."""
    options = named(operator.target, operator.args, operator.keywords)
    rank, front = len(specs[0].shape), [None for spec in specs[1:] for _ in spec.shape]
    if options["dim"] is None or not rank:
        return None
    dim = options["dim"] % rank
    operand: Dims = tuple(None if i == dim else f"d{i}" for i in range(rank))
    result = operand if options["keepdim"] else (*operand[:dim], *operand[dim + 1 :])
    return sharding([operand, *[tuple(front)] * (len(specs) - 1)], [(*front, *result)], specs, operator.results)


@rule("histc")
def histogram(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """Counts of the elements in bins of a given range: those of slices add up."""
    options = named(operator.target, operator.args, operator.keywords)
    if options["min"] == options["max"]:
        return None  # the range is that of the elements
    dims = tuple(f"d{i}" for i in range(len(specs[0].shape)))
    return sharding([dims], [(None,)], specs, operator.results, sums=dims)
