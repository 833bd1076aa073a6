"""Recursive programming: the mesh is cut one axis at a time, and every round decides for all operators together which
loop the axis slices, or none.

Rounds go from the slowest link to the fastest: what an outer axis slices, the inner ones need not send, so an outer
round sees the largest tensors. A round has few choices per operator and is solved exactly; operators that are alike
(repeated layers) decide once. Afterwards single axes, and runs of neighbouring ones, are decided again with all others
fixed, until nothing gets cheaper. Configured operators have one choice throughout.

Redistributions are priced in closed form. Cost: distinct operators x axes, so it is linear in operators and logarithmic
in devices. Source of the idea: Wang et al., "Efficient and Systematic Partitioning of Large and Deep Neural Networks
for Parallelization" (Euro-Par 2021), which halves by operators' weights; a round here weighs them all at once.
"""

from __future__ import annotations

from collections.abc import Iterator

from strategies.cost.cluster import Cluster
from strategies.mesh import Mesh
from strategies.rules.sharding import Assignment
from strategies.search.classes import classes
from strategies.search.direct import direct_seconds
from strategies.search.pricing import Pricing
from strategies.search.problem import Problem
from strategies.search.rounds import Rounds

SWEEPS = 3
"""How often everything is decided again, at most."""
GAIN = 1e-3
"""A sweep that gains less, relative to the total, is the last one."""


def bisect(problem: Problem, cluster: Cluster) -> dict[str, Assignment]:
    """An assignment for every operator by id, whose sum of seconds is small."""
    alike = classes(problem)
    rounds = Rounds(Pricing(problem, cluster, direct_seconds), alike)
    total = 0.0
    for axis in problem.mesh.names:
        total = rounds.decide((axis,), staying=False)
    for _ in range(SWEEPS):
        before = total
        for run in _runs(problem.mesh):
            total = rounds.decide(run, staying=True)
        if total > before * (1 - GAIN):
            break
    return {
        operator.id: rounds.chosen[number] for operator in problem.graph.operators for number in [alike.of[operator.id]]
    }


def _runs(mesh: Mesh) -> Iterator[tuple[str, ...]]:
    """Every axis, then all axes before and all axes behind every place."""
    names = mesh.names
    yield from ((axis,) for axis in names)
    for place in range(1, len(names)):
        yield names[:place]
        yield names[place:]
    yield names
