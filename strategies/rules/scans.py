"""Running sums, which can be sliced along their own dim too, given the totals of the slices before."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.notation import notation
from strategies.rules.registry import local_function, rule
from strategies.rules.selections import dim_of
from strategies.rules.sharding import Local, Sharding


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
    return notation("... -> ...", operator, specs, padded=True, local=_running_sum) if specs[0].shape else None
