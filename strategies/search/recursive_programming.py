"""Recursive programming: the mesh is partitioned one axis at a time, and every round decides for all operators together
which loop the axis slices, or none.

The axes go from the slowest link to the fastest: inner axes need not send what an outer axis slices, so an outer round
sees the largest tensors. A round has few candidates per operator: one per loop that can be sliced, one that leaves the
axes idle, and one that changes nothing; it is a factor graph over classes of equivalent operators (repeated layers),
solved by elimination. Afterwards single axes, and runs of neighbouring ones, are decided again with all others fixed,
until little is gained; the cost never rises where staying is allowed. Configured operators have one candidate
throughout. On a mesh of few axes there is time for more: resharding costs what the engine runs, everything is also
decided in other orders of the axes, beginning with replicated tensors, and at the end operators of a graph that is not
large decide for themselves though they are equivalent. A memory limit enters as seconds per byte that a rank keeps.

On more axes resharding is estimated in closed form. Cost there: classes x prime axes decisions over layouts of as many
axes, so it is linear in operators and grows with the square of the logarithm of the devices. Layouts are numbered, and
costs are remembered by number. Source of the idea: Wang et al., "Efficient and Systematic Partitioning of Large and
Deep Neural Networks for Parallelization" (Euro-Par 2021), which halves by operators' weights; a round here weighs them
all at once.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from strategies.core.graph import Ref, Source, TensorSpec
from strategies.core.layout import Layout
from strategies.core.mesh_refinement import Axes
from strategies.cost.cluster import Cluster
from strategies.cost.plan_cost import PlanCost, approximate_cost, few_axes
from strategies.cost.problem import Problem
from strategies.memory.estimate import operator_bytes, plan_bytes
from strategies.rules.sharding import Assignment, Sharding
from strategies.search.dual_bound import minimum
from strategies.search.elimination import Seconds, Variables
from strategies.search.equivalence_classes import Classes, Edge, equivalence_classes
from strategies.search.mesh_choice import Chosen, Factorisation, choose, factorisations, finest, least_work
from strategies.search.solution import Solution, too_large

SWEEPS = 2
"""The maximum number of sweeps over all axes."""
GAIN = 1e-3
"""Relative gain of a sweep below which it is the last one."""
SWEPT_AXES = 6
"""Axes up to which everything is decided again, and up to which all factorisations of an open mesh are tried."""
MULTIPLIERS = 12
"""Seconds per byte that are tried at most."""
FEW_OPERATORS = 300
"""Operators up to which equivalent ones decide for themselves at the end."""
LARGEST = 200_000
"""Entries of a table in a round that is solved by elimination alone."""

UseLayouts = tuple[int, int]
"""The numbers of the layouts in which a use wants a value and returns its gradient (-1: there is none)."""


class RoundCandidate(NamedTuple):
    """A strategy of a class in one round: the seconds of all its members, the layouts of its uses of operands, and the
    numbers of its results' layouts."""

    assignment: Assignment
    seconds: float
    uses: Sequence[UseLayouts]
    given: Sequence[int]


@dataclass(frozen=True, eq=False)
class RoundCandidates:
    """All strategies of a class in one round."""

    every: Sequence[RoundCandidate]
    seconds: Seconds

    def uses(self, position: int, gradient: bool) -> list[UseLayouts]:
        """The layouts of one operand, by candidate; without those of a gradient where there is none."""
        return [(one.uses[position][0], one.uses[position][1] if gradient else -1) for one in self.every]


