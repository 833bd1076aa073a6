"""Dynamic programming over the operator graph: the plan that costs least, with a certificate.

problem -> network of tables -> dominated options dropped -> repeated layers folded -> elimination -> assignments. The
lower bound is the least sum of the network; the cost is what the plan found costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from strategies.cost.cluster import Cluster
from strategies.graph import Ref
from strategies.layout import Layout
from strategies.rules.sharding import Assignment
from strategies.search.folding import Folded
from strategies.search.network import Building
from strategies.search.options import Menu
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


def search(problem: Problem, cluster: Cluster, tolerance: float | None = None) -> Found:
    """The cheapest plan, or one at most `tolerance` (relative to the bound) more expensive; None is 0 on meshes of
    one or two axes, and 1 % on larger ones."""
    transfers = Transfers(problem.mesh, cluster)
    if tolerance is None:
        tolerance = 0.01 if len(transfers.axes) > 2 else 1e-12
    menu = Menu(problem, transfers)
    building = Building(problem, menu)
    folded = Folded(building.network)
    best: Found | None = None
    lower = 0.0
    while True:
        picks, bound = folded.solve()
        lower = max(lower, bound)
        raised = building.settle(picks)
        cost = building.cost(picks)
        if best is None or cost < best.cost:
            best = Found(building.assignments(picks), building.tensors(picks), cost, lower)
        if best.cost - lower <= tolerance * lower:
            break
        split = building.underpaid(picks) if not raised or len(transfers.axes) > 2 else frozenset()
        if not raised and not split:
            break
        if split:
            building = Building(problem, menu, building.split | split)
            folded = Folded(building.network)
    return replace(best, lower_bound=min(lower, best.cost))
