"""One decision for all operators at once: along given mesh axes, which loop of every class of operators they slice.

Everything but these axes stays as it is, so an operator has few choices: one per loop that can be cut, to leave the
axes idle, and to stay. The cheapest choice of all is found by elimination, so the total never rises where staying is
allowed.
Layouts are numbered, and prices are remembered by number: alike tensors between alike layouts are priced once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from copy import copy

import numpy as np

from strategies.graph import Ref, Source, TensorSpec
from strategies.layout import Layout
from strategies.rules.sharding import Assignment, Sharding
from strategies.search.classes import Classes
from strategies.search.kept import operator_bytes
from strategies.search.minplus import Table, cheapest
from strategies.search.prices import Pricing

Way = tuple[int, int]
"""The numbers of the layouts in which a use wants a value and returns its gradient (-1: there is none)."""


class Rounds:
    """The assignments of all classes so far (`chosen`), over the axes decided so far. A byte that a rank keeps costs
    `pressure` seconds (a Lagrange multiplier)."""

    def __init__(self, pricing: Pricing, classes: Classes, pressure: float = 0.0) -> None:
        self.pricing, self.problem, self.classes, self.pressure = pricing, pricing.problem, classes, pressure
        self.mesh = pricing.mesh
        self.place = {axis: position for position, axis in enumerate(self.mesh.names)}
        self.decided: frozenset[str] = frozenset()
        heads = classes.heads
        self.shardings: list[Sharding] = [self.problem.shardings[head.id] for head in heads]
        self.fixed = [self.problem.fixed.get(head.id) for head in heads]
        self.chosen: list[Assignment] = [{} for _ in heads]
        self.tied = self._tied()
        self._numbers: dict[Layout, int] = {}
        self._layouts: list[Layout] = []
        self._specs: dict[TensorSpec, int] = {}
        self._moves: dict[tuple[int, int, int], float] = {}
        self._tables: dict[Hashable, Table] = {}
        self._worked: dict[tuple[int, Hashable], float] = {}
        self._owned: dict[tuple[int, Hashable, frozenset[str]], float] = {}
        self._used: dict[tuple[int, Hashable], list[Way]] = {}
        self._given: dict[tuple[int, int, Hashable, frozenset[str]], int] = {}

    def start(self, chosen: Sequence[Assignment]) -> None:
        """Go on from these assignments of the classes, over the whole mesh."""
        self.chosen, self.decided = list(chosen), frozenset(self.mesh.names)

    def anew(self) -> Rounds:
        """Begins with whole tensors, over the whole mesh; what is priced here is priced there."""
        other = copy(self)
        other.start([fixed or {} for fixed in self.fixed])
        return other

    def decide(self, axes: tuple[str, ...], *, staying: bool) -> float:
        """Slice with `axes` (a run of neighbours) what costs least. Returns the seconds of the whole, repeated layers
        counted as often as they occur."""
        self.decided |= frozenset(axes)
        options = [self._options(number, axes, staying) for number in range(len(self.chosen))]
        tables = self._price(options)
        values = cheapest([len(found) for found in options], tables)
        self.chosen = [found[value] for found, value in zip(options, values, strict=True)]
        return float(sum(table[tuple(values[v] for v in key)] for key, table in tables.items()))

    def _options(self, number: int, axes: tuple[str, ...], staying: bool) -> list[Assignment]:
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

    def _price(self, options: Sequence[Sequence[Assignment]]) -> dict[tuple[int, ...], Table]:
        """The tables of own costs and of values on their way, over classes."""
        named = [[tuple(assignment.items()) for assignment in found] for found in options]
        wanted = [
            [self._ways(c, a, name) for a, name in zip(found, named[c], strict=True)] for c, found in enumerate(options)
        ]
        tables: dict[tuple[int, ...], Table] = {
            (c,): np.array([self._own(c, *one) for one in zip(found, named[c], wanted[c], strict=True)])
            for c, found in enumerate(options)
        }
        for edge, times in self.classes.edges.items():
            producer, user = edge.producer, edge.user
            value = Ref(self.classes.heads[producer].id, edge.index)
            learns = self.pricing.learns(value, self.classes.heads[user])
            pairs = zip(options[producer], named[producer], strict=True)
            have = [self._handed(producer, edge.index, *one) for one in pairs]
            ways = _at(wanted[user], edge.position, learns)
            table = times * self._uses(have, ways, self.problem.graph.specs[value])
            if edge.after is not None:  # what the use before has brought costs nothing
                again = self.pricing.learns(value, self.classes.heads[edge.after[0]])
                before = _at(wanted[edge.after[0]], edge.after[1], again)
                fresh = np.array([[a != b for b in ways] for a in before])
                if fresh.any():
                    self._add(tables, (producer, edge.after[0], user), table[:, None, :] * fresh)
            else:
                self._add(tables, (producer, user), table)
        for first, second, source, positions in self.tied:
            self._add(tables, (first, second), self._shared(options, (first, second), source, positions))
        return tables

    def _own(self, number: int, assignment: Assignment, name: Hashable, ways: Sequence[Way]) -> float:
        """Seconds of the work of a class and of what flows into it from sources; `name` is that of the assignment."""
        key = number, name, self.decided
        if key not in self._owned:
            self._owned[key] = self._priced(number, assignment, name, ways)
        return self._owned[key]

    def _priced(self, number: int, assignment: Assignment, name: Hashable, ways: Sequence[Way]) -> float:
        head = self.classes.heads[number]
        key = number, name
        if key not in self._worked:
            kept = operator_bytes(self.problem, head, assignment) if self.pressure else 0.0
            self._worked[key] = self.pricing.worked(head, assignment) + self.pressure * kept
        results = [self._result(number, index, assignment) for index in range(len(head.results))]
        seconds = self._worked[key] + self.pricing.left(head, results)
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

    def _ways(self, number: int, assignment: Assignment, name: Hashable) -> list[Way]:
        if (number, name) not in self._used:
            sharding = self.shardings[number]
            pairs = zip(sharding.operand_layouts(assignment), sharding.gradient_layouts(assignment), strict=True)
            self._used[number, name] = [(self._number(wanted), self._number(returned)) for wanted, returned in pairs]
        return self._used[number, name]

    def _handed(self, number: int, index: int, assignment: Assignment, name: Hashable) -> int:
        """The number of the layout of a result."""
        key = number, index, name, self.decided
        if key not in self._given:
            self._given[key] = self._number(self._result(number, index, assignment))
        return self._given[key]

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
        if key not in self._tables:
            whole = [self._number(self._layouts[number].whole) for number in have]
            self._tables[key] = np.array(
                [
                    [
                        self._moved(before, wanted, spec) + (0.0 if back < 0 else self._moved(back, home, spec))
                        for wanted, back in ways
                    ]
                    for before, home in zip(have, whole, strict=True)
                ]
            )
        return self._tables[key]

    def _shared(
        self, options: Sequence[Sequence[Assignment]], pair: tuple[int, int], source: Source, positions: tuple[int, int]
    ) -> Table:
        """Seconds that the second of two users of a parameter adds to those of the first."""
        ways = [
            [
                (sharding.operand_layouts(a)[at], sharding.gradient_layouts(a)[at] if learns else None)
                for a in options[number]
            ]
            for number, at in zip(pair, positions, strict=True)
            for sharding in (self.shardings[number],)
            for learns in (self.pricing.learns(Ref(source.id), self.classes.heads[number]),)
        ]
        alone = [self.pricing.parameter([first], source.spec) for first in ways[0]]
        return np.array(
            [
                [self.pricing.parameter([first, second], source.spec) - price for second in ways[1]]
                for first, price in zip(ways[0], alone, strict=True)
            ]
        )

    @staticmethod
    def _add(tables: dict[tuple[int, ...], Table], variables: tuple[int, ...], table: Table) -> None:
        """Add a table; a class that occurs twice in it has one choice."""
        key = tuple(sorted(set(variables)))
        letters = "".join("abc"[key.index(v)] for v in variables)
        found: Table = np.einsum(f"{letters}->{'abc'[: len(key)]}", table)
        tables[key] = tables[key] + found if key in tables else found

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


def _at(wanted: Sequence[Sequence[Way]], position: int, learns: bool) -> list[Way]:
    """The ways in which one operand is used, by option; without a gradient where the value has none."""
    return [(ways[position][0], ways[position][1] if learns else -1) for ways in wanted]
