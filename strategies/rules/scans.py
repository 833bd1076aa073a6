"""Operators in which the order along one dim matters: running sums and products, sorting, differences. That dim stays
whole, the others pass; running sums alone can be sliced along their own dim, given the totals of the slices before.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.registry import local_function, rule
from strategies.rules.selections import dim_of, named_dims, passing, same_dims
from strategies.rules.sharding import Local, Sharding, sharding


@local_function
def after_slices(own: Tensor, totals: Tensor, before: int) -> Tensor:
    """A slice's running sums plus the totals [slices, ...] of the first `before` slices, shaped like one entry."""
    return own + totals[:before].sum(0).to(own.dtype)


def _running_sum(operator: Operator, local: Local) -> Ref:
    own = local.call(operator.target, *local.args, **local.kwargs)
    shape = list(local.operand_shape(0))
    dim = dim_of(operator, len(shape))
    if local.slices(f"d{dim}") == 1:
        return own
    last = local.call("aten.slice.Tensor", own, dim, shape[dim] - 1, shape[dim])
    totals = local.gather_over(last, f"d{dim}", shape=(*shape[:dim], 1, *shape[dim + 1 :]))
    return local.call("local.after_slices", own, totals, local.position(f"d{dim}"))


@rule("cumsum")
def running_sum(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """Padding stands behind everything else, so that it reaches only padding."""
    if not specs[0].shape:
        return None
    dims = tuple(f"d{i}" for i in range(len(specs[0].shape)))
    return sharding([dims], [dims], specs, operator.results, local=_running_sum, uneven=dims)


@rule("cumprod", "logcumsumexp")
def running(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """Whose gradient may not be a number for what padding holds."""
    if not specs[0].shape:
        return None
    dims = passing(len(specs[0].shape), [dim_of(operator, len(specs[0].shape))])
    return sharding([dims], [dims], specs, operator.results)


@rule("argsort", "cummax", "cummin", "sort", "topk")
def ordered(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """Values and places, or one of them, along one dim."""
    if not specs[0].shape:
        return None
    return same_dims(operator, specs, [dim_of(operator, len(specs[0].shape))])


@rule("msort")
def sorted_rows(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """Sorted along the dim 0."""
    return same_dims(operator, specs, [0]) if specs[0].shape else None


@rule("diff")
def differences(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x, and what stands in front of it and behind it along the dim."""
    rank = len(specs[0].shape)
    if rank == 0 or any(len(spec.shape) != rank for spec in specs):
        return None
    dims = passing(rank, [dim_of(operator, rank)])
    return sharding([dims] * len(specs), [dims], specs, operator.results, uneven=named_dims(dims))
