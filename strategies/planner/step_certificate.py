"""Which of a few plans has the shortest step as it runs, and a lower bound of every plan's step.

A search sums parts. A step takes less where a redistribution overlaps with compute, where several are fused into one,
and where gradients are reduced during backward. So what the searches find is evaluated again as it will run, and the
cheapest is taken. A search whose costs leave out as much as may be saved bounds the step of every plan from below. Two
sets of costs do; neither is always the better one:

* `isolated`: some redistributions have their full cost, all others none, and neither has an operator that can overlap
  one of the former: one that neither produces the value nor depends on its user. The costed redistributions run one
  after the other, and overlapping compute is left out. Of fused calls at most one is among them: the value of another
  would be produced while it runs.
* `discounted`: every redistribution costs the share of its time that cannot be hidden, without what a call takes
  whatever it carries.

Of gradient reductions either a share can be hidden, or as much as backward takes: every mixture of both is a bound. The
plans that these searches find, for which overlap counts in full, are candidates too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from strategies.core.errors import StrategyError
from strategies.core.graph import Operator, Ref
from strategies.core.mesh import Mesh
from strategies.core.mesh_refinement import Axes
from strategies.core.plan import Plan
from strategies.cost.cluster import Cluster, Level, Link
from strategies.cost.exposed_communication import main_calls
from strategies.cost.node_cost import NodeCost
from strategies.cost.plan_cost import PlanCost, few_axes
from strategies.cost.problem import Problem, Relaxation
from strategies.cost.roofline import operator_work
from strategies.search.algorithms import certificate
from strategies.search.dynamic_programming import exact_search
from strategies.search.mesh_choice import mesh_of, mesh_to_json
from strategies.search.solution import Solution

SHARE, BACKWARD = 1.0, 0.0
"""Mixtures of what hides gradient reductions: only a share of them, only backward."""
LITTLE, MOST = 0.02, 64
"""Share of the graph's work of the operators that a bound may leave out; and how many for one value."""
CLOSE, APART = 1e-3, 0.01
"""Relative distances of a cost from its bound: one that is good enough, and one at which more plans are searched."""


@dataclass(frozen=True)
class StepSavings:
    """The optimisations by which a step may cost less than its parts.

    Attributes:
        overlapped: redistributions overlap with compute.
        joined: some redistributions are fused into one call.
        bucket: bytes of a gradient call at most (None: as many as are chosen, 0: any number).
        optimizer_bytes: read and written per parameter element; None: as the problem has it.
        constant: seconds that are the same for every plan.
    """

    overlapped: bool = True
    joined: bool = True
    bucket: int | None = None
    optimizer_bytes: float | None = None
    constant: float = 0.0


@dataclass(frozen=True)
class StepEvaluation:
    """`seconds` of a step of a plan as it runs; the `savings` of all plans (None: too little is known for a search),
    and a `floor` below the seconds of any plan."""

    seconds: Callable[[Plan], float]
    savings: StepSavings | None = None
    floor: float = 0.0


@dataclass(frozen=True)
class Evaluated:
    """A plan, and the seconds of its step."""

    solution: Solution
    seconds: float


@dataclass(frozen=True)
class _Relaxed:
    """A problem and a cluster for an exact search. Its bound, times the micro-batches of a step, plus `offset` seconds
    is one of a step."""

    problem: Problem
    cluster: Cluster
    offset: float = 0.0


def step_bounds(
    problem: Problem, cluster: Cluster, axes: tuple[Axes, ...] | None, savings: StepSavings
) -> Iterator[tuple[float, Solution | None]]:
    """Seconds below those of a step of any plan on at most three axes, and the plan that is cheapest at these costs:
    several, each from other costs. None where the mesh has more axes.

    Args:
        problem, cluster: what was searched.
        axes: those that a user named, see `dynamic_programming.exact_search`.
        savings: of a step.
    """

    def found(relaxed: _Relaxed) -> tuple[float, Solution | None]:
        exact = exact_search(relaxed.problem, relaxed.cluster, axes)
        if exact is None:
            return 0.0, None
        try:
            chosen = exact.within(problem.memory)
        except StrategyError:
            chosen = exact.within(None)  # a bound of more plans
        seconds = problem.micro_batches * chosen.lower_bound + relaxed.offset + savings.constant
        return seconds, replace(chosen.best, lower_bound=0.0)

    few = few_axes(problem.mesh)
    relaxations = [partial(_discounted, problem, cluster, savings)]
    if few:
        relaxations.insert(0, partial(_isolated, problem, cluster, savings, isolation=isolation(problem, cluster)))
    bounds = []
    for relax in relaxations:
        bounds.append(found(relax(mixture=SHARE)))
        yield bounds[-1]
    (high, solution), better = max(zip(bounds, relaxations, strict=True), key=lambda one: one[0][0])
    slope = 0.0 if solution is None or not few else backward_slack(problem, cluster, solution)
    if slope >= 0:
        return  # backward takes longer than the share that it may hide: no other mixture is higher
    low, solution = found(better(mixture=BACKWARD))
    yield low, solution
    rise = 0.0 if solution is None else backward_slack(problem, cluster, solution)
    if rise > 0:  # bounds are concave: the highest is about where the lines through both cross
        yield found(better(mixture=min(max((high - slope - low) / (rise - slope), BACKWARD), SHARE)))


