"""The choice of an unspecified mesh: factorisations of the ranks into axes, and the best of them.

A factorisation joins prime axes of a problem's mesh into axes that slice as one. It respects the topology: every axis
is within one level of the cluster, so each group of ranks that communicates is either inside a unit or across units.
`coarsened` states a problem on such a mesh; a plan there is a plan on the prime axes, with the same layouts and bytes.

`choose` bounds every factorisation below, searches those that could be among the best two, and returns the best with
its runner-up. The search is a parameter. What bounds the plans of a factorisation bounds those of all that it refines.
Invariant: a pruned factorisation could not have been the best, nor among the best two where plans on two meshes are
known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, combinations, pairwise, product
from typing import Any

from strategies.core.errors import StrategyError
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.mesh_refinement import Axes, grouped
from strategies.cost.cluster import Cluster
from strategies.cost.plan_cost import MOST_AXES, approximate_cost
from strategies.cost.problem import Problem
from strategies.rules.sharding import Assignment
from strategies.search.equivalence_classes import equivalence_classes
from strategies.search.solution import Solution, too_large

Factorisation = tuple[Axes, ...]
"""Runs of prime axes, outermost first; each run is one axis."""
ENOUGH = 2
"""Factorisations with the same best plan after which no runner-up is searched for."""


def finest(mesh: Mesh) -> Factorisation:
    """The prime axes by themselves."""
    return tuple((name,) for name, size in mesh.axes if size > 1)


def factorisations(mesh: Mesh, cluster: Cluster) -> list[Factorisation]:
    """All groupings of neighbouring axes of `mesh` into at most `MOST_AXES` that end where levels of the cluster end.

    The finest comes first where it has so few axes, then those that divide the innermost units, where links are fast:
    their plans prune most others. Of more levels than axes, some levels are joined.
    """
    names = tuple(name for name, size in mesh.axes if size > 1)
    ends = list(accumulate((mesh.sizes[name] for name in names), lambda left, right: left * right))
    levels = [place + 1 for place, end in enumerate(ends[:-1]) if end in cluster.units(mesh.size)]
    others = [place for place in range(1, len(names)) if place not in levels]
    most = MOST_AXES - 1
    chosen = [
        tuple(sorted((*levels, *more)))
        for count in range(most - len(levels) + 1)
        for more in combinations(others, count)
    ]
    if len(levels) > most:
        chosen = list(combinations(levels, most))
    found = [tuple(names[a:b] for a, b in pairwise((0, *cuts, len(names)))) for cuts in chosen] if names else [()]
    return sorted(reversed(found), key=lambda runs: runs != finest(mesh))


def least_work(problem: Problem, cluster: Cluster, factorisation: Factorisation) -> float:
    """Seconds below those of any plan on a factorisation: every operator's work on one device, divided by the largest
    number of devices that its loops can be cut for."""
    cost, seconds = approximate_cost(problem, cluster), 0.0
    runs = [problem.mesh.product(run) for run in factorisation]

    @cache
    def widest(sizes: tuple[int, ...]) -> int:
        """Devices that loops of these sizes can be cut for."""
        most = 1
        for placed in product(range(len(sizes) + 1), repeat=len(runs)):
            counts = [1] * (len(sizes) + 1)
            for place, run in zip(placed, runs, strict=True):
                counts[place] *= run
            if all(size % count == 0 for size, count in zip(sizes, counts, strict=False)):
                most = max(most, problem.mesh.size // counts[-1])
        return most

    for members in equivalence_classes(problem).members:
        fixed = problem.fixed.get(members[0].id)
        work = cost.operator(members[0], fixed or {})
        if fixed is None:
            work /= widest(tuple(sorted(problem.shardings[members[0].id].sizes.values())))
        seconds += len(members) * work
    return seconds


def mesh_of(mesh: Mesh, assignments: Mapping[str, Assignment]) -> Factorisation:
    """The coarsest factorisation on which a plan exists: neighbours that always slice together are one axis."""
    runs = {axes for assignment in assignments.values() for axes in assignment.values()}
    return tuple(grouped(mesh.sorted(mesh.names), runs))


def refines(fine: Sequence[Axes], coarse: Sequence[Axes]) -> bool:
    """Whether every plan on `coarse` is a plan on `fine`: every end of an axis there is one here."""
    return {run[-1] for run in coarse} <= {run[-1] for run in fine}


@dataclass(frozen=True)
class Coarsened:
    """A problem on a mesh whose axes stand for runs of axes of another; each has the name of the first of its run."""

    problem: Problem
    runs: Factorisation

    def refined(self, found: Solution) -> Solution:
        """A plan with the axes of the original mesh."""
        assignments = {
            id: {factor: self._axes(axes) for factor, axes in one.items()} for id, one in found.assignments.items()
        }
        tensors = {
            ref: Layout(tuple(map(self._axes, one.dims)), frozenset(self._axes(tuple(one.partial))))
            for ref, one in found.tensors.items()
        }
        return replace(found, assignments=assignments, tensors=tensors)

    def _axes(self, axes: Axes) -> Axes:
        runs = {run[0]: run for run in self.runs}
        return tuple(name for axis in axes for name in runs[axis])


def coarsened(problem: Problem, runs: Factorisation) -> Coarsened | None:
    """The problem on the mesh of these axes; None where a configured layout separates axes of one run."""
    if all(len(run) == 1 for run in runs):
        return Coarsened(problem, runs)
    mesh = Mesh(tuple((run[0], problem.mesh.product(run)) for run in runs))
    single = frozenset(axis for axis, size in problem.mesh.axes if size == 1)
    layouts = [*problem.inputs.values(), *(one for group in problem.outputs.values() for one in group)]
    used = {axes for one in layouts for axes in (*one.dims, problem.mesh.sorted(one.partial))}
    used |= {axes for fixed in problem.fixed.values() for axes in fixed.values()}
    names = {axes: _names(tuple(axis for axis in axes if axis not in single), runs) for axes in used}
    if None in names.values():
        return None
    joined = {axes: found for axes, found in names.items() if found is not None}

    def layout(one: Layout) -> Layout:
        return Layout(tuple(joined[axes] for axes in one.dims), frozenset(joined[problem.mesh.sorted(one.partial)]))

    made = replace(
        problem,
        mesh=mesh,
        inputs={name: layout(one) for name, one in problem.inputs.items()},
        outputs={id: tuple(map(layout, group)) for id, group in problem.outputs.items()},
        fixed={id: {factor: joined[axes] for factor, axes in one.items()} for id, one in problem.fixed.items()},
    )
    return Coarsened(made, runs)


def _names(axes: Axes, runs: Factorisation) -> Axes | None:
    """The names of the runs that `axes` consist of."""
    found: list[str] = []
    while axes:
        run = next((run for run in runs if axes[: len(run)] == run), None)
        if run is None:
            return None
        found.append(run[0])
        axes = axes[len(run) :]
    return tuple(found)


@dataclass(frozen=True)
class Chosen:
    """The best plan over all factorisations; `lower_bound` of any plan on one of them (0: unknown), and the best plan
    on another mesh. `searched` factorisations are known, `pruned` ones could not be among the best two."""

    best: Solution
    lower_bound: float
    second: Solution | None
    searched: int
    pruned: int

    def to_json(self, mesh: Mesh) -> dict[str, Any]:
        """The keys `mesh`, `runner_up`, `meshes` and `left_out` of a plan's `search`."""
        best = mesh_to_json(mesh, self.best.assignments, self.best.cost)
        second = self.second and mesh_to_json(mesh, self.second.assignments, self.second.cost)
        return {"mesh": best, "runner_up": second, "meshes": self.searched, "left_out": self.pruned}