class Partitioning:
    """The assignments of all classes over the axes decided so far.

    Args:
        cost: the objective.
        classes: equivalent operators, which share an assignment.

    Attributes:
        multiplier: Lagrange multiplier in seconds per byte of a rank.
    """

    def __init__(self, cost: PlanCost, classes: Classes) -> None:
        self.cost, self.problem, self.classes, self.multiplier = cost, cost.problem, classes, 0.0
        self.mesh = cost.mesh
        self.place = {axis: position for position, axis in enumerate(self.mesh.names)}
        self.shardings: list[Sharding] = [self.problem.shardings[one.id] for one in classes.representatives]
        self.fixed = [self.problem.fixed.get(one.id) for one in classes.representatives]
        self.chosen: Sequence[Assignment] = [{} for _ in classes.representatives]
        self.decided: frozenset[str] = frozenset()
        self.tied = self._tied()
        self._numbers: dict[Layout, int] = {}
        self._layouts: list[Layout] = []
        self._specs: dict[TensorSpec, int] = {}
        self._resharded: dict[tuple[int, int, int], float] = {}
        self._use_seconds: dict[Hashable, Seconds] = {}
        self._own_seconds: dict[Hashable, float] = {}
        self._own_bytes: dict[Hashable, float] = {}
        self._bytes: dict[Hashable, float] = {}
        self._candidate: dict[Hashable, RoundCandidate] = {}
        self._candidates: dict[Hashable, RoundCandidates] = {}
        self._candidate_bytes: dict[int, Seconds] = {}
        self._tables: dict[Hashable, tuple[Variables, Seconds] | None] = {}
        self._decisions: dict[Hashable, tuple[Sequence[Assignment], float]] = {}

    def restarted(
        self, multiplier: float, chosen: Sequence[Assignment] | None = None, decided: Sequence[str] = ()
    ) -> Partitioning:
        """Another one that begins with these assignments of the classes (None: replicated), over some axes; costs are
        shared."""
        other = copy(self)
        other.multiplier = multiplier
        other.decided = frozenset(decided)
        other.chosen = [_within(one or {}, other.decided) for one in self.fixed] if chosen is None else list(chosen)
        return other

    def decide(self, axes: Axes, *, staying: bool) -> float:
        """Assign `axes` (a run of neighbours; empty: none) at the least cost. Returns the seconds of the plan, with
        those of its bytes."""
        self.decided |= frozenset(axes)
        what = axes, staying, self.decided
        names = tuple([tuple(assignment.items()) for assignment in self.chosen])
        key = names, what, self.multiplier
        if key not in self._decisions:
            candidates = [self._round(number, name, what) for number, name in enumerate(names)]
            tables = self._cost_tables(candidates)
            indices = minimum([len(one.every) for one in candidates], tables, LARGEST)
            chosen = [one.every[index].assignment for one, index in zip(candidates, indices, strict=True)]
            total = float(sum(table[tuple([indices[v] for v in scope])] for scope, table in tables.items()))
            self._decisions[key] = chosen, total
        self.chosen, total = self._decisions[key]
        return total

    def _round(self, number: int, name: Hashable, what: tuple[Axes, bool, frozenset[str]]) -> RoundCandidates:
        """The candidates of a class whose assignment has this name."""
        key = number, name, what
        if key not in self._candidates:
            every = [self._evaluated(number, one) for one in self._assignments(number, *what[:2])]
            self._candidates[key] = RoundCandidates(every, np.array([one.seconds for one in every]))
        return self._candidates[key]

    def _assignments(self, number: int, axes: Axes, staying: bool) -> list[Assignment]:
        fixed, now, sharding = self.fixed[number], self.chosen[number], self.shardings[number]
        if fixed is not None:
            return [_within(fixed, self.decided)]
        if not axes:
            return [now]
        rest = {factor: left for factor, run in now.items() if (left := tuple(a for a in run if a not in axes))}
        every: list[Assignment] = [rest]
        for factor in sharding.factors:
            run = tuple(sorted((*rest.get(factor, ()), *axes), key=self.place.__getitem__))
            if sharding.divides(factor, self.mesh.product(run)):
                every.append({**rest, factor: run})
        if staying and now not in every:
            every.append(now)
        return every

    def _cost_tables(self, candidates: Sequence[RoundCandidates]) -> dict[Variables, Seconds]:
        """The factors of a round, over classes."""
        tables: dict[Variables, Seconds] = {
            (number,): self._seconds(number, one) for number, one in enumerate(candidates)
        }
        made = [
            self._edge_table(edge, [candidates[number] for number in _scope(edge)], count)
            for edge, count in self.classes.edges.items()
        ]
        made += [self._tied_table(candidates, *one) for one in self.tied]
        for one in made:
            if one is not None:
                variables, table = one
                tables[variables] = tables[variables] + table if variables in tables else table
        return tables

    def _seconds(self, number: int, candidates: RoundCandidates) -> Seconds:
        """Seconds of the candidates of a class, with those of its bytes."""
        if not self.multiplier:
            return candidates.seconds
        if id(candidates) not in self._candidate_bytes:
            sizes = [self._bytes_of_one(number, one.assignment) for one in candidates.every]
            self._candidate_bytes[id(candidates)] = len(self.classes.members[number]) * np.array(sizes)
        return candidates.seconds + self.multiplier * self._candidate_bytes[id(candidates)]

    def _bytes_of_one(self, number: int, assignment: Assignment) -> float:
        key = number, tuple(assignment.items())
        if key not in self._own_bytes:
            self._own_bytes[key] = operator_bytes(self.problem, self.classes.representatives[number], assignment)
        return self._own_bytes[key]

    def _edge_table(
        self, edge: Edge, candidates: Sequence[RoundCandidates], count: int
    ) -> tuple[Variables, Seconds] | None:
        """Seconds of resharding the values of an edge; what the use before has brought costs nothing."""
        key = edge, *map(id, candidates)
        if key not in self._tables:
            representatives = self.classes.representatives
            value = Ref(representatives[edge.producer].id, edge.index)
            gradient = self.cost.has_gradient(value, representatives[edge.user])
            given = [one.given[edge.index] for one in candidates[0].every]
            uses = candidates[-1].uses(edge.position, gradient)
            table = count * self._uses_table(given, uses, self.problem.graph.specs[value])
            new = np.ones(1, dtype=bool)
            if edge.after is not None:
                gradient = self.cost.has_gradient(value, representatives[edge.after[0]])
                before = candidates[1].uses(edge.after[1], gradient)
                new = np.array([[a != b for b in uses] for a in before])
                table = table[:, None, :] * new
            self._tables[key] = _sorted(_scope(edge), table) if new.any() else None
        return self._tables[key]

    def _evaluated(self, number: int, assignment: Assignment) -> RoundCandidate:
        """An assignment evaluated with the work of a class and what flows into it from sources."""
        name = tuple(assignment.items())
        key = number, name, self.decided
        if key not in self._candidate:
            sharding, results = self.shardings[number], len(self.classes.representatives[number].results)
            pairs = zip(sharding.operand_layouts(assignment), sharding.gradient_layouts(assignment), strict=True)
            uses = [(self._number(wanted), self._number(returned)) for wanted, returned in pairs]
            given = [self._result(number, index, assignment) for index in range(results)]
            seconds = self._class_seconds(number, assignment, name, uses, given)
            self._candidate[key] = RoundCandidate(assignment, seconds, uses, [self._number(one) for one in given])
        return self._candidate[key]

    def _class_seconds(
        self, number: int, assignment: Assignment, name: Hashable, uses: Sequence[UseLayouts], given: Sequence[Layout]
    ) -> float:
        one = self.classes.representatives[number]
        key = number, name
        if key not in self._own_seconds:
            self._own_seconds[key] = self.cost.operator(one, assignment)
        seconds = self._own_seconds[key] + self.cost.leaving(one, given)
        for position, ref in enumerate(one.operands):
            source = self.problem.graph.by_id[ref.id]
            if not isinstance(source, Source):
                continue
            spec = source.spec
            wanted, returned = uses[position]
            if source.kind == "parameter":
                if self.problem.graph.users[ref][0][0].id == one.id:
                    back = self._layouts[returned] if self.cost.has_gradient(ref, one) else None
                    seconds += self.cost.parameter([(self._layouts[wanted], back)], spec)
                continue
            have = Layout.replicated(len(spec.shape))
            if source.kind == "input":
                have = self._so_far(self.problem.inputs[source.name])
            seconds += self._resharding(self._number(have), wanted, spec)
        return seconds * len(self.classes.members[number])

    def _result(self, number: int, index: int, assignment: Assignment) -> Layout:
        configured = self.problem.outputs.get(self.classes.representatives[number].id)
        if configured is not None:
            return self._so_far(configured[index])
        return self.shardings[number].result_layouts(assignment)[index]

    def _so_far(self, layout: Layout) -> Layout:
        """The layout as far as its axes are decided."""
        dims = tuple(tuple(axis for axis in dim if axis in self.decided) for dim in layout.dims)
        return Layout(dims, layout.partial & self.decided)

    def _number(self, layout: Layout) -> int:
        number = self._numbers.get(layout)
        if number is None:
            number = self._numbers[layout] = len(self._layouts)
            self._layouts.append(layout)
        return number

    def _resharding(self, before: int, after: int, spec: TensorSpec) -> float:
        if before == after:
            return 0.0
        key = before, after, self._specs.setdefault(spec, len(self._specs))
        if key not in self._resharded:
            self._resharded[key] = self.cost.resharded(self._layouts[before], self._layouts[after], spec)
        return self._resharded[key]

    def _uses_table(self, given: Sequence[int], uses: Sequence[UseLayouts], spec: TensorSpec) -> Seconds:
        """Seconds by the layout of a value and those of its use."""
        key = tuple(given), tuple(uses), self._specs.setdefault(spec, len(self._specs))
        if key not in self._use_seconds:
            layouts = self._layouts
            self._use_seconds[key] = np.array(
                [
                    [
                        self._resharding(before, wanted, spec)
                        + (0.0 if returned < 0 else self.cost.returned(layouts[returned], layouts[before], spec))
                        for wanted, returned in uses
                    ]
                    for before in given
                ]
            )
        return self._use_seconds[key]

    def _tied_table(
        self,
        candidates: Sequence[RoundCandidates],
        first: int,
        second: int,
        source: Source,
        positions: tuple[int, int],
    ) -> tuple[Variables, Seconds] | None:
        """Seconds that the second of two users of a parameter adds to those of the first."""
        pair = candidates[first], candidates[second]
        key = source.id, positions, first, second, *map(id, pair)
        if key not in self._tables:
            used = [
                [(self._layouts[wanted], None if back < 0 else self._layouts[back]) for wanted, back in uses]
                for number, one, at in zip((first, second), pair, positions, strict=True)
                for uses in [one.uses(at, self.cost.has_gradient(Ref(source.id), self.classes.representatives[number]))]
            ]
            single = [self.cost.parameter([one], source.spec) for one in used[0]]
            table = np.array(
                [
                    [self.cost.parameter([one, other], source.spec) - seconds for other in used[1]]
                    for one, seconds in zip(used[0], single, strict=True)
                ]
            )
            self._tables[key] = _sorted((first, second), table)
        return self._tables[key]

    def _tied(self) -> list[tuple[int, int, Source, tuple[int, int]]]:
        """Pairs of classes that use one parameter: the first user and another one."""
        of, graph = self.classes.of, self.problem.graph
        return [
            (of[users[0][0].id], of[user.id], source, (users[0][1], position))
            for source in graph.of_kind("parameter")
            for users in [graph.users[Ref(source.id)]]
            for user, position in users[1:]
            if of[users[0][0].id] != of[user.id]
        ]

    def solution(self, total: float) -> Solution:
        """The plan; `total` has the cost of its bytes."""
        size = 0.0
        for number, (members, chosen) in enumerate(zip(self.classes.members, self.chosen, strict=True)):
            key = number, tuple(chosen.items())
            if key not in self._bytes:
                self._bytes[key] = sum(operator_bytes(self.problem, member, chosen) for member in members)
            size += self._bytes[key]
        assignments = {id: self.chosen[number] for id, number in self.classes.of.items()}
        return Solution(assignments, total - self.multiplier * size, size, multiplier=self.multiplier)


