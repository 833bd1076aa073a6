"""Distances between the vectors of two tensors, whose own dim stays replicated."""

from __future__ import annotations

from collections.abc import Sequence

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.arguments import changed, named
from strategies.rules.notation import notation
from strategies.rules.registry import rule
from strategies.rules.sharding import Local, Sharding

SMALL = 25
"""Up to this many vectors on both sides torch computes distances one by one; beyond, by a matrix product."""


def _distances(operator: Operator, local: Local) -> Ref:
    args, kwargs = changed(operator.target, local.args, local.kwargs, compute_mode=_mode(operator, local))
    return local.call(operator.target, *args, **kwargs)


def _mode(operator: Operator, local: Local) -> int:
    """How torch would compute all distances: 1 by a matrix product, 2 one by one."""
    given = named(operator.target, operator.args, operator.keywords)["compute_mode"]
    return int(given or (1 if max(local.size("p"), local.size("r")) > SMALL else 2))


@rule("cdist")
def cdist(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x [..., p, v], y [..., r, v] -> distances [..., p, r]."""
    flops = 2.0 * operator.results[0].elements * specs[0].shape[-1]
    return notation("... p !v, ... r !v -> ... p r", operator, specs, local=_distances, flops=flops)
