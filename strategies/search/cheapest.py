"""Which of a few plans takes the shortest step as it runs, and below what no plan's step is.

A search adds up parts, a step may take less than that: so what the searches find is priced again as it will run, and
the cheapest is taken. Its bound is that of all plans at the prices of `strategies.search.sure`. The plans that these
searches find, for which overlap counts in full, are candidates too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from strategies.core.errors import StrategyError
from strategies.core.graph import Ref
from strategies.core.mesh_refinement import Axes
from strategies.core.plan import Plan
from strategies.cost.cluster import Cluster
from strategies.cost.roofline import operator_work
from strategies.search.finding import Found
from strategies.search.joining import least
from strategies.search.meshes import finest, told_apart
from strategies.search.prices import Pricing
from strategies.search.problem import Problem
from strategies.search.solving import Solved, exact_within
from strategies.search.sure import ALMOST, BACKWARD, SHARE, Relaxed, Running, apart, parted, shared

FEW_AXES = 3
"""Prime axes up to which several bounds are searched for."""


@dataclass(frozen=True)
class StepPrice:
    """`seconds` of a step of a plan as it runs. `running` is what is known of that for all plans (None: too little for
    a search), `floor` are seconds below those of any plan."""

    seconds: Callable[[Plan], float]
    running: Running | None = None
    floor: float = 0.0


@dataclass(frozen=True)
class Priced:
    """A plan that was found, and the seconds of its step."""

    solved: Solved
    seconds: float


def least_seconds(
    problem: Problem, cluster: Cluster, axes: tuple[Axes, ...] | None, running: Running
) -> Iterator[tuple[float, Solved | None]]:
    """Seconds below those of a step of any plan, and the plan that comes nearest to them at such prices, if one was
    searched: several, each from other prices."""

    def found(relaxed: Relaxed) -> tuple[float, Solved | None]:
        within = exact_within(relaxed.problem, relaxed.cluster, axes)
        one: Found | None = None
        if within is not None:
            try:
                one = within(problem.memory)
            except StrategyError:
                one = within(None)  # a bound of more plans
        bound = least(problem, cluster) if one is None else one.lower_bound
        solved = None if one is None else Solved(one.assignments, one.tensors)
        return problem.turns * bound + relaxed.more + running.constant, solved

    few = len(finest(problem.mesh)) <= FEW_AXES
    ways = [partial(shared, problem, cluster, running)]
    if few:
        ways.insert(0, partial(apart, problem, cluster, running, parted=parted(problem, cluster)))
    bounds = []
    for way in ways:
        bounds.append(found(way(mixture=SHARE)))
        yield bounds[-1]
    (high, solved), better = max(zip(bounds, ways, strict=True), key=lambda one: one[0][0])
    slope = 0.0 if solved is None or not few else slack(problem, cluster, solved)
    if slope >= 0:
        return  # backward takes longer than the share that it may hide: no other mixture is higher
    low, solved = found(better(mixture=BACKWARD))
    yield low, solved
    rise = 0.0 if solved is None else slack(problem, cluster, solved)
    if rise > 0:  # bounds are concave: the highest is about where the lines through both cross
        yield found(better(mixture=min(max((high - slope - low) / (rise - slope), BACKWARD), SHARE)))


def slack(problem: Problem, cluster: Cluster, solved: Solved) -> float:
    """Seconds of a step by which backward is longer than the share of adding gradients that it may hide; 0 where
    nothing is hidden."""
    graph, chosen = problem.graph, solved.assignments
    if not problem.overlaps or problem.stage:
        return 0.0
    parameters = [Ref(source.id) for source in graph.of_kind("parameter")]

    def carried(made: Problem) -> float:
        pricing = Pricing(made, cluster)
        return sum(pricing.carried(ref, chosen, solved.tensors.get(ref)) for ref in parameters)

    backward = sum(
        operator_work(problem.shardings[one.id], chosen[one.id], one, graph, problem.mesh, cluster).backward
        for one in graph.operators
        if one.id in graph.returning
    )
    return backward - problem.turns * (carried(replace(problem, overlaps=False)) - carried(problem))


def cheapest(
    first: Priced,
    bounds: Iterator[tuple[float, Solved | None]],
    more: Iterator[Solved],
    price: Callable[[Solved], float],
) -> tuple[list[Priced], float]:
    """Every plan that was priced, the cheapest first, and the best bound. Once a plan is as cheap as a bound nothing
    more is searched; of bounds, once one is `ALMOST` as high."""
    priced, bound = [first], 0.0

    def add(one: Solved) -> None:
        if all(one.assignments != other.solved.assignments for other in priced):
            priced.append(Priced(one, price(one)))

    for found, solved in bounds:
        bound = max(bound, found)
        if solved is not None:
            add(solved)
        if min(one.seconds for one in priced) <= bound * (1 + ALMOST):
            break
    if min(one.seconds for one in priced) > bound * (1 + 1e-9):
        for one in more:
            add(one)
    return sorted(priced, key=lambda one: one.seconds), bound


def certificate(cost: float, bound: float) -> dict[str, Any]:
    """What a plan's `search` tells of its cost."""
    bound = min(bound, cost)
    return {"cost": cost, "lower_bound": bound, "gap": (cost - bound) / bound if bound > 0 else 0.0}


def of_meshes(problem: Problem, priced: list[Priced]) -> dict[str, Any]:
    """The mesh of the first plan, and the first on another mesh, with their seconds."""
    meshes = [told_apart(problem.mesh, one.solved.assignments) for one in priced]
    told: list[dict[str, Any]] = [
        {"mesh": tuple(problem.mesh.product(run) for run in mesh), "seconds": one.seconds}
        for mesh, one in zip(meshes, priced, strict=True)
    ]
    other = next((one for mesh, one in zip(meshes, told, strict=True) if mesh != meshes[0]), None)
    return {"mesh": told[0], "runner_up": other}


COMPARED = ("mesh", "runner_up", "meshes", "left_out", "propagation")
"""What `search` tells of other plans."""


def priced_at(told: Mapping[str, Any], cost: float | None, bound: float | None = None) -> dict[str, Any]:
    """`search` of a plan that costs another number of seconds than those that it was compared by (None: nobody knows),
    where no plan costs less than `bound` (None: as it says)."""
    found = {key: value for key, value in told.items() if key not in COMPARED}
    known = found.pop("gap", None) is not None
    if cost is None or not known:
        return found | {"cost": cost, "lower_bound": None}
    return found | certificate(cost, found["lower_bound"] if bound is None else bound)