def _within(assignment: Assignment, axes: frozenset[str]) -> Assignment:
    left = {factor: tuple(axis for axis in run if axis in axes) for factor, run in assignment.items()}
    return {factor: run for factor, run in left.items() if run}


def _scope(edge: Edge) -> Variables:
    """The classes of an edge's factor."""
    return (edge.producer, edge.user) if edge.after is None else (edge.producer, edge.after[0], edge.user)


def _sorted(variables: Variables, table: Seconds) -> tuple[Variables, Seconds]:
    """A table over variables in order; a class that occurs twice has one candidate."""
    key = tuple(sorted(set(variables)))
    if key == variables:
        return key, table
    letters = "".join("abc"[key.index(v)] for v in variables)
    return key, np.asarray(np.einsum(f"{letters}->{'abc'[: len(key)]}", table))


def recursive_search(problem: Problem, cluster: Cluster, axes: Sequence[Axes] = ()) -> Solution:
    """A plan whose cost is small, without a bound.

    Args:
        problem: the problem.
        cluster: whose seconds are minimised.
        axes: runs of mesh axes that are sliced with as one, outermost first; empty: every axis by itself.

    Raises:
        TooLarge: no plan within the problem's memory was found.
    """
    found = improved(problem, cluster, partitioned(problem, cluster, axes), axes)
    if problem.memory is not None and found.bytes > problem.memory:
        raise too_large(problem.memory, found.bytes)
    return found


