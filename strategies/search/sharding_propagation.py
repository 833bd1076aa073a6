"""Sharding propagation: from the configured operators outward, each neighbour takes the strategy with the least
resharding; then the propagated plan, or one that costs less around the same configured operators.

Breadth first, successors before predecessors. An operator with several computed inputs waits until all of them are
decided; what still waits when nothing else is left decides with what it knows. A parameter with several users has the
layout that the first of them that is decided wants. Criteria: least time on the links for decided edges forward, then
backward, then for what the operator sends by itself, then its own work, and the lexicographically smallest counts.
Source: MindSpore's sharding_propagation, with seconds for its costs. Cost: distinct situations x candidates x edges,
with paths cached; repeated layers meet the same situations.

A model with repeated layers, many products or large ones takes the cheapest of the propagated plan, of that with single
operators re-optimised, and of what recursive programming finds: what propagation met once it decided for all layers, so
a neighbour that it left dearer than need be is paid as often. On at most `EXACT_AXES` axes dynamic programming takes
the place of the latter two: its plan is the cheapest one, and where layers do not repeat it takes a third of the time.
A small net keeps the propagated plan, on all devices, unless its products are all configured, so that nothing is left
to propagate, or that plan costs `DEARER` times the cheapest on more than `FEW_RANKS` devices. Either way both costs are
reported.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from strategies.core.errors import TooLarge
from strategies.core.gc_paused import gc_paused
from strategies.core.graph import Operator, Ref, Source, TensorSpec
from strategies.core.layout import Layout
from strategies.core.mesh_refinement import Axes
from strategies.cost.cluster import Cluster
from strategies.cost.link_seconds import LinkSeconds
from strategies.cost.plan_cost import approximate_cost
from strategies.cost.problem import Problem
from strategies.memory.estimate import plan_bytes
from strategies.rules.sharding import Assignment, Sharding
from strategies.search.deferral import deferred
from strategies.search.dynamic_programming import exact_search
from strategies.search.equivalence_classes import repeats
from strategies.search.mesh_choice import finest
from strategies.search.recursive_programming import improved, partitioned, refined
from strategies.search.solution import Solution

EXACT_AXES = 2
"""Axes of a mesh up to which dynamic programming ends with the cheapest plan; on three it ends near it."""
EQUAL = 1e-9
"""Relative difference below which seconds are equal."""
MOST_CANDIDATES = 256
"""Placements of single axes above which only contiguous runs of axes in mesh order are tried."""
SMALL_PRODUCTS, SMALL_FLOPS = 8, 1e9
"""Products of a small net, and their flops in all."""
FEW_RANKS, DEARER = 16, 2.0
"""The number of ranks up to which a small network keeps the propagated plan; on more the plan may cost this multiple of
the cheapest: the shards are then so small that launch overhead outweighs their work."""

Default = Callable[[Operator], Assignment]
"""The assignment of an operator that propagation does not reach."""
PlanSeconds = Callable[[Solution], float]
"""A plan -> seconds of a step; infinite where the plan cannot run."""


@dataclass(frozen=True)
class Propagated:
    """What sharding propagation ends with.

    Attributes:
        solution: the plan that is taken.
        reached: the operators that propagation reached.
        propagated_cost: seconds of the propagated plan.
        cheapest_cost: seconds of the cheapest plan that was found.
        by_cost: whether that one is taken.
        both: both plans.
    """

    solution: Solution
    reached: frozenset[str]
    propagated_cost: float
    cheapest_cost: float
    by_cost: bool
    both: tuple[Solution, ...]

    @property
    def assignments(self) -> Mapping[str, Assignment]:
        """The assignments of the plan that is taken, by operator id."""
        return self.solution.assignments

    def to_json(self) -> dict[str, Any] | None:
        """The key `propagation` of a plan's `search`; None where one of the two plans cannot run."""
        if math.isinf(max(self.propagated_cost, self.cheapest_cost)):
            return None
        return {"followed": self.propagated_cost, "cheapest": self.cheapest_cost, "by_price": self.by_cost}


