"""The mesh, where nobody named one: factorisations of the ranks that respect the levels of the cluster, each searched,
and the best one beside its runner-up.

A factorisation says which prime axes are sliced with as one. The finest leaves most choice, coarser ones keep a search
that goes axis by axis from small steps. Axes that no operator tells apart are one axis of the mesh that was found, and
only another mesh is a runner-up. Invariant: what is left out could not have been among the best two, because work
alone, cut as far as its axes allow, takes longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate, combinations, pairwise, product
from typing import Any

from strategies.cost.cluster import Cluster
from strategies.mesh import Mesh
from strategies.meshing import Axes
from strategies.rules.sharding import Assignment
from strategies.search.classes import Classes, classes
from strategies.search.prices import Pricing
from strategies.search.problem import Problem
from strategies.search.recursive import MOST_AXES, Found, apart, checked, in_rounds, prices

Factors = tuple[Axes, ...]
MOST_RUNS = 3
"""Axes of the coarser factorisations that are tried."""


@dataclass(frozen=True)
class Tried:
    """A mesh by the sizes of its axes, and the seconds of the best plan on it."""

    mesh: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class Chosen:
    """The best plan over all meshes, the best on another mesh, and how many were searched and left out."""

    assignments: Mapping[str, Assignment]
    best: Tried
    runner_up: Tried | None
    searched: int
    left_out: int

    def to_json(self) -> dict[str, Any]:
        """What a plan's `search` tells of it."""
        runner_up = None if self.runner_up is None else asdict(self.runner_up)
        return {"mesh": asdict(self.best), "runner_up": runner_up, "meshes": self.searched, "left_out": self.left_out}


def choose(problem: Problem, cluster: Cluster) -> Chosen:
    """The cheapest plan on any factorisation of the problem's mesh of prime axes. Raises StrategyError where none keeps
    the problem's memory."""
    pricing, alike = prices(problem, cluster), classes(problem)
    best: dict[tuple[int, ...], Found] = {}
    smallest: Found | None = None
    searched = left_out = 0
    finest, *coarser = factorisations(problem.mesh, cluster)
    bounds = {finest: 0.0} | {factors: least(pricing, alike, factors) for factors in coarser}
    for factors in sorted(bounds, key=bounds.__getitem__):
        if len(best) > 1 and bounds[factors] >= sorted(one.seconds for one in best.values())[1]:
            left_out += 1
            continue
        found = in_rounds(pricing, alike, factors)
        searched += 1
        if smallest is None or found.bytes < smallest.bytes:
            smallest = found
        if problem.memory is not None and found.bytes > problem.memory:
            continue
        told = told_apart(problem.mesh, found.assignments)
        if told not in best or found.seconds < best[told].seconds:
            best[told] = found
    if not best and smallest is not None:
        checked(problem, smallest)
    ranked = sorted(best, key=lambda sizes: best[sizes].seconds)
    tried = [Tried(sizes, best[sizes].seconds) for sizes in ranked[:2]]
    first = apart(pricing, best[ranked[0]])
    return Chosen(first.assignments, tried[0], tried[1] if len(tried) > 1 else None, searched, left_out)


def factorisations(mesh: Mesh, cluster: Cluster) -> Iterator[Factors]:
    """The prime axes by themselves; then every way to join neighbours to at most three axes that end where levels end.
    Of a mesh of many prime axes only the levels."""
    names = tuple(name for name, size in mesh.axes if size > 1)
    ends = list(accumulate((mesh.sizes[name] for name in names), lambda left, right: left * right))
    levels = {place + 1 for place, end in enumerate(ends) if end in cluster.units(mesh.size)}
    yield tuple((name,) for name in names)
    others = [place for place in range(1, len(names)) if place not in levels] if len(names) <= MOST_AXES else []
    for more in range(max(MOST_RUNS - len(levels), 1)):
        for chosen in combinations(others, more):
            cuts = sorted({0, *levels, *chosen, len(names)})
            factors = tuple(names[start:end] for start, end in pairwise(cuts))
            if len(factors) < len(names):
                yield factors


def least(pricing: Pricing, alike: Classes, factors: Factors) -> float:
    """A lower bound of any plan's seconds: every operator's work on one device, shared among as many as its loops can
    be cut for."""
    seconds = 0.0
    for members in alike.members:
        sizes = list(pricing.problem.shardings[members[0].id].sizes.values())
        widest = 1
        for placed in product(range(len(sizes) + 1), repeat=len(factors)):
            counts = [1] * (len(sizes) + 1)
            for place, run in zip(placed, factors, strict=True):
                counts[place] *= pricing.mesh.product(run)
            if all(size % count == 0 for size, count in zip(sizes, counts, strict=False)):
                widest = max(widest, pricing.mesh.size // counts[-1])
        fixed = pricing.problem.fixed.get(members[0].id)
        work = pricing.worked(members[0], fixed) if fixed is not None else pricing.worked(members[0], {}) / widest
        seconds += len(members) * work
    return seconds


def told_apart(mesh: Mesh, assignments: Mapping[str, Assignment]) -> tuple[int, ...]:
    """The sizes of the mesh after neighbours that always slice together are joined."""
    runs = {axes for assignment in assignments.values() for axes in assignment.values()}
    sizes = [1]
    for axis, after in pairwise((*mesh.names, "")):
        sizes[-1] *= mesh.sizes[axis]
        if not all((axis in run) == (after in run) and _follows(run, axis, after) for run in runs):
            sizes.append(1)
    return tuple(size for size in sizes if size > 1)


def _follows(run: Axes, axis: str, after: str) -> bool:
    return axis not in run or run[run.index(axis) + 1 :][:1] == (after,)