def recursive_choice(problem: Problem, cluster: Cluster) -> Chosen:
    """The best plan of recursive partitioning over the factorisations of an open mesh."""
    prime = finest(problem.mesh)
    coarser = [runs for runs in factorisations(problem.mesh, cluster) if runs != prime]
    every = [prime, *(coarser if len(prime) <= SWEPT_AXES else coarser[:1])]
    bounds = {runs: 0.0 if runs == prime else least_work(problem, cluster, runs) for runs in every}

    def search(runs: Factorisation, enough: float) -> Solution:
        return partitioned(problem, cluster, runs)

    chosen = choose(problem, bounds, search)
    best = improved(problem, cluster, chosen.best)
    return replace(chosen, best=replace(best, bytes=plan_bytes(problem, best.assignments)))


def partitioned(problem: Problem, cluster: Cluster, axes: Sequence[Axes] = ()) -> Solution:
    """The plan of recursive partitioning over classes. Where it exceeds the memory limit, bisection finds the smallest
    multiplier (seconds per byte) that keeps the limit; the smallest plan if none does."""
    limit, best = problem.memory, _at(problem, cluster, axes, 0.0)
    if limit is None or best.bytes <= limit:
        return best
    low, high = 0.0, 2.0 ** math.frexp(best.cost / limit)[1]  # searches within other limits try the same ones
    for _ in range(MULTIPLIERS):
        within = best.bytes <= limit
        multiplier = (low + high) / 2 if within else high
        found = _at(problem, cluster, axes, multiplier)
        low, high = (low, multiplier) if found.bytes <= limit else (multiplier, high if within else high * 8)
        best = min(best, found, key=lambda one: (max(one.bytes, limit), one.cost))
    return best


