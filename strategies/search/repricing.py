"""What sharding propagation ends with: the plan that it followed step by step, or one that costs less around the same
configured operators.

A model with repeated layers, many products or large ones takes the cheapest of what was followed, of that with single
operators decided again, and of what rounds find: what propagation met once it decided for all layers, so a neighbour
that it left dearer than need be is paid as often. A small net keeps what can be followed by hand, on all devices,
unless its products are all configured, so that nothing is left to follow, or that costs `DEARER` times the cheapest on
more than `FEW_RANKS` devices. Either way both prices are told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from strategies.core.graph import Operator
from strategies.core.mesh_refinement import Meshing
from strategies.cost.cluster import Cluster
from strategies.rules.sharding import Assignment
from strategies.search.classes import classes, repeats
from strategies.search.kept import plan_bytes
from strategies.search.problem import Problem
from strategies.search.propagation import propagate
from strategies.search.recursive import Found, apart, in_rounds, prices, refine

FOLLOWED = 8
"""Products of a net that can be followed by hand."""
LIGHT = 1e9
"""Flops of all products of a net whose plan hardly matters."""
FEW_RANKS, DEARER = 16, 2.0
"""Ranks on which what can be followed by hand is; on more it may cost so many times the seconds of the cheapest plan:
slices for all of them are then smaller than what it takes to call for them."""


Pricer = Callable[[Mapping[str, Assignment]], float]
"""Assignments by operator id -> seconds of a step."""


@dataclass(frozen=True)
class Propagated:
    """Assignments by operator id, and whether propagation reached it; seconds of the plan that was followed step by
    step, and of the cheapest that was found; which of the two it is; and the assignments of both."""

    found: dict[str, tuple[Assignment, bool]]
    followed: float
    cheapest: float
    by_price: bool
    both: tuple[Mapping[str, Assignment], ...]

    def to_json(self) -> dict[str, Any] | None:
        """What a plan's `search` tells of it; None where one of the two plans cannot run."""
        if math.isinf(max(self.followed, self.cheapest)):
            return None
        return {"followed": self.followed, "cheapest": self.cheapest, "by_price": self.by_price}


def propagated(problem: Problem, meshing: Meshing, cluster: Cluster, price: Pricer | None = None) -> Propagated:
    """The plan from the configured operators outward; `price` says what a plan costs, if it is not the sum of its
    parts. Raises StrategyError where there are none."""
    reached = propagate(problem, meshing, cluster)
    pricing, limit = prices(problem, cluster), problem.memory or math.inf
    chosen = {id: assignment for id, (assignment, _) in reached.items()}
    followed = Found(chosen, pricing.total(chosen), plan_bytes(problem, chosen))
    refined, alike = refine(problem, cluster, chosen, meshing.fixed), classes(problem)
    around = [
        apart(pricing, in_rounds(pricing, alike, axes), meshing.fixed)
        for axes in (meshing.fixed, (problem.mesh.names,))  # from all axes as one, too
    ]
    best = min((followed, refined, *around), key=lambda one: (max(one.bytes, limit), one.seconds))
    if price is not None:
        followed = replace(followed, seconds=price(chosen))
        best = followed if best.assignments == chosen else replace(best, seconds=price(best.assignments))
        best = min(followed, best, key=lambda one: (max(one.bytes, limit), one.seconds))
    near = problem.mesh.size <= FEW_RANKS or followed.seconds <= DEARER * best.seconds
    by_hand = near and math.isfinite(followed.seconds) and _small(problem) and not _settled(problem)
    by_price = best is not followed and not by_hand
    taken = best.assignments if by_price else chosen
    found = {id: (taken[id], arrived) for id, (_, arrived) in reached.items()}
    return Propagated(found, followed.seconds, best.seconds, by_price, (chosen, best.assignments))


def _small(problem: Problem) -> bool:
    flops = [
        sharding.flops for operator in problem.graph.operators if (sharding := problem.shardings[operator.id]).sums
    ]
    return len(flops) <= FOLLOWED and sum(flops) <= LIGHT and not repeats(problem)


def _settled(problem: Problem) -> bool:
    """Whether two products or more are all configured."""
    products = [operator.id for operator in problem.graph.operators if _is_product(problem, operator)]
    return len(products) > 1 and all(id in problem.fixed for id in products)


def _is_product(problem: Problem, operator: Operator) -> bool:
    """Sums over what two operands have in common, and leaves something to slice."""
    sharding = problem.shardings[operator.id]
    common = [set(dims) & sharding.sums for dims in sharding.operands]
    return sum(map(bool, common)) > 1 and any(factor for dims in sharding.results for factor in dims)
