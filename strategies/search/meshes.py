"""Factorisations of the ranks into the axes of a mesh, as far as they respect the levels of the cluster.

A factorisation says which prime axes are sliced with as one. The finest contains all others: a plan on a coarser one is
a plan on it. Axes that no operator tells apart are one axis of the mesh that was found. Invariant: no plan on a
factorisation takes less than `least` says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, combinations, pairwise, product

from strategies.core.mesh import Mesh
from strategies.core.mesh_refinement import Axes
from strategies.cost.cluster import Cluster
from strategies.rules.sharding import Assignment
from strategies.search.classes import Classes
from strategies.search.prices import Pricing

Factors = tuple[Axes, ...]
MOST_AXES = 6
"""Prime axes up to which recursive programming tries what lies between the finest and the levels."""
MOST_RUNS = 3
"""Axes of the coarser factorisations that are tried."""


def finest(mesh: Mesh) -> Factors:
    """The prime axes by themselves."""
    return tuple((name,) for name, size in mesh.axes if size > 1)


def factorisations(mesh: Mesh, cluster: Cluster, most: int = MOST_AXES) -> Iterator[Factors]:
    """The finest; then every way to join neighbours to at most three axes that end where levels end. Of a mesh of more
    than `most` prime axes only the levels."""
    yield finest(mesh)
    yield from joined(mesh, cluster, most)


def joined(mesh: Mesh, cluster: Cluster, most: int) -> Iterator[Factors]:
    """All of them but the finest."""
    names = tuple(name for name, size in mesh.axes if size > 1)
    ends = list(accumulate((mesh.sizes[name] for name in names), lambda left, right: left * right))
    levels = {place + 1 for place, end in enumerate(ends) if end in cluster.units(mesh.size)}
    others = [place for place in range(1, len(names)) if place not in levels] if len(names) <= most else []
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


def told_apart(mesh: Mesh, assignments: Mapping[str, Assignment]) -> Factors:
    """The axes of the mesh, neighbours that always slice together joined."""
    runs = {axes for assignment in assignments.values() for axes in assignment.values()}
    found: list[Axes] = [()]
    for axis, after in pairwise((*mesh.sorted(mesh.names), "")):
        found[-1] += (axis,)
        if after and not all((axis in run) == (after in run) and _follows(run, axis, after) for run in runs):
            found.append(())
    return tuple(run for run in found if run)


def _follows(run: Axes, axis: str, after: str) -> bool:
    return axis not in run or run[run.index(axis) + 1 :][:1] == (after,)


def refines(fine: Sequence[Axes], coarse: Sequence[Axes]) -> bool:
    """Whether every plan on `coarse` is a plan on `fine`: every end of an axis there is one here."""
    return {run[-1] for run in coarse} <= {run[-1] for run in fine}
