"""What every operator may do, coarsely: classes of assignments that differ only by axes that are alike, and groups of
classes that agree in the outer levels of the machine.

Invariant: a group's own seconds, bytes and prices are not above those of any of its members.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from strategies.core.graph import Operator, Ref, Source
from strategies.rules.sharding import Sharding
from strategies.search.alike import Alike
from strategies.search.counted import Counted, canonical, members
from strategies.search.options import Assignments, Choices, Placed, Side
from strategies.search.problem import Problem
from strategies.search.transfers import Integers, Rows, Seconds, Transfers

MOST_MEMBERS = 600
"""Layouts of a class up to which a plan may have any of them."""
Name = tuple[int, bytes]
"""Of a group: how many levels are known, and where their axes are."""


class Classes(Counted):
    """One option per class of assignments. A parameter with several uses lies nowhere here: each use takes what it must
    of it, so solutions bound plans, but are none."""

    def __init__(self, problem: Problem, transfers: Transfers, alike: Alike) -> None:
        super().__init__(problem, transfers, alike)
        self.placed: dict[int, Integers] = {}
        """By choices: where the axes of every option are, [options, axes]."""

    def _places(self, sharding: Sharding) -> Integers:
        self._last = canonical(sharding, self.level_sizes, self.alike.lengths.tolist())
        return self._last

    def _choices(self, operator: Operator) -> Choices:
        self._last = np.zeros((1, len(self.axes)), dtype=np.int64)
        found = super()._choices(operator)
        self.placed[id(found)] = self._last
        return found

    def _own(
        self,
        operator: Operator,
        sharding: Sharding,
        work: Seconds,
        assignments: Assignments,
        returned: Sequence[Side],
    ) -> Seconds:
        found = super()._own(operator, sharding, work, assignments, returned)
        graph = self.problem.graph
        for side, ref in zip(returned, operator.operands, strict=True):
            if (uses := self._learning(ref)) > 1 and operator.id in graph.returning:
                least = self.own.least_of_use(graph.specs[ref], uses)
                found = found + least * self.elements(side.rows, graph.specs[ref])[side.of_option]
        return found

    def _learning(self, ref: Ref) -> int:
        """How many uses of a parameter have a gradient, if there are several uses; else 0."""
        graph, source = self.problem.graph, self.problem.graph.by_id[ref.id]
        if not isinstance(source, Source) or source.kind != "parameter" or ref in self.lone or ref not in graph.trained:
            return 0
        return sum(user.id in graph.returning for user, _ in graph.users[ref])


@dataclass(frozen=True)
class Grouped:
    """Groups as options; of each its name, if it is more than one class, and a class; and the group of every class."""

    choices: Choices
    names: tuple[Name | None, ...]
    heads: Integers
    of_class: Integers

    def parents(self, before: Grouped) -> Integers:
        """[groups]: of which of the groups `before` each is a part."""
        return np.asarray(before.of_class[self.heads])


class Groups:
    """A menu of groups: classes that agree in the outer levels, as far as nobody looked into them. Its prices are those
    of `Alike`."""

    def __init__(self, classes: Classes) -> None:
        self.classes, self.problem, self.alike = classes, classes.problem, classes.alike
        self.looked: dict[int, set[Name]] = {}
        self.known: dict[int, Grouped] = {}
        self.prefixes: dict[int, list[tuple[list[bytes], Integers]]] = {}
        self.every = {operator.id: classes.of(operator) for operator in self.problem.graph.operators}
        self.pressure = 0.0

    @property
    def transfers(self) -> Alike:
        return self.alike

    def of(self, operator: Operator) -> Choices:
        return self.group(operator).choices

    def group(self, operator: Operator) -> Grouped:
        every = self.every[operator.id]
        if id(every) not in self.known:
            self.known[id(every)] = self._grouped(every)
        return self.known[id(every)]

    def unknown(self, picks: Mapping[str, int]) -> bool:
        """Whether any operator picked more than one class."""
        return any(self.group(one).names[picks[one.id]] is not None for one in self.problem.graph.operators)

    def look(self, picks: Mapping[str, int]) -> bool:
        """Looks into the groups that operators picked; whether there were any."""
        found = set()
        for operator in self.problem.graph.operators:
            name = self.group(operator).names[picks[operator.id]]
            if name is not None:
                every = id(self.every[operator.id])
                self.looked.setdefault(every, set()).add(name)
                found.add(every)
        for one in found:
            del self.known[one]
        return bool(found)

    def _grouped(self, every: Choices) -> Grouped:
        alike, looked = self.alike, self.looked.get(id(every), set())
        levels, names = len(alike.levels), list[Name]()
        group_of, unknown = np.zeros(len(every), dtype=np.int64), np.ones(len(every), dtype=bool)
        for depth, (known, inverse) in enumerate(self._prefixes(every), 1):
            deeper = np.array([(depth, name) in looked for name in known])[inverse]
            now = unknown & ~deeper
            used, numbers = np.unique(inverse[now], return_inverse=True)
            group_of[now] = len(names) + numbers
            names += [(depth, known[one]) for one in used.tolist()]
            unknown &= deeper
        order = np.lexsort((every.own, group_of))
        first = order[np.searchsorted(group_of[order], np.arange(len(names)))]  # the member that alone takes least
        depths = np.array([depth for depth, _ in names])

        def least(seconds: Seconds) -> Seconds:
            found = np.full(len(names), np.inf)
            np.minimum.at(found, group_of, seconds)
            return found

        def side(one: Side) -> Side:
            numbered = one.of_option[first] * (levels + 1) + depths
            _, at, of_group = np.unique(numbered, return_index=True, return_inverse=True)
            chosen = one.of_option[first][at]
            rows, again = alike.grouped(Rows(one.rows.dims[chosen], one.rows.partial[chosen]), depths[at])
            return Side(rows, again[of_group])

        choices = Choices(
            every.assignments.taken(first) if isinstance(every.assignments, Placed) else every.assignments,
            least(every.own),
            least(every.bytes),
            *(tuple(map(side, sides)) for sides in (every.wanted, every.returned, every.given)),
        )
        return Grouped(choices, tuple(name if name[0] < levels else None for name in names), first, group_of)

    def _prefixes(self, every: Choices) -> list[tuple[list[bytes], Integers]]:
        """Per number of levels, the names of all groups, and which one every class is of."""
        if id(every) not in self.prefixes:
            places, found, width = self.classes.placed[id(every)], [], 0
            for level in self.alike.places:
                width += len(level)
                rows, inverse = np.unique(places[:, :width], axis=0, return_inverse=True)
                found.append(([row.tobytes() for row in rows], inverse.ravel()))
            self.prefixes[id(every)] = found
        return self.prefixes[id(every)]


class Within(Counted):
    """The layouts of a few classes per operator: `chosen` tells where their axes are."""

    def __init__(self, problem: Problem, transfers: Transfers, alike: Alike, chosen: Mapping[str, Integers]) -> None:
        super().__init__(problem, transfers, alike)
        self.chosen = chosen

    def _signature(self, operator: Operator) -> tuple[Any, ...]:
        return (*super()._signature(operator), self.chosen[operator.id].tobytes())

    def _choices(self, operator: Operator) -> Choices:
        self._now = self.chosen[operator.id]
        return super()._choices(operator)

    def _places(self, sharding: Sharding) -> Integers:
        found = [members(row, self.alike.places, MOST_MEMBERS) for row in self._now]
        return np.unique(np.concatenate(found), axis=0)