@gc_paused()
def sharding_propagation(
    problem: Problem,
    cluster: Cluster,
    axes: Sequence[Axes],
    default: Default,
    seconds: PlanSeconds | None = None,
) -> Propagated:
    """The plan from the configured operators outward.

    Args:
        problem: with configured operators.
        cluster: whose seconds are minimised.
        axes: those that a user named (empty: an open mesh).
        default: assignments of operators that propagation does not reach.
        seconds: of a step as it runs; None for the sum of its parts.
    """
    chosen = Propagation(problem, LinkSeconds(problem.mesh, cluster)).run()
    reached = frozenset(chosen)
    chosen |= {one.id: default(one) for one in problem.graph.operators if one.id not in reached}
    chosen = deferred(problem, cluster, chosen)
    limit = problem.memory or math.inf
    first = Solution(chosen, approximate_cost(problem, cluster).total(chosen), plan_bytes(problem, chosen))
    every = (first, *_around(problem, cluster, axes, chosen))
    best = min(every, key=lambda one: (max(one.bytes, limit), one.cost))
    if seconds is not None:
        first = replace(first, cost=seconds(first))
        best = first if best.assignments == chosen else replace(best, cost=seconds(best))
        best = min(first, best, key=lambda one: (max(one.bytes, limit), one.cost))
    near = problem.mesh.size <= FEW_RANKS or first.cost <= DEARER * best.cost
    keep = near and math.isfinite(first.cost) and _small(problem) and not _all_configured(problem)
    by_cost = best is not first and not keep
    return Propagated(best if by_cost else first, reached, first.cost, best.cost, by_cost, (first, best))


def _around(
    problem: Problem, cluster: Cluster, axes: Sequence[Axes], chosen: Mapping[str, Assignment]
) -> Iterator[Solution]:
    """Cheap plans with the same configured operators as `chosen`: the cheapest one on few axes, if one keeps the
    memory limit."""
    exact = exact_search(problem, cluster, axes) if len(finest(problem.mesh)) <= EXACT_AXES else None
    if exact is not None:
        try:
            yield exact.within(problem.memory).best
        except TooLarge:
            pass  # the plans below may come closer to the limit
        else:
            return
    yield refined(problem, cluster, chosen, axes)
    for runs in (axes, (problem.mesh.names,)):  # from all axes as one, too
        yield improved(problem, cluster, partitioned(problem, cluster, runs), axes)


def _small(problem: Problem) -> bool:
    flops = [sharding.flops for sharding in problem.shardings.values() if sharding.sums]
    return len(flops) <= SMALL_PRODUCTS and sum(flops) <= SMALL_FLOPS and not repeats(problem)


def _all_configured(problem: Problem) -> bool:
    """Whether two products or more are all configured."""
    products = [operator.id for operator in problem.graph.operators if _is_product(problem, operator)]
    return len(products) > 1 and all(id in problem.fixed for id in products)


def _is_product(problem: Problem, operator: Operator) -> bool:
    """Sums over what two operands have in common, and leaves something to slice."""
    sharding = problem.shardings[operator.id]
    common = [set(dims) & sharding.sums for dims in sharding.operands]
    return sum(map(bool, common)) > 1 and any(factor for dims in sharding.results for factor in dims)