def mesh_to_json(mesh: Mesh, assignments: Mapping[str, Assignment], seconds: float) -> dict[str, Any]:
    """The coarsest mesh of a plan, by the sizes of its axes, with its seconds."""
    return {"mesh": tuple(mesh.product(run) for run in mesh_of(mesh, assignments)), "seconds": seconds}


Search = Callable[[Factorisation, float], Solution | float]
"""Factorisation, seconds -> the best plan there; or, where none takes less than these seconds or none is worth more of
a search, seconds that any takes at least. Raises StrategyError where no plan keeps the memory limit."""


def choose(problem: Problem, bounds: Mapping[Factorisation, float], search: Search) -> Chosen:
    """The cheapest plan on any factorisation; `bounds` are seconds below those of any plan on each.

    Raises:
        StrategyError: no plan on any factorisation keeps the problem's memory limit.
    """
    lower = dict(bounds)
    best: dict[Factorisation, Solution] = {}
    """By the coarsest mesh that a plan needs."""
    smallest: float | None = None
    refused: StrategyError | None = None
    searched = pruned = 0
    for runs in sorted(lower, key=lower.__getitem__):
        costs = sorted(one.cost for one in best.values())
        enough = costs[1] if len(costs) > 1 else costs[0] if costs and searched >= ENOUGH else math.inf
        try:
            found = search(runs, enough) if lower[runs] < enough else lower[runs]
        except StrategyError as error:
            refused, lower[runs] = refused or error, math.inf
            continue
        if isinstance(found, float):
            pruned, lower[runs] = pruned + 1, max(lower[runs], found)
            continue
        searched += 1
        for other in lower:
            if refines(runs, other):
                lower[other] = max(lower[other], found.lower_bound)
        if problem.memory is not None and found.bytes > problem.memory:
            smallest = min(smallest or found.bytes, found.bytes)
            continue
        mesh = mesh_of(problem.mesh, found.assignments)
        if mesh not in best or found.cost < best[mesh].cost:
            best[mesh] = found
    if not best:
        if problem.memory is not None and smallest is not None:
            raise too_large(problem.memory, smallest)
        assert refused is not None
        raise refused
    first, *others = sorted(best.values(), key=lambda one: one.cost)
    return Chosen(first, min(first.cost, *lower.values()), others[0] if others else None, searched, pruned)
