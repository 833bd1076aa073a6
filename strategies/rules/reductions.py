"""Reductions that are no line of notation: quantiles, whose number stands in front of the result, and histograms;
running sums, which can be sliced along their own dim too, given the totals of the slices before; and distances between
the vectors of two tensors, whose own dim stays replicated.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.notation import notation
from strategies.rules.registry import arguments, dim_of, local_function, rule
from strategies.rules.sharding import Local, Sharding, numbered, sharding
from strategies.rules.table import line

MATRIX_PRODUCT, ONE_BY_ONE, FEW = 1, 2, 25
"""How torch computes distances (`compute_mode`), one by one up to so many vectors on both sides."""


@rule("quantile", "nanquantile")
def quantile(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x over one dim, or over all; several quantiles [q] stand in front of the result."""
    options = arguments(operator)
    rank, front = len(specs[0].shape), [None for spec in specs[1:] for _ in spec.shape]
    if options["dim"] is None or not rank:
        return None
    dim = options["dim"] % rank
    operand = numbered(rank, [dim])
    result = operand if options["keepdim"] else (*operand[:dim], *operand[dim + 1 :])
    return sharding(operator, specs, [operand, *[tuple(front)] * (len(specs) - 1)], [(*front, *result)])


@rule("histc")
def histogram(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """Counts of the elements in bins of a given range: those of slices add up. None for the range of the elements."""
    options, dims = arguments(operator), numbered(len(specs[0].shape))
    return None if options["min"] == options["max"] else sharding(operator, specs, [dims], [(None,)], sums=dims)


@local_function
def after_slices(own: Tensor, totals: Tensor, before: int) -> Tensor:
    """A slice's running sums plus the totals [slices, ...] of the first `before` slices, shaped like one entry."""
    return own + totals[:before].sum(0).to(own.dtype)


def _running_sum(operator: Operator, local: Local) -> Ref:
    own = local.itself()
    shape = list(local.operand_shape(0))
    dim = dim_of(operator, len(shape))
    if local.slices(f"d{dim}") == 1:
        return own
    last = local.call("aten.slice.Tensor", own, dim, shape[dim] - 1, shape[dim])
    totals = local.gather_over(last, f"d{dim}", shape=(*shape[:dim], 1, *shape[dim + 1 :]))
    return local.call("local.after_slices", own, totals, local.position(f"d{dim}"))


# padding stands behind everything else, so that it reaches only padding
line("d0 ... -> d0 ...", "cumsum", padded=True, local=_running_sum)


def _distances(operator: Operator, local: Local) -> Ref:
    """As torch would compute all distances."""
    mode = MATRIX_PRODUCT if max(local.size("p"), local.size("r")) > FEW else ONE_BY_ONE
    return local.itself(compute_mode=int(arguments(operator)["compute_mode"] or mode))


@rule("cdist")
def cdist(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x [..., p, v], y [..., r, v] -> distances [..., p, r]."""
    flops = 2.0 * operator.results[0].elements * specs[0].shape[-1]
    return notation("... p !v, ... r !v -> ... p r", operator, specs, local=_distances, flops=flops)