class Propagation:
    """The decisions on one problem."""

    def __init__(self, problem: Problem, link_seconds: LinkSeconds) -> None:
        self.problem, self.graph, self.link_seconds = problem, problem.graph, link_seconds
        self.chosen: dict[str, Assignment] = dict(problem.fixed)
        self.queue = deque(operator for operator in self.graph.operators if operator.id in self.chosen)
        self.waiting: dict[str, Operator] = {}
        self.decided: dict[Hashable, Assignment] = {}
        """By what a decision depends on: repeated layers meet the same situations."""

    def run(self) -> dict[str, Assignment]:
        """An assignment for every operator that propagation reaches, by id."""
        while self.queue or self.waiting:
            if not self.queue:
                self._decide(self.waiting.pop(next(iter(self.waiting))))
                continue
            operator = self.queue.popleft()
            for index in range(len(operator.results)):
                for user, _ in self.graph.users[Ref(operator.id, index)]:
                    if user.id not in self.chosen:
                        self._reach(user)
            for producer in self._producers(operator):
                if producer.id not in self.chosen:
                    self._decide(producer)
        return self.chosen

    def _producers(self, operator: Operator) -> list[Operator]:
        nodes = (self.graph.by_id[ref.id] for ref in operator.operands)
        return [node for node in nodes if isinstance(node, Operator)]

    def _reach(self, operator: Operator) -> None:
        if all(producer.id in self.chosen for producer in self._producers(operator)):
            self._decide(operator)
        else:
            self.waiting[operator.id] = operator

    def _decide(self, operator: Operator) -> None:
        self.waiting.pop(operator.id, None)
        edges = self._edges(operator)
        situation = self.problem.kinds[operator.id], edges
        if situation not in self.decided:
            self.decided[situation] = self._cheapest(operator, edges)
        self.chosen[operator.id] = self.decided[situation]
        self.queue.append(operator)

    def _edges(self, operator: Operator) -> tuple[Neighbour, ...]:
        """The decided values next to an operator."""
        edges = []
        for position, ref in enumerate(operator.operands):
            have = self._have(ref, operator)
            if have is not None:
                shared = isinstance(self.graph.by_id[ref.id], Source)  # its gradients are added in its own layout
                trained = ref in self.graph.trained and not shared
                edges.append(Neighbour(False, position, self.graph.specs[ref], have, trained, None))
        for index in range(len(operator.results)):
            ref = Ref(operator.id, index)
            for user, position in self.graph.users[ref]:
                if user.id in self.chosen:
                    there, chosen = self.problem.shardings[user.id], self.chosen[user.id]
                    wanted = there.operand_layouts(chosen)[position]
                    returned = there.gradient_layouts(chosen)[position]
                    trained = ref in self.graph.trained
                    edges.append(Neighbour(True, index, self.graph.specs[ref], wanted, trained, returned))
        return tuple(edges)

    def _cheapest(self, operator: Operator, edges: Sequence[Neighbour]) -> Assignment:
        """The best candidate: one criterion after the other, each only among those that are equal so far."""
        sharding, mesh = self.problem.shardings[operator.id], self.problem.mesh
        near = [((sharding.results if e.result else sharding.operands)[e.position], e.layout) for e in edges]
        options = candidates(sharding, self.problem, near)

        def order(assignment: Assignment) -> tuple[float, ...]:
            places = [mesh.names.index(axis) for factor in sharding.factors for axis in assignment.get(factor, ())]
            counts = [mesh.product(assignment.get(factor, ())) for factor in sharding.factors]
            return (sharding.flops / mesh.product(sharding.used(assignment)), *counts, *places)

        criteria: tuple[Callable[[Assignment], Any], ...] = (
            lambda assignment: sum(edge.forward(sharding, assignment, self.link_seconds) for edge in edges),
            lambda assignment: sum(edge.backward(sharding, assignment, self.link_seconds) for edge in edges),
            lambda assignment: self._own_seconds(operator, assignment),
            order,
        )
        for criterion in criteria:
            if len(options) > 1:
                seconds = [criterion(assignment) for assignment in options]
                least = min(seconds)
                if not isinstance(least, tuple):  # sums of the same numbers in another order
                    least *= 1 + EQUAL
                options = [option for option, value in zip(options, seconds, strict=True) if value <= least]
        return options[0]

    def _own_seconds(self, operator: Operator, assignment: Assignment) -> float:
        """Seconds for what an operator sends by itself: sums of its results, and of the gradients of its trained
        parameters."""
        sharding = self.problem.shardings[operator.id]
        summed = list(zip(sharding.result_layouts(assignment), operator.results, strict=True))
        for layout, ref in zip(sharding.gradient_layouts(assignment), operator.operands, strict=True):
            node = self.graph.by_id[ref.id]
            if isinstance(node, Source) and node.trainable:
                summed.append((layout, node.spec))
        return sum(self.link_seconds.seconds(layout, layout.reduced, spec) for layout, spec in summed if layout.partial)

    def _have(self, ref: Ref, operator: Operator) -> Layout | None:
        """The layout of an operand, if that is decided: of a parameter the one that another user wants, a configured
        one first."""
        node = self.graph.by_id[ref.id]
        if isinstance(node, Source) and node.kind == "parameter":
            users = sorted(self.graph.users[ref], key=lambda use: use[0].id not in self.problem.fixed)
            for user, position in users:
                if user.id in self.chosen and user.id != operator.id:
                    return self.problem.shardings[user.id].operand_layouts(self.chosen[user.id])[position]
            return None
        if isinstance(node, Source):
            return self.problem.inputs[node.name] if node.kind == "input" else None
        return self.problem.result_layout(ref, self.chosen[ref.id]) if ref.id in self.chosen else None


