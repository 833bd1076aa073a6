"""Dynamic programming over the operator graph: the plan that costs least, with a certificate.

problem -> network of tables -> repeated layers folded -> elimination -> assignments, see `finding`. Networks that are
too wide for that are narrowed first. On meshes of more than `MOST_AXES` axes the search goes from classes of layouts to
layouts (`coarse`). A parameter with several uses has no class: up to `MOST_SHARED` axes its layouts are compared one by
one, and beyond neighbouring axes are joined: the best plan of all joined meshes is taken, and the gap is that to what
work alone takes on the whole mesh, or to the bound of classes (`proven`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from strategies.core.errors import StrategyError
from strategies.core.gc_paused import gc_paused
from strategies.cost.cluster import Cluster
from strategies.search.coarse import Coarse, shared
from strategies.search.finding import Finding, Found
from strategies.search.frontier import Frontier
from strategies.search.halved import halved
from strategies.search.joining import Joined, joinings, least, on_runs
from strategies.search.kept import too_large
from strategies.search.meshes import Factors, finest
from strategies.search.options import Menu
from strategies.search.prices import Pricing
from strategies.search.problem import Problem
from strategies.search.transfers import Transfers

MOST_AXES = 3
"""Axes up to which every layout is an option from the beginning."""
MOST_SHARED = 4
"""The same, where a parameter has several uses."""
MOST_PRIMES = 12
"""Prime axes up to which classes of layouts are compared."""
CERTAIN = 0.01
"""A plan that costs at most so much more than the bound of all plans, relative to it, is the best there is."""


class Exact:
    """The search on one problem, for one limit of memory after another: what was priced for one is known for the next.

    It finds the cheapest plan, or one at most `tolerance` (relative to the bound) more expensive; None is 0 on meshes
    of one or two axes, and 1 % on larger ones. With a limit or more than `MOST_AXES` axes the gap may stay larger.
    """

    def __init__(self, problem: Problem, cluster: Cluster, tolerance: float | None = None) -> None:
        self.problem, self.cluster = problem, cluster
        self.transfers = Transfers(problem.mesh, cluster)
        self.axes = len(self.transfers.axes)
        self.tolerance = (0.01 if self.axes > 2 else 1e-12) if tolerance is None else tolerance

    def within(self, memory: float | None) -> Found:
        """The plan for so many bytes of a rank. Raises StrategyError where none is found."""
        if self.axes > MOST_AXES and not shared(self.problem):
            free = self._coarse.free
            return free if memory is None or free.bytes <= memory else self._coarse.within(memory)
        if self.axes > MOST_SHARED:
            return self._on_joined(memory)
        return self._frontier.free() if memory is None else self._frontier.within(memory)

    @cached_property
    def _coarse(self) -> Coarse:
        return Coarse(self.problem, self.transfers, self.tolerance)

    @cached_property
    def _frontier(self) -> Frontier:
        menu = Menu(self.problem, self.transfers)
        return Frontier(Finding(self.problem, menu, self.tolerance, wide=self.axes > MOST_AXES))

    @cached_property
    def _joined(self) -> list[tuple[Joined, Exact]]:
        found = list(joinings(self.problem, self.cluster))
        return [(one, Exact(one.problem, self.cluster, self.tolerance)) for one in found]

    def _on_joined(self, memory: float | None) -> Found:
        """The best plan of the joined meshes, and its seconds on the whole one; that of rounds, where configured
        layouts tell the axes of every joined mesh apart."""
        best: Found | None = None
        refused: StrategyError | None = None
        for joined, exact in self._joined:
            try:
                found = exact.within(memory)
            except StrategyError as error:  # a limit that no plan on this mesh keeps
                refused = error
                continue
            if best is None or found.cost < best.cost:
                best = joined.whole(found)
        if best is None and refused is not None:
            raise refused
        if best is None:
            best = rounds(replace(self.problem, memory=memory), self.cluster)
        cost = Pricing(self.problem, self.cluster).total(best.assignments, best.tensors)
        return replace(best, cost=cost, lower_bound=min(least(self.problem, self.cluster), cost))


def rounds(problem: Problem, cluster: Cluster) -> Found:
    """The plan of recursive programming. Raises StrategyError where it does not keep the problem's memory."""
    found = halved(problem, cluster)
    if problem.memory is not None and found.bytes > problem.memory:
        raise too_large(problem.memory, found.bytes)
    return found


def search(problem: Problem, cluster: Cluster, tolerance: float | None = None) -> Found:
    """The plan within the problem's memory, see `Exact`."""
    return Exact(problem, cluster, tolerance).within(problem.memory)


def proven(problem: Problem, cluster: Cluster, found: Found) -> Found:
    """`found` with a better bound, where joined axes gave it and it is not certain: that of classes, for which a
    parameter with several uses is wherever each of them needs it. Takes up to seconds."""
    axes = len(finest(problem.mesh))
    if not (MOST_SHARED < axes <= MOST_PRIMES and shared(problem)) or found.gap <= CERTAIN:
        return found
    with gc_paused():
        bound = Coarse(problem, Transfers(problem.mesh, cluster), CERTAIN).least(found.cost / (1 + CERTAIN))
    return replace(found, lower_bound=max(found.lower_bound, min(bound, found.cost)))


def on_mesh(problem: Problem, cluster: Cluster, factors: Factors) -> Callable[[float | None], Found] | None:
    """`Exact.within` on the mesh of these axes, with the bound of plans there; None where configured layouts tell axes
    apart that are one."""
    if all(len(run) == 1 for run in factors):
        return Exact(problem, cluster).within
    joined = on_runs(problem, factors)
    if joined is None:
        return None
    exact = Exact(joined.problem, cluster)
    return lambda memory: joined.whole(exact.within(memory))