def _partitioning(problem: Problem, cluster: Cluster, classes: Classes) -> Partitioning:
    """One for all decisions about these classes."""
    key = "partitioning", cluster, id(classes)
    return problem.once(key, lambda: Partitioning(approximate_cost(problem, cluster), classes))


def _at(problem: Problem, cluster: Cluster, axes: Sequence[Axes], multiplier: float) -> Solution:
    key = "partitioned", cluster, tuple(axes), multiplier
    return problem.once(key, lambda: _partitioned_at(problem, cluster, axes, multiplier))


def _partitioned_at(problem: Problem, cluster: Cluster, axes: Sequence[Axes], multiplier: float) -> Solution:
    runs = _units(problem, axes)
    first = _partitioning(problem, cluster, equivalence_classes(problem))
    best = first.restarted(multiplier)
    total = [best.decide(run, staying=False) for run in runs][-1]
    if len(runs) <= SWEPT_AXES:
        total = _decide_again(best, _runs(runs))
    others = {tuple(runs[::-1]), (*runs[1:], runs[0])} if few_axes(problem.mesh) and len(runs) > 1 else set()
    for order in sorted(others):
        other = first.restarted(multiplier, decided=problem.mesh.names)
        if (cheaper := _decide_again(other, _runs(order))) < total:
            best, total = other, cheaper
    return best.solution(total)


def improved(problem: Problem, cluster: Cluster, found: Solution, axes: Sequence[Axes] = ()) -> Solution:
    """A plan, where there is time for it with every operator decided again for itself."""
    if not few_axes(problem.mesh) or len(problem.graph.operators) > FEW_OPERATORS:
        return found
    runs = _runs(_units(problem, axes))
    again = _again(problem, cluster, equivalence_classes(problem, single=True), found, runs)
    fits = problem.memory is None or again.bytes <= max(found.bytes, problem.memory)
    return again if fits and again.cost < found.cost else found


def refined(
    problem: Problem,
    cluster: Cluster,
    chosen: Mapping[str, Assignment],
    axes: Sequence[Axes] = (),
    *,
    single: bool = False,
) -> Solution:
    """A plan by its assignments, with other strategies where they lower the total cost; configured ones stay. With
    `single` only single axes are decided again, in a third of the time."""
    given, units = Solution(dict(chosen), math.inf, math.inf), _units(problem, axes)
    again = _again(problem, cluster, equivalence_classes(problem, chosen), given, units if single else _runs(units))
    return improved(problem, cluster, again, axes)


def _again(problem: Problem, cluster: Cluster, classes: Classes, given: Solution, runs: Sequence[Axes]) -> Solution:
    chosen = [given.assignments[one.id] for one in classes.representatives]
    partitioning = _partitioning(problem, cluster, classes).restarted(given.multiplier, chosen, problem.mesh.names)
    return partitioning.solution(_decide_again(partitioning, runs))


def _units(problem: Problem, axes: Sequence[Axes]) -> list[Axes]:
    return [run for run in axes if run] or [(axis,) for axis in problem.mesh.names]


def _decide_again(partitioning: Partitioning, runs: Sequence[Axes]) -> float:
    """Sweep over runs of axes until one gains little. Returns the seconds of the plan."""
    total = partitioning.decide((), staying=True)
    for _ in range(SWEEPS):
        before = total
        for run in runs:
            total = partitioning.decide(run, staying=True)
        if total > before * (1 - GAIN):
            break
    return total


def _runs(axes: Sequence[Axes]) -> list[Axes]:
    """Every axis, then all axes before and all axes behind every place, and all."""
    parts = [part for place in range(1, len(axes)) for part in (axes[:place], axes[place:])]
    return [*axes, *(tuple(chain.from_iterable(part)) for part in (*parts, axes))]
