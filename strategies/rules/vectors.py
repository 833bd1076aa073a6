"""Cross products and distances of vectors: the dim of the vectors stays whole, the others pass."""

from __future__ import annotations

from collections.abc import Sequence

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.arguments import changed, named
from strategies.rules.notation import broadcast_dims
from strategies.rules.registry import rule
from strategies.rules.sharding import Local, Sharding, sharding

SMALL = 25
"""Up to so many vectors on both sides torch takes distances one by one; beyond, by a matrix product."""


def _distances(operator: Operator, local: Local) -> Ref:
    args, kwargs = changed(operator.target, local.args, local.kwargs, compute_mode=_mode(operator, local))
    return local.call(operator.target, *args, **kwargs)


def _mode(operator: Operator, local: Local) -> int:
    """How torch would compute the whole: 1 by a matrix product, 2 one by one."""
    given = named(operator.target, operator.args, operator.keywords)["compute_mode"]
    return int(given or (1 if max(local.size("p"), local.size("r")) > SMALL else 2))


@rule("cdist")
def cdist(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x [..., p, v], y [..., r, v] -> distances [..., p, r]."""
    batch = operator.results[0].shape[:-2]
    leads = broadcast_dims([TensorSpec(spec.shape[:-2], spec.dtype) for spec in specs], batch)
    lead = tuple(f"d{i}" for i in range(len(batch)))
    return sharding(
        [(*leads[0], "p", None), (*leads[1], "r", None)],
        [(*lead, "p", "r")],
        specs,
        operator.results,
        local=_distances,
        flops=2.0 * operator.results[0].elements * specs[0].shape[-1],
    )
