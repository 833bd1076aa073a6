"""Recursive programming: the mesh is cut one axis at a time, and every round decides for all operators together which
loop the axis slices, or none.

Rounds go from the slowest link to the fastest: what an outer axis slices, the inner ones need not send, so an outer
round sees the largest tensors. A round has few choices per operator and is solved exactly; operators that are alike
(repeated layers) decide once. Afterwards single axes, and runs of neighbouring ones, are decided again with all others
fixed, until nothing gets cheaper. Configured operators have one choice throughout. On a mesh of few axes there is time
for more: redistributions are priced as the engine runs them, everything is also decided in other orders of the axes,
beginning with whole tensors, and at the end operators of a graph that is not large decide for themselves though they
are alike. A limit of memory enters as seconds per byte that a rank keeps.

On larger meshes redistributions are priced in closed form. Cost there: distinct operators x prime axes decisions over
layouts of as many axes, so it is linear in operators and grows with the square of the logarithm of the devices. Source
of the idea: Wang et al., "Efficient and Systematic Partitioning of Large and Deep Neural Networks for Parallelization"
(Euro-Par 2021), which halves by operators' weights; a round here weighs them all at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from strategies.core.gc_paused import gc_paused
from strategies.core.mesh import Mesh
from strategies.core.mesh_refinement import Axes
from strategies.cost.cluster import Cluster
from strategies.rules.sharding import Assignment
from strategies.search.classes import Classes, classes
from strategies.search.direct import direct_seconds
from strategies.search.kept import operator_bytes, too_large
from strategies.search.prices import Pricing
from strategies.search.problem import Problem
from strategies.search.rounds import Rounds

SWEEPS = 2
"""How often everything is decided again, at most."""
GAIN = 1e-3
"""A sweep that gains less, relative to the total, is the last one."""
MOST_AXES = 6
"""With more axes than these nothing is decided again: the rounds are the work that pays."""
PRICES = 12
"""Prices of a byte that are tried at most."""
FEW_AXES = 3
"""Up to these there is time for what the module's text says of few axes."""
FEW_OPERATORS = 300
"""Up to these operators that are alike decide for themselves at the end."""


@dataclass(frozen=True)
class Found:
    """Assignments by operator id, their seconds, the bytes that a rank keeps, and what a byte cost when they were
    found."""

    assignments: dict[str, Assignment]
    seconds: float
    bytes: float
    pressure: float = 0.0


def bisect(problem: Problem, cluster: Cluster, axes: Sequence[Axes] = ()) -> dict[str, Assignment]:
    """An assignment for every operator by id, whose sum of seconds is small. `axes` are the runs of mesh axes that are
    sliced with as one, outermost first: those that a user named, else every axis by itself. Raises StrategyError where
    no plan within the problem's memory is found."""
    with gc_paused():
        pricing = prices(problem, cluster)
        return checked(problem, apart(pricing, in_rounds(pricing, classes(problem), axes), axes)).assignments


def checked(problem: Problem, found: Found) -> Found:
    """Raises StrategyError for a plan that keeps more than the problem's memory."""
    if problem.memory is not None and found.bytes > problem.memory:
        raise too_large(problem.memory, found.bytes)
    return found


def prices(problem: Problem, cluster: Cluster) -> Pricing:
    """What the rounds reckon with."""

    def make() -> Pricing:
        return Pricing(problem, cluster) if _few(problem.mesh) else Pricing(problem, cluster, direct_seconds)

    return problem.once(("prices", cluster), make)


def in_rounds(pricing: Pricing, alike: Classes, axes: Sequence[Axes] = ()) -> Found:
    """`bisect` of classes, with prices that are known already. Where a limit of memory is not kept, a byte costs
    seconds, as few as are needed, found by bisection; the smallest plan if none keeps it."""
    limit, best = pricing.problem.memory, _pressed(pricing, alike, axes, 0.0)
    if limit is None or best.bytes <= limit:
        return best
    low, high = 0.0, best.seconds / limit
    for _ in range(PRICES):
        within = best.bytes <= limit
        price = (low + high) / 2 if within else high
        found = _pressed(pricing, alike, axes, price)
        low, high = (low, price) if found.bytes <= limit else (price, high if within else high * 8)
        best = min(best, found, key=lambda one: (max(one.bytes, limit), one.seconds))
    return best


def _rounds(pricing: Pricing, alike: Classes, pressure: float) -> Rounds:
    """One for all that is decided about these classes at these prices."""
    key = "rounds", id(pricing), id(alike), pressure
    return pricing.problem.once(key, lambda: Rounds(pricing, alike, pressure))


def _pressed(pricing: Pricing, alike: Classes, axes: Sequence[Axes], pressure: float) -> Found:
    runs, first = _units(pricing.mesh, axes), _rounds(pricing, alike, pressure)
    rounds = first.begun()
    total = [rounds.decide(run, staying=False) for run in runs][-1]
    if len(runs) <= MOST_AXES:
        total = _decide_again(rounds, runs)
    others = {tuple(runs[::-1]), (*runs[1:], runs[0])} if _few(pricing.mesh) and len(runs) > 1 else set()
    for order in sorted(others):
        other = first.begun(decided=pricing.mesh.names)
        if (cheaper := _decide_again(other, order)) < total:
            rounds, total = other, cheaper
    return _told(rounds, total)


def _told(rounds: Rounds, total: float) -> Found:
    """`total` has the price of the bytes in it."""
    alike, problem, found = rounds.classes, rounds.problem, 0.0
    if rounds.pressure or problem.memory is not None:
        for members, chosen in zip(alike.members, rounds.chosen, strict=True):
            found += sum(operator_bytes(problem, member, chosen) for member in members)
    assignments = {id: rounds.chosen[number] for id, number in alike.of.items()}
    return Found(assignments, total - rounds.pressure * found, found, rounds.pressure)


def apart(pricing: Pricing, found: Found, axes: Sequence[Axes] = ()) -> Found:
    """What was found, where there is time for it with every operator decided again for itself."""
    problem = pricing.problem
    if not _few(pricing.mesh) or len(problem.graph.operators) > FEW_OPERATORS:
        return found
    again = _again(pricing, classes(problem, apart=True), found, axes)
    kept = problem.memory is None or again.bytes <= max(found.bytes, problem.memory)
    return again if kept and again.seconds < found.seconds else found


def refine(problem: Problem, cluster: Cluster, chosen: Mapping[str, Assignment], axes: Sequence[Axes] = ()) -> Found:
    """`chosen`, with other strategies where they make the whole cheaper; configured operators stay."""
    pricing, given = prices(problem, cluster), Found(dict(chosen), math.inf, math.inf)
    return apart(pricing, _again(pricing, classes(problem, chosen), given, axes), axes)


def _again(pricing: Pricing, alike: Classes, given: Found, axes: Sequence[Axes]) -> Found:
    chosen = [given.assignments[head.id] for head in alike.heads]
    rounds = _rounds(pricing, alike, given.pressure).begun(chosen, pricing.mesh.names)
    return _told(rounds, _decide_again(rounds, _units(pricing.mesh, axes)))


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
