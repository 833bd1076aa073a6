"""Dynamic programming over the operator graph: the plan that costs least, with a certificate.

problem -> network of tables -> dominated options dropped -> repeated layers folded -> elimination -> assignments. The
lower bound is the least sum of the network; the cost is what the plan found costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from strategies.cost.cluster import Cluster
from strategies.graph import Ref
from strategies.layout import Layout
from strategies.rules.sharding import Assignment
from strategies.search.folding import solve
from strategies.search.network import Building
from strategies.search.options import Menu
from strategies.search.pricing import plan_seconds
from strategies.search.problem import Problem
from strategies.search.transfers import Transfers


@dataclass(frozen=True)
class Found:
    """A plan: assignments by operator id, layouts of parameters with several uses; seconds of a step, and the least
    that any plan takes."""

    assignments: Mapping[str, Assignment]
    tensors: Mapping[Ref, Layout]
    cost: float
    lower_bound: float

    @property
    def gap(self) -> float:
        """How much cheaper, relative to the bound, a plan can be at most."""
        return (self.cost - self.lower_bound) / self.lower_bound if self.lower_bound > 0 else 0.0


def search(problem: Problem, cluster: Cluster) -> Found:
    """The cheapest plan."""
    menu = Menu(problem, Transfers(problem.mesh, cluster))
    building = Building(problem, menu)
    while True:
        picks, bound = solve(building.network)
        if building.settle(picks):
            continue
        underpaid = building.underpaid(picks)
        if underpaid <= building.split:
            break
        building = Building(problem, menu, building.split | underpaid)
    assignments, tensors = building.assignments(picks), building.tensors(picks)
    cost = plan_seconds(menu, assignments, tensors, problem)
    return Found(assignments, tensors, cost, min(bound, cost))
