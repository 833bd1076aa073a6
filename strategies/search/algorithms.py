"""The searches that minimise the cost of a complete plan, by the algorithm's name in a request: on a configured mesh,
or over all meshes that respect the topology.

Invariant: both return a plan on the problem's own prime axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from strategies.core.gc_paused import gc_paused
from strategies.core.mesh_refinement import Axes
from strategies.cost.cluster import Cluster
from strategies.cost.plan_cost import PlanCost, few_axes
from strategies.cost.problem import Problem
from strategies.memory.estimate import plan_bytes
from strategies.search.dynamic_programming import exact_search
from strategies.search.mesh_choice import finest
from strategies.search.recursive_programming import (
    GAIN,
    SWEPT_AXES,
    partitioned,
    recursive_choice,
    recursive_search,
    refined,
)
from strategies.search.solution import Solution


@dataclass(frozen=True)
class Searched:
    """A plan, what its `search` says in plan.json, and the best plan on another mesh where the mesh was open."""

    solution: Solution
    search: Mapping[str, Any] = field(default_factory=dict)
    second: Solution | None = None


Solve = Callable[[float | None], Searched]
"""Finds plans of one problem for a memory limit in bytes per rank; evaluations for one limit are reused for the next.
Raises StrategyError where no plan within the limit is found."""
Algorithm = Callable[[Problem, Cluster, tuple[Axes, ...] | None], Solve]
"""Problem, cluster, and the axes that a user named (as runs of the problem's; empty: its own) or None for an open
mesh."""


@gc_paused()
def dynamic_programming(problem: Problem, cluster: Cluster, axes: tuple[Axes, ...] | None) -> Solve:
    """The cheapest plan with its certificate; on more than three axes that of recursive programming, without one."""
    exact = exact_search(problem, cluster, axes)

    @gc_paused()
    def solve(memory: float | None) -> Searched:
        if exact is None:
            heuristic = recursive_programming(problem, cluster, axes)(memory)
            found = heuristic.solution
            cost = PlanCost(problem, cluster).total(found.assignments, found.tensors)
            return replace(heuristic, search={**heuristic.search, **certificate(cost, 0.0)})
        chosen = exact.within(memory)
        if axes is None:
            chosen = replace(chosen, best=_on_all_axes(problem.within(memory), cluster, chosen.best))
        found = chosen.best
        search = certificate(found.cost, chosen.lower_bound) | {"bytes": found.bytes}
        return Searched(found, search if axes is not None else search | chosen.to_json(problem.mesh), chosen.second)

    return solve


def _on_all_axes(problem: Problem, cluster: Cluster, found: Solution) -> Solution:
    """The best plan on at most three axes with single prime axes decided again, where that costs less. Where it gains
    more than little, on few axes, recursive programming on all prime axes is tried, too."""
    if few_axes(problem.mesh):
        return found
    best = _cheaper(problem, cluster, found, refined(problem, cluster, found.assignments, single=True))
    if best.cost > found.cost * (1 - GAIN) or len(finest(problem.mesh)) > SWEPT_AXES:
        return best
    return _cheaper(problem, cluster, best, partitioned(problem, cluster))


def _cheaper(problem: Problem, cluster: Cluster, found: Solution, other: Solution) -> Solution:
    """The plan that costs less on the cluster, of those within the memory limit."""
    cost, size = PlanCost(problem, cluster).total(other.assignments), plan_bytes(problem, other.assignments)
    if cost >= found.cost or (problem.memory is not None and size > problem.memory):
        return found
    return Solution(other.assignments, cost, size, found.lower_bound)


def recursive_programming(problem: Problem, cluster: Cluster, axes: tuple[Axes, ...] | None) -> Solve:
    """A cheap plan; on an open mesh the best of those on all meshes."""

    @gc_paused()
    def solve(memory: float | None) -> Searched:
        limited = problem.within(memory)
        if axes is not None:
            found = recursive_search(limited, cluster, axes)
            return Searched(found, {"bytes": plan_bytes(limited, found.assignments)})
        chosen = recursive_choice(limited, cluster)
        return Searched(chosen.best, chosen.to_json(problem.mesh) | {"bytes": chosen.best.bytes}, chosen.second)

    return solve


ALGORITHMS: Mapping[str, Algorithm] = {
    "dynamic_programming": dynamic_programming,
    "recursive_programming": recursive_programming,
}


def certificate(cost: float, bound: float) -> dict[str, Any]:
    """The keys `cost`, `lower_bound` and `gap` of a plan's `search`; the last two are null where there is no bound."""
    if bound <= 0 < cost:
        return {"cost": cost, "lower_bound": None, "gap": None}
    bound = min(bound, cost)
    return {"cost": cost, "lower_bound": bound, "gap": (cost - bound) / bound if bound > 0 else 0.0}
