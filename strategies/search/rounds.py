"""One decision for all operators at once: along given mesh axes, which loop of every class of operators they slice.

Everything but these axes stays as it is, so an operator has few choices: one per loop that can be cut, to leave the
axes idle, and to stay. The cheapest choice of all is found by elimination, so the total never rises where staying is
allowed.
Layouts are numbered, and prices are remembered by number: alike tensors between alike layouts are priced once. So are
the options of classes, their tables, and decisions: sweeps that change little find most of theirs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from strategies.core.graph import Ref, Source, TensorSpec
from strategies.core.layout import Layout
from strategies.core.mesh_refinement import Axes
from strategies.rules.sharding import Assignment, Sharding
from strategies.search.classes import Classes, Edge
from strategies.search.kept import operator_bytes
from strategies.search.minplus import Table, cheapest
from strategies.search.prices import Pricing

Way = tuple[int, int]
"""The numbers of the layouts in which a use wants a value and returns its gradient (-1: there is none)."""
Variables = tuple[int, ...]


class Option(NamedTuple):
    """What a class may do: the seconds of all its members, how it uses its operands, and the numbers of the layouts of
    its results."""

    assignment: Assignment
    seconds: float
    ways: Sequence[Way]
    given: Sequence[int]


@dataclass(frozen=True, eq=False)
class Options:
    """All that a class may do in a decision."""

    every: Sequence[Option]
    own: Table

    def ways(self, position: int, learns: bool) -> list[Way]:
        """How one operand is used, by option; without a gradient where the value has none."""
        return [(one.ways[position][0], one.ways[position][1] if learns else -1) for one in self.every]


class Rounds:
    """The assignments of all classes so far (`chosen`), over the axes decided so far. A byte that a rank keeps costs
    `pressure` seconds (a Lagrange multiplier)."""

    def __init__(self, pricing: Pricing, classes: Classes, pressure: float = 0.0) -> None:
        self.pricing, self.problem, self.classes, self.pressure = pricing, pricing.problem, classes, pressure
        self.mesh = pricing.mesh
        self.place = {axis: position for position, axis in enumerate(self.mesh.names)}
        heads = classes.heads
        self.shardings: list[Sharding] = [self.problem.shardings[head.id] for head in heads]
        self.fixed = [self.problem.fixed.get(head.id) for head in heads]
        self.chosen: Sequence[Assignment] = [{} for _ in heads]
        self.decided: frozenset[str] = frozenset()
        self.tied = self._tied()
        self._numbers: dict[Layout, int] = {}
        self._layouts: list[Layout] = []
        self._specs: dict[TensorSpec, int] = {}
        self._moves: dict[tuple[int, int, int], float] = {}
        self._used: dict[Hashable, Table] = {}
        self._worked: dict[Hashable, float] = {}
        self._option: dict[Hashable, Option] = {}
        self._options: dict[Hashable, Options] = {}
        self._tables: dict[Hashable, tuple[Variables, Table] | None] = {}
        self._decisions: dict[Hashable, tuple[Sequence[Assignment], float]] = {}

    def begun(self, chosen: Sequence[Assignment] | None = None, decided: Sequence[str] = ()) -> Rounds:
        """Others that begin with these assignments of the classes (None: with whole tensors), over some axes; what is
        priced here is priced there."""
        other = copy(self)
        other.decided = frozenset(decided)
        other.chosen = [_within(one or {}, other.decided) for one in self.fixed] if chosen is None else list(chosen)
        return other

    def decide(self, axes: tuple[str, ...], *, staying: bool) -> float:
        """Slice with `axes` (a run of neighbours) what costs least. Returns the seconds of the whole, repeated layers
        counted as often as they occur."""
        self.decided |= frozenset(axes)
        what = axes, staying, self.decided
        names = tuple([tuple(assignment.items()) for assignment in self.chosen])
        if (names, what) not in self._decisions:
            options = [self._open(number, name, what) for number, name in enumerate(names)]
            tables = self._price(options)
            values = cheapest([len(one.every) for one in options], tables)
            chosen = [one.every[value].assignment for one, value in zip(options, values, strict=True)]
            total = float(sum(table[tuple([values[v] for v in key])] for key, table in tables.items()))
            self._decisions[names, what] = chosen, total
        self.chosen, total = self._decisions[names, what]
        return total

    def _open(self, number: int, name: Hashable, what: tuple[Axes, bool, frozenset[str]]) -> Options:
        """What a class may do whose assignment has this name."""
        key = number, name, what
        if key not in self._options:
            every = [self._priced(number, one) for one in self._assignments(number, *what[:2])]
            self._options[key] = Options(every, np.array([one.seconds for one in every]))
        return self._options[key]

    def _assignments(self, number: int, axes: Axes, staying: bool) -> list[Assignment]:
        fixed, now, sharding = self.fixed[number], self.chosen[number], self.shardings[number]
        if fixed is not None:
            return [_within(fixed, self.decided)]
        rest = {factor: left for factor, run in now.items() if (left := tuple(a for a in run if a not in axes))}
        found: list[Assignment] = [rest]
        for factor in sharding.factors:
            run = tuple(sorted((*rest.get(factor, ()), *axes), key=self.place.__getitem__))
            if sharding.sizes[factor] % self.mesh.product(run) == 0:
                found.append({**rest, factor: run})
        if staying and now not in found:
            found.append(now)
        return found

    def _price(self, options: Sequence[Options]) -> dict[Variables, Table]:
        """The tables of own costs and of values on their way, over classes."""
        tables: dict[Variables, Table] = {(number,): one.own for number, one in enumerate(options)}
        made = [
            self._table(edge, [options[number] for number in _over(edge)], times)
            for edge, times in self.classes.edges.items()
        ]
        made += [self._shared(options, *one) for one in self.tied]
        for one in made:
            if one is not None:
                variables, table = one
                tables[variables] = tables[variables] + table if variables in tables else table
        return tables

    def _table(self, edge: Edge, options: Sequence[Options], times: int) -> tuple[Variables, Table] | None:
        """What values take on their way, with the classes that it is over."""
        key = edge, *map(id, options)
        if key not in self._tables:
            value = Ref(self.classes.heads[edge.producer].id, edge.index)
            learns = self.pricing.learns(value, self.classes.heads[edge.user])
            have, ways = [one.given[edge.index] for one in options[0].every], options[-1].ways(edge.position, learns)
            table = times * self._uses(have, ways, self.problem.graph.specs[value])
            if edge.after is not None:  # what the use before has brought costs nothing
                again = self.pricing.learns(value, self.classes.heads[edge.after[0]])
                before = options[1].ways(edge.after[1], again)
                fresh = np.array([[a != b for b in ways] for a in before])
                table = table[:, None, :] * fresh
            some = edge.after is None or fresh.any()
            self._tables[key] = _ordered(_over(edge), table) if some else None
        return self._tables[key]

    def _priced(self, number: int, assignment: Assignment) -> Option:
        """With the work of a class and what flows into it from sources."""
        name = tuple(assignment.items())
        key = number, name, self.decided
        if key not in self._option:
            sharding, results = self.shardings[number], len(self.classes.heads[number].results)
            pairs = zip(sharding.operand_layouts(assignment), sharding.gradient_layouts(assignment), strict=True)
            ways = [(self._number(wanted), self._number(returned)) for wanted, returned in pairs]
            given = [self._result(number, index, assignment) for index in range(results)]
            seconds = self._seconds(number, assignment, name, ways, given)
            self._option[key] = Option(assignment, seconds, ways, [self._number(one) for one in given])
        return self._option[key]

    def _seconds(
        self, number: int, assignment: Assignment, name: Hashable, ways: Sequence[Way], given: Sequence[Layout]
    ) -> float:
        head = self.classes.heads[number]
        key = number, name
        if key not in self._worked:
            kept = operator_bytes(self.problem, head, assignment) if self.pressure else 0.0
            self._worked[key] = self.pricing.worked(head, assignment) + self.pressure * kept
        seconds = self._worked[key] + self.pricing.left(head, given)
        for position, ref in enumerate(head.operands):
            source = self.problem.graph.by_id[ref.id]
            if not isinstance(source, Source):
                continue
            spec = source.spec
            wanted, returned = ways[position]
            if source.kind == "parameter":
                if self.problem.graph.users[ref][0][0].id == head.id:
                    back = self._layouts[returned] if self.pricing.learns(ref, head) else None
                    seconds += self.pricing.parameter([(self._layouts[wanted], back)], spec)
                continue
            have = Layout.replicated(len(spec.shape))
            if source.kind == "input":
                have = self._decided(self.problem.inputs[source.name])
            seconds += self._moved(self._number(have), wanted, spec)
        return seconds * len(self.classes.members[number])

    def _result(self, number: int, index: int, assignment: Assignment) -> Layout:
        handed = self.problem.outputs.get(self.classes.heads[number].id)
        if handed is not None:
            return self._decided(handed[index])
        return self.shardings[number].result_layouts(assignment)[index]

    def _decided(self, layout: Layout) -> Layout:
        """The layout as far as its axes are decided."""
        dims = tuple(tuple(axis for axis in dim if axis in self.decided) for dim in layout.dims)
        return Layout(dims, layout.partial & self.decided)

    def _number(self, layout: Layout) -> int:
        found = self._numbers.get(layout)
        if found is None:
            found = self._numbers[layout] = len(self._layouts)
            self._layouts.append(layout)
        return found

    def _moved(self, before: int, after: int, spec: TensorSpec) -> float:
        if before == after:
            return 0.0
        key = before, after, self._specs.setdefault(spec, len(self._specs))
        if key not in self._moves:
            self._moves[key] = self.pricing.moved(self._layouts[before], self._layouts[after], spec)
        return self._moves[key]

    def _uses(self, have: Sequence[int], ways: Sequence[Way], spec: TensorSpec) -> Table:
        """Seconds by how a value lies and how it is used."""
        key = tuple(have), tuple(ways), self._specs.setdefault(spec, len(self._specs))
        if key not in self._used:
            whole = [self._number(self._layouts[number].whole) for number in have]
            self._used[key] = np.array(
                [
                    [
                        self._moved(before, wanted, spec) + (0.0 if back < 0 else self._moved(back, home, spec))
                        for wanted, back in ways
                    ]
                    for before, home in zip(have, whole, strict=True)
                ]
            )
        return self._used[key]

    def _shared(
        self, options: Sequence[Options], first: int, second: int, source: Source, positions: tuple[int, int]
    ) -> tuple[Variables, Table] | None:
        """Seconds that the second of two users of a parameter adds to those of the first."""
        pair = options[first], options[second]
        key = source.id, positions, first, second, *map(id, pair)
        if key not in self._tables:
            used = [
                [(self._layouts[wanted], None if back < 0 else self._layouts[back]) for wanted, back in ways]
                for number, one, at in zip((first, second), pair, positions, strict=True)
                for ways in [one.ways(at, self.pricing.learns(Ref(source.id), self.classes.heads[number]))]
            ]
            alone = [self.pricing.parameter([one], source.spec) for one in used[0]]
            table = np.array(
                [
                    [self.pricing.parameter([one, other], source.spec) - price for other in used[1]]
                    for one, price in zip(used[0], alone, strict=True)
                ]
            )
            self._tables[key] = _ordered((first, second), table)
        return self._tables[key]

    def _tied(self) -> list[tuple[int, int, Source, tuple[int, int]]]:
        """Pairs of classes that use one parameter: the first user and another one."""
        graph, found = self.problem.graph, []
        for source in graph.of_kind("parameter"):
            users = graph.users[Ref(source.id)]
            for user, position in users[1:]:
                pair = self.classes.of[users[0][0].id], self.classes.of[user.id]
                if pair[0] != pair[1]:
                    found.append((*pair, source, (users[0][1], position)))
        return found


def _within(assignment: Assignment, axes: frozenset[str]) -> Assignment:
    left = {factor: tuple(axis for axis in run if axis in axes) for factor, run in assignment.items()}
    return {factor: run for factor, run in left.items() if run}


def _over(edge: Edge) -> Variables:
    """The classes that the table of an edge is over."""
    return (edge.producer, edge.user) if edge.after is None else (edge.producer, edge.after[0], edge.user)


def _ordered(variables: Variables, table: Table) -> tuple[Variables, Table]:
    """A table over variables in order; a class that occurs twice in it has one choice."""
    key = tuple(sorted(set(variables)))
    if key == variables:
        return key, table
    letters = "".join("abc"[key.index(v)] for v in variables)
    found: Table = np.einsum(f"{letters}->{'abc'[: len(key)]}", table)
    return key, found
