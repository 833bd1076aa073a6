"""Recursive programming: the mesh is cut one axis at a time, and every round decides for all operators together which
loop the axis slices, or none.

Rounds go from the slowest link to the fastest: what an outer axis slices, the inner ones need not send, so an outer
round sees the largest tensors. A round has few choices per operator and is solved exactly; operators that are alike
(repeated layers) decide once. Afterwards single axes, and runs of neighbouring ones, are decided again with all others
fixed, until nothing gets cheaper. Configured operators have one choice throughout. On a mesh of few axes there is time
for more: redistributions are priced as the engine runs them, everything is also decided from the fastest link on,
beginning with whole tensors, and at the end operators of a graph that is not large decide for themselves though they
are alike.

On larger meshes redistributions are priced in closed form. Cost there: distinct operators x prime axes decisions over
layouts of as many axes, so it is linear in operators and grows with the square of the logarithm of the devices. Source
of the idea: Wang et al., "Efficient and Systematic Partitioning of Large and Deep Neural Networks for Parallelization"
(Euro-Par 2021), which halves by operators' weights; a round here weighs them all at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from strategies.cost.cluster import Cluster
from strategies.mesh import Mesh
from strategies.meshing import Axes
from strategies.rules.sharding import Assignment
from strategies.search.classes import Classes, classes
from strategies.search.direct import direct_seconds
from strategies.search.prices import Pricing
from strategies.search.problem import Problem
from strategies.search.rounds import Rounds

SWEEPS = 2
"""How often everything is decided again, at most."""
GAIN = 1e-3
"""A sweep that gains less, relative to the total, is the last one."""
MOST_AXES = 6
"""With more axes than these nothing is decided again: the rounds are the work that pays."""
FEW_AXES = 3
"""Up to these there is time for what the module's text says of few axes."""
FEW_OPERATORS = 300
"""Up to these operators that are alike decide for themselves at the end."""


def bisect(problem: Problem, cluster: Cluster, axes: Sequence[Axes] = ()) -> dict[str, Assignment]:
    """An assignment for every operator by id, whose sum of seconds is small. `axes` are the runs of mesh axes that are
    sliced with as one, outermost first: those that a user named, else every axis by itself."""
    pricing = prices(problem, cluster)
    return apart(pricing, in_rounds(pricing, classes(problem), axes)[0], axes)


def prices(problem: Problem, cluster: Cluster) -> Pricing:
    """What the rounds reckon with."""
    return Pricing(problem, cluster) if _few(problem.mesh) else Pricing(problem, cluster, direct_seconds)


def in_rounds(pricing: Pricing, alike: Classes, axes: Sequence[Axes] = ()) -> tuple[dict[str, Assignment], float]:
    """`bisect` of classes, with prices that are known already: the assignments, and their seconds."""
    runs, rounds = _units(pricing.mesh, axes), Rounds(pricing, alike)
    total = [rounds.decide(run, staying=False) for run in runs][-1]
    if len(runs) <= MOST_AXES:
        total = _decide_again(rounds, runs)
    if _few(pricing.mesh) and len(runs) > 1:
        other = Rounds(pricing, alike)
        other.start([fixed or {} for fixed in other.fixed])
        if (cheaper := _decide_again(other, runs[::-1])) < total:
            rounds, total = other, cheaper
    return {id: rounds.chosen[number] for id, number in alike.of.items()}, total


def apart(pricing: Pricing, chosen: Mapping[str, Assignment], axes: Sequence[Axes] = ()) -> dict[str, Assignment]:
    """`chosen`, where there is time for it with every operator decided again for itself."""
    if not _few(pricing.mesh) or len(pricing.problem.graph.operators) > FEW_OPERATORS:
        return dict(chosen)
    return _again(pricing, classes(pricing.problem, apart=True), chosen, axes)


def refine(
    problem: Problem, cluster: Cluster, chosen: Mapping[str, Assignment], axes: Sequence[Axes] = ()
) -> dict[str, Assignment]:
    """`chosen`, with other strategies where they make the whole cheaper; configured operators stay."""
    pricing = prices(problem, cluster)
    return apart(pricing, _again(pricing, classes(problem, chosen), chosen, axes), axes)


def _again(
    pricing: Pricing, alike: Classes, chosen: Mapping[str, Assignment], axes: Sequence[Axes]
) -> dict[str, Assignment]:
    rounds = Rounds(pricing, alike)
    rounds.start([chosen[head.id] for head in alike.heads])
    _decide_again(rounds, _units(pricing.mesh, axes))
    return {id: rounds.chosen[number] for id, number in alike.of.items()}


def _few(mesh: Mesh) -> bool:
    return len(mesh.sorted(mesh.names)) <= FEW_AXES


def _units(mesh: Mesh, axes: Sequence[Axes]) -> list[Axes]:
    return [run for run in axes if run] or [(axis,) for axis in mesh.names]


def _decide_again(rounds: Rounds, axes: Sequence[Axes]) -> float:
    """Sweeps over all axes and runs of them, until one gains little. Returns the seconds of the whole."""
    total = math.inf
    for _ in range(SWEEPS):
        before = total
        for run in _runs(axes):
            total = rounds.decide(run, staying=True)
        if total > before * (1 - GAIN):
            break
    return total


def _runs(axes: Sequence[Axes]) -> Iterator[Axes]:
    """Every axis, then all axes before and all axes behind every place, and all."""
    yield from axes
    for place in range(1, len(axes)):
        yield tuple(chain.from_iterable(axes[:place]))
        yield tuple(chain.from_iterable(axes[place:]))
    yield tuple(chain.from_iterable(axes))