@dataclass(frozen=True)
class Neighbour:
    """A decided value next to an operator: the layout in which an operand comes, or in which a user wants a result (and
    how that user's gradient is returned)."""

    result: bool
    position: int
    spec: TensorSpec
    layout: Layout
    trained: bool
    returned: Layout | None

    def forward(self, sharding: Sharding, assignment: Assignment, link_seconds: LinkSeconds) -> float:
        """Seconds to carry the value there."""
        if self.result:
            before, after = sharding.result_layouts(assignment)[self.position], self.layout
        else:
            before, after = self.layout, sharding.operand_layouts(assignment)[self.position]
        return link_seconds.seconds(before, after, self.spec)

    def backward(self, sharding: Sharding, assignment: Assignment, link_seconds: LinkSeconds) -> float:
        """Seconds to carry the gradient back."""
        if not self.trained:
            return 0.0
        if self.returned is not None:
            before, after = self.returned, sharding.result_layouts(assignment)[self.position].reduced
        else:
            before, after = sharding.gradient_layouts(assignment)[self.position], self.layout.reduced
        return link_seconds.seconds(before, after, self.spec)


def candidates(
    sharding: Sharding, problem: Problem, neighbours: Sequence[tuple[tuple[str | None, ...], Layout]] = ()
) -> list[Assignment]:
    """Every legal assignment that uses as many devices as the dims allow, among them those that keep a neighbour's
    axes in its order. Padded slices come from neighbours alone."""
    mesh = problem.mesh
    near = [{f: axes for f, axes in zip(dims, layout.dims, strict=True) if f and axes} for dims, layout in neighbours]
    starts = [start for start in ({}, *near) if sharding.legal(start, mesh)]
    found = {tuple(one.items()): one for start in starts for one in _extensions(sharding, problem, start)}
    most = max(mesh.product(sharding.used(assignment)) for assignment in found.values())
    return [assignment for assignment in found.values() if mesh.product(sharding.used(assignment)) == most]


def _extensions(sharding: Sharding, problem: Problem, start: Assignment) -> Iterator[Assignment]:
    mesh = problem.mesh
    taken = {axis for axes in start.values() for axis in axes}
    free = [axis for axis in mesh.names if axis not in taken and mesh.sizes[axis] > 1]
    options: tuple[str | None, ...] = (*sharding.sizes, None)
    few = len(options) ** len(free) <= MOST_CANDIDATES
    for placement in product(options, repeat=len(free)) if few else _contiguous(options, len(free)):
        assignment: dict[str, tuple[str, ...]] = dict(start)
        for axis, factor in zip(free, placement, strict=True):
            if factor is not None:
                assignment[factor] = (*assignment.get(factor, ()), axis)
        if all(
            axes == start.get(factor) or sharding.sizes[factor] % mesh.product(axes) == 0
            for factor, axes in assignment.items()
        ):
            yield {factor: assignment[factor] for factor in sharding.factors if factor in assignment}


def _contiguous(options: Sequence[str | None], length: int) -> Iterator[tuple[str | None, ...]]:
    """Placements in which every factor has one run of neighbouring axes, in the order of the factors, the rest last."""

    def fill(index: int, left: int) -> Iterator[tuple[str | None, ...]]:
        if index == len(options) - 1:
            yield (options[index],) * left
            return
        for size in range(left + 1):
            for rest in fill(index + 1, left - size):
                yield (options[index],) * size + rest

    return fill(0, length)