def backward_slack(problem: Problem, cluster: Cluster, solution: Solution) -> float:
    """Seconds of a step by which backward is longer than the share of gradient reductions that it may hide; 0 where
    nothing is hidden."""
    graph, chosen = problem.graph, solution.assignments
    if not problem.hiding:
        return 0.0
    parameters = [Ref(source.id) for source in graph.of_kind("parameter")]

    def seconds(made: Problem) -> float:
        cost = PlanCost(made, cluster)
        return sum(cost.value(ref, chosen, solution.tensors.get(ref)) for ref in parameters)

    backward = sum(
        operator_work(problem.shardings[one.id], chosen[one.id], one, graph, problem.mesh, cluster).backward
        for one in graph.operators
        if one.id in graph.returning
    )
    hidden = seconds(replace(problem, overlaps=False)) - seconds(problem)
    return problem.hiding * backward - problem.micro_batches * hidden


def cheapest_step(
    first: Evaluated,
    bounds: Iterator[tuple[float, Solution | None]],
    others: Iterator[Solution],
    further: Iterator[Solution],
    seconds: Callable[[Solution], float],
) -> tuple[list[Evaluated], float]:
    """Every plan that was evaluated, the cheapest first, and the best bound. Once a plan is as cheap as a bound nothing
    more is searched; of bounds, once one is within `CLOSE`, and `further` plans only where none is within `APART`."""
    evaluated, bound = [first], 0.0

    def add(one: Solution) -> None:
        if all(one.assignments != other.solution.assignments for other in evaluated):
            evaluated.append(Evaluated(one, seconds(one)))

    for found, solution in bounds:
        bound = max(bound, found)
        if solution is not None:
            add(solution)
        if min(one.seconds for one in evaluated) <= bound * (1 + CLOSE):
            break
    if min(one.seconds for one in evaluated) > bound * (1 + 1e-9):
        for one in others:
            add(one)
    if min(one.seconds for one in evaluated) > bound * (1 + APART):
        for one in further:
            add(one)
    return sorted(evaluated, key=lambda one: one.seconds), bound


def compared_meshes(problem: Problem, evaluated: list[Evaluated]) -> dict[str, Any]:
    """The keys `mesh` and `runner_up` of a plan's `search`: the mesh of the first plan, and the first on another
    one."""
    meshes = [mesh_of(problem.mesh, one.solution.assignments) for one in evaluated]
    other = next((one for mesh, one in zip(meshes, evaluated, strict=True) if mesh != meshes[0]), None)

    def shown(one: Evaluated) -> Mapping[str, Any]:
        return mesh_to_json(problem.mesh, one.solution.assignments, one.seconds)

    return {"mesh": shown(evaluated[0]), "runner_up": None if other is None else shown(other)}


def _isolated(
    problem: Problem, cluster: Cluster, savings: StepSavings, mixture: float, isolation: Isolation
) -> _Relaxed:
    made = _relaxed(problem, cluster, savings, mixture, isolation.resharded, isolation.free)
    # copies may hide behind other calls
    fast = replace(cluster, launch=1e-12, memory_bandwidth=1e30)
    return _Relaxed(made, fast, -(1 - mixture) * problem.hiding * isolation.backward)


def _discounted(problem: Problem, cluster: Cluster, savings: StepSavings, mixture: float) -> _Relaxed:
    exposed = 1 - cluster.overlap * savings.overlapped

    def link(one: Link) -> Link:
        calls = 0.0 if savings.joined else exposed
        return Link(one.bandwidth / max(exposed, 1e-9), one.latency * calls, one.call * calls)

    def level(one: Level) -> Level:
        return replace(one, link=link(one.link), kinds={kind: link(own) for kind, own in one.kinds.items()})

    fast = replace(cluster, levels=tuple(map(level, cluster.levels)))
    return _Relaxed(_relaxed(problem, cluster, savings, mixture, None, frozenset()), fast)


def _relaxed(
    problem: Problem,
    cluster: Cluster,
    savings: StepSavings,
    mixture: float,
    resharded: frozenset[Ref] | None,
    free: frozenset[str],
) -> Problem:
    hidden = cluster.overlap * mixture if problem.hiding else 0.0
    beside = (1 - mixture) * problem.hiding / problem.micro_batches
    relaxation = Relaxation(cluster, resharded, free, 1 - beside, 1 - hidden, savings.bucket)
    moved = problem.optimizer_bytes if savings.optimizer_bytes is None else savings.optimizer_bytes
    return replace(problem, relaxation=relaxation, optimizer_bytes=moved)


