"""Dynamic programming over the operator graph: the plan that costs least, with a certificate.

problem -> network of tables -> repeated layers folded -> elimination -> assignments, see `finding`. Networks that are
too wide for that are narrowed first. On meshes of more than `MOST_AXES` axes the search goes from classes of layouts to
layouts (`coarse`). A parameter with several uses has no class: up to `MOST_SHARED` axes its layouts are compared one by
one, and beyond neighbouring axes are joined: the best plan of all joined meshes is taken, and the gap is that to what
work alone takes on the whole mesh.
"""

from __future__ import annotations

from dataclasses import replace

from strategies.cost.cluster import Cluster
from strategies.errors import StrategyError
from strategies.search.coarse import Coarse, shared
from strategies.search.finding import Finding, Found
from strategies.search.joining import joinings, least
from strategies.search.options import Menu
from strategies.search.prices import Pricing
from strategies.search.problem import Problem
from strategies.search.transfers import Transfers

MOST_AXES = 3
"""Axes up to which every layout is an option from the beginning."""
MOST_SHARED = 4
"""The same, where a parameter has several uses."""


def search(problem: Problem, cluster: Cluster, tolerance: float | None = None) -> Found:
    """The cheapest plan within the memory limit, or one at most `tolerance` (relative to the bound) more expensive;
    None is 0 on meshes of one or two axes, and 1 % on larger ones. With a limit or more than `MOST_AXES` axes the gap
    may stay larger. Raises StrategyError where no plan within the limit is found, or layouts are too many."""
    transfers = Transfers(problem.mesh, cluster)
    axes = len(transfers.axes)
    if tolerance is None:
        tolerance = 0.01 if axes > 2 else 1e-12
    if axes > MOST_AXES and not shared(problem):
        coarse = Coarse(problem, transfers, tolerance)
        free = coarse.cheapest()
        return free if problem.memory is None or free.bytes <= problem.memory else coarse.within(problem.memory, free)
    if axes > MOST_SHARED:
        best = _on_joined(problem, cluster, tolerance)
        if best is None:
            raise StrategyError(
                f"parallel.search = dynamic_programming has too many layouts to compare on a mesh of {axes} axes where "
                "a parameter has several uses and configured layouts tell neighbouring axes apart. Use "
                "parallel.search=recursive_programming, or a mesh of fewer axes."
            )
        return best
    finding = Finding(problem, Menu(problem, transfers), tolerance, wide=axes > MOST_AXES)
    free = finding.cheapest(0.0)
    return free if problem.memory is None or free.bytes <= problem.memory else finding.within(problem.memory, free)


def _on_joined(problem: Problem, cluster: Cluster, tolerance: float) -> Found | None:
    """The best plan of the joined meshes, and its seconds on the whole one; None where axes cannot be joined."""
    best: Found | None = None
    refused: StrategyError | None = None
    for joined in joinings(problem, cluster):
        try:
            found = search(joined.problem, cluster, tolerance)
        except StrategyError as error:  # a limit that no plan on this mesh keeps
            refused = error
            continue
        if best is None or found.cost < best.cost:
            assignments = {id: joined.assignment(one) for id, one in found.assignments.items()}
            tensors = {ref: joined.layout(one) for ref, one in found.tensors.items()}
            best = replace(found, assignments=assignments, tensors=tensors)
    if best is None:
        if refused is not None:
            raise refused
        return None
    cost = Pricing(problem, cluster).total(best.assignments, best.tensors)
    return replace(best, cost=cost, lower_bound=min(least(problem, cluster), cost))
