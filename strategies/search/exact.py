"""Dynamic programming over the operator graph: the plan that costs least, with a certificate.

problem -> network of tables -> repeated layers folded -> elimination -> assignments, see `finding`. On meshes of more
than `MOST_AXES` axes the search goes from classes of layouts to layouts (`coarse`). Where that can not be done (a
parameter has several uses, or a table would be too large) neighbouring axes are joined: the best plan of all joined
meshes is taken, and the gap is that to what work alone takes on the whole mesh.
"""

from __future__ import annotations

from dataclasses import replace

from strategies.cost.cluster import Cluster
from strategies.errors import StrategyError
from strategies.search.coarse import Coarse, shared
from strategies.search.elimination import LARGEST, TooWide
from strategies.search.finding import Finding, Found
from strategies.search.joining import joinings, least
from strategies.search.options import Menu
from strategies.search.prices import Pricing
from strategies.search.problem import Problem
from strategies.search.transfers import Transfers

MOST_AXES = 3
"""Axes up to which every layout is an option from the beginning."""


def search(problem: Problem, cluster: Cluster, tolerance: float | None = None) -> Found:
    """The cheapest plan within the memory limit, or one at most `tolerance` (relative to the bound) more expensive;
    None is 0 on meshes of one or two axes, and 1 % on larger ones. With a limit or more than `MOST_AXES` axes the gap
    may stay larger. Raises StrategyError where no plan within the limit is found."""
    transfers = Transfers(problem.mesh, cluster)
    if tolerance is None:
        tolerance = 0.01 if len(transfers.axes) > 2 else 1e-12
    if len(transfers.axes) > MOST_AXES and (best := _on_many(problem, transfers, tolerance)) is not None:
        return best
    finding = Finding(problem, Menu(problem, transfers), tolerance)
    try:
        free = finding.cheapest(0.0)
    except TooWide:
        if (best := _on_joined(problem, cluster, tolerance)) is not None:
            return best
        raise StrategyError(
            f"parallel.search = dynamic_programming would need a table of more than {LARGEST:,} entries on this mesh, "
            "because some operator meets many others. Use parallel.search=recursive_programming, a mesh of fewer "
            "axes, or configure some strategies."
        ) from None
    if problem.memory is None or free.bytes <= problem.memory:
        return free
    return finding.within(problem.memory, free)


def _on_many(problem: Problem, transfers: Transfers, tolerance: float) -> Found | None:
    """As `search` on a mesh of many axes; None where its axes can neither be told alike nor be joined."""
    if shared(problem):
        return _on_joined(problem, transfers.cluster, tolerance)
    try:
        coarse = Coarse(problem, transfers, tolerance)
        free = coarse.cheapest()
        if problem.memory is None or free.bytes <= problem.memory:
            return free
        return coarse.within(problem.memory, free)
    except TooWide:
        return _on_joined(problem, transfers.cluster, tolerance)


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
