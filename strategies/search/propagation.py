"""Sharding propagation: from the configured operators outward, each neighbour takes the strategy with the least
redistribution.

Breadth first, successors before predecessors. An operator with several computed inputs waits until all of them are
decided; what still waits when nothing else is left decides with what it knows. Choice: least forward bytes on decided
edges, then backward bytes, then the operator's own communication, its own work, and the lexicographically smallest
counts. Source: MindSpore's sharding_propagation, with our byte counts. Cost: operators x candidates x edges, with
chains cached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import product

from strategies.errors import StrategyError
from strategies.graph import Operator, Ref, Source
from strategies.layout import Layout
from strategies.meshing import Meshing
from strategies.rules.sharding import Assignment, Sharding
from strategies.search.defaults import batch_parallel
from strategies.search.problem import Problem

MOST_CANDIDATES = 256
"""Above this many placements of single axes only contiguous runs of axes in mesh order are tried."""


def propagate(problem: Problem, meshing: Meshing) -> dict[str, tuple[Assignment, bool]]:
    """An assignment for every operator by id, and whether propagation reached it (else it is the default)."""
    if not problem.fixed:
        raise StrategyError(
            "parallel.search = sharding_propagation starts from configured operators, and none is configured: give at "
            "least one entry in "
            "parallel.strategies or parallel.set_data_parallel, or use parallel.mode=semi_auto for defaults everywhere."
        )
    return _Propagation(problem).run(meshing)


class _Propagation:
    def __init__(self, problem: Problem) -> None:
        self.problem, self.graph = problem, problem.graph
        self.chosen: dict[str, Assignment] = dict(problem.fixed)
        self.queue = deque(operator for operator in self.graph.operators if operator.id in self.chosen)
        self.waiting: dict[str, Operator] = {}

    def run(self, meshing: Meshing) -> dict[str, tuple[Assignment, bool]]:
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
        reached = {id: (assignment, True) for id, assignment in self.chosen.items()}
        rest = {
            o.id: (batch_parallel(self.problem, meshing, o), False) for o in self.graph.operators if o.id not in reached
        }
        return reached | rest

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
        sharding = self.problem.shardings[operator.id]
        options = candidates(sharding, self.problem, self._neighbours(operator))
        self.chosen[operator.id] = min(options, key=lambda assignment: self._price(operator, sharding, assignment))
        self.queue.append(operator)

    def _neighbours(self, operator: Operator) -> list[tuple[tuple[str | None, ...], Layout]]:
        """The factors and the present layout of every decided value next to the operator."""
        sharding, found = self.problem.shardings[operator.id], []
        for position, ref in enumerate(operator.operands):
            have = self._have(ref)
            if have is not None:
                found.append((sharding.operands[position], have))
        for index in range(len(operator.results)):
            for user, position in self.graph.users[Ref(operator.id, index)]:
                if user.id in self.chosen:
                    wanted = self.problem.shardings[user.id].operand_layouts(self.chosen[user.id])[position]
                    found.append((sharding.results[index], wanted))
        return found

    def _have(self, ref: Ref) -> Layout | None:
        node = self.graph.by_id[ref.id]
        if isinstance(node, Source):
            return self.problem.inputs[node.name] if node.kind == "input" else None
        return self.problem.result_layout(ref, self.chosen[ref.id]) if ref.id in self.chosen else None

    def _price(self, operator: Operator, sharding: Sharding, assignment: Assignment) -> tuple[float, ...]:
        forward = backward = 0
        for position, ref in enumerate(operator.operands):
            have = self._have(ref)
            if have is not None:
                there, back = self.problem.edge(ref, have, operator, position, assignment)
                forward, backward = forward + there, backward + back
        for index, have in enumerate(sharding.result_layouts(assignment)):
            ref = Ref(operator.id, index)
            for user, position in self.graph.users[ref]:
                if user.id in self.chosen:
                    there, back = self.problem.edge(ref, have, user, position, self.chosen[user.id])
                    forward, backward = forward + there, backward + back
        own, work = self.problem.own(operator, assignment)
        counts = [self.problem.mesh.product(assignment.get(factor, ())) for factor in sharding.factors]
        order = [
            self.problem.mesh.names.index(axis) for factor in sharding.factors for axis in assignment.get(factor, ())
        ]
        return (forward, backward, own, work, *counts, *order)


def candidates(
    sharding: Sharding, problem: Problem, neighbours: Sequence[tuple[tuple[str | None, ...], Layout]] = ()
) -> list[Assignment]:
    """Every legal assignment that uses as many devices as the dims allow, among them those that keep a neighbour's
    axes in its order. Padded slices come from neighbours alone."""
    mesh = problem.mesh
    found: dict[tuple[tuple[str, tuple[str, ...]], ...], Assignment] = {}
    starts: list[Assignment] = [{}]
    for dims, layout in neighbours:
        start: Assignment = {f: axes for f, axes in zip(dims, layout.dims, strict=True) if f is not None and axes}
        if sharding.legal(start, mesh):
            starts.append(start)
    for begun in starts:
        for assignment in _extensions(sharding, problem, begun):
            found.setdefault(tuple(assignment.items()), assignment)
    most = max(mesh.product(sharding.used(assignment)) for assignment in found.values())
    return [assignment for assignment in found.values() if mesh.product(sharding.used(assignment)) == most]


def _extensions(sharding: Sharding, problem: Problem, start: Assignment) -> Iterator[Assignment]:
    mesh = problem.mesh
    taken = {axis for axes in start.values() for axis in axes}
    free = [axis for axis in mesh.names if axis not in taken and mesh.sizes[axis] > 1]
    options: tuple[str | None, ...] = (*sharding.factors, None)
    if len(options) ** len(free) > MOST_CANDIDATES:
        placements = _contiguous(options, len(free))
    else:
        placements = product(options, repeat=len(free))
    for placement in placements:
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