@dataclass(frozen=True)
class Isolation:
    """Values whose resharding has a cost, the operators (by id) that can run beside one of those, and the seconds of
    backward of these at most."""

    resharded: frozenset[Ref]
    free: frozenset[str]
    backward: float


def isolation(problem: Problem, cluster: Cluster) -> Isolation:
    """Values are taken in the order of the work that can run beside them, up to `LITTLE` of all; of one operator's
    results and of all batch entries at most one, and none that a free operator makes. Sets of operators are bits."""
    graph, alone = problem.graph, Mesh((("alone", 1),))
    place = {operator.id: number for number, operator in enumerate(graph.operators)}
    works = [
        operator_work(problem.shardings[operator.id], {}, operator, graph, alone, cluster)
        for operator in graph.operators
    ]
    every, before, after = (1 << len(place)) - 1, [0] * len(place), [0] * len(place)
    for number, operator in enumerate(graph.operators):
        before[number] = 1 << number
        for ref in operator.operands:
            if ref.id in place:
                before[number] |= before[place[ref.id]]
    for number in reversed(range(len(graph.operators))):
        after[number] |= 1 << number
        for ref in graph.operators[number].operands:
            if ref.id in place:
                after[place[ref.id]] |= after[number]

    def weight(operators: int) -> float:
        seconds = 0.0
        while operators:
            last = operators.bit_length() - 1
            seconds += works[last].forward + works[last].backward
            operators ^= 1 << last
        return seconds

    node_cost, limit, windows = NodeCost(problem, cluster), LITTLE * weight(every), []
    known: dict[tuple[int, tuple[int, ...]], bool] = {}

    def waits(user: Operator, ref: Ref) -> bool:
        positions = tuple([at for at, other in enumerate(user.operands) if other == ref])
        key = graph.looks[user.id], positions
        if key not in known:
            known[key] = waits_for(node_cost, user, ref)
        return known[key]

    for ref, users in graph.users.items():
        if len(users) != 1 or (ref.id not in place and graph.by_id[ref.id].kind != "input"):  # type: ignore[union-attr]
            continue
        user = users[0][0]
        window = every & ~(before[place[ref.id]] if ref.id in place else 0) & ~after[place[user.id]]
        if window.bit_count() <= MOST and (seconds := weight(window)) <= limit and waits(user, ref):
            windows.append((seconds, ref, window))
    resharded: list[Ref] = []
    free = producers = 0
    for _, ref, window in sorted(windows, key=lambda one: one[0]):
        producer = 1 << place[ref.id] if ref.id in place else 0
        if ref.id in place:
            again = bool(producer & producers)
        else:
            again = any(other.id not in place for other in resharded)
        if again or (window | free) & (producers | producer) or weight(window | free) > limit:
            continue
        resharded, free, producers = [*resharded, ref], free | window, producers | producer
    ids = [operator.id for operator in graph.operators if free >> place[operator.id] & 1]
    return Isolation(frozenset(resharded), frozenset(ids), sum(works[place[id]].backward for id in ids))


def waits_for(node_cost: NodeCost, operator: Operator, ref: Ref) -> bool:
    """Whether the call that stands for all that an operator computes needs this operand, whatever is sliced."""
    sharding, mesh = node_cost.problem.shardings[operator.id], node_cost.problem.mesh
    if sharding.local is None:
        return True
    single = [
        {factor: (axis,)}
        for axis in mesh.names[:1]
        for factor, size in sharding.sizes.items()
        if size % mesh.sizes[axis] == 0
    ]
    for assignment in ({}, *single):
        instructions, needing = node_cost.local_instructions(operator, sharding, assignment), set[str]()
        main = next(iter(main_calls(instructions).values()), None)
        for one in instructions:
            if any(operand == ref or operand.id in needing for operand in one.operands):
                needing.add(one.id)
        if main is not None and main.id not in needing:
            return False
    return True


COMPARED = ("mesh", "runner_up", "meshes", "left_out", "propagation")
"""Keys of `search` about other plans."""


def with_cost(search: Mapping[str, Any], cost: float | None, bound: float | None = None) -> dict[str, Any]:
    """The `search` of a plan that costs another number of seconds than those that it was compared by.

    Args:
        search: as it was.
        cost: seconds (None: unknown).
        bound: seconds below those of any plan (None: as in `search`).
    """
    kept = {key: value for key, value in search.items() if key not in COMPARED}
    certified = kept.pop("gap", None) is not None
    if cost is None or not certified:
        return kept | {"cost": cost, "lower_bound": None}
    return kept | certificate(cost, kept["lower_bound"] if bound is None else bound)
