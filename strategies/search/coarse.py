"""Exact search on meshes of many axes, from coarse to fine.

Axes of one level and size are alike. First every operator chooses among groups of classes: how many axes of the slowest
level slice each of its loops. What a solution picks is looked into: groups become classes (how many axes of every
level), and the ways from the classes that are used are priced. Each solution of that network is a lower bound, because
its tables hold the least of all members. Where nothing is left to look into, the layouts of the classes that were picked
are searched exactly, which gives a plan; where it costs more than the bound, the pairs of classes that it uses are
priced layout by layout, and the search goes on.
Source of the idea: C. Raphael, "Coarse-to-fine dynamic programming" (2001).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from strategies.graph import Operator, Ref
from strategies.rules.sharding import Sharding
from strategies.search.alike import Alike
from strategies.search.network import Building, Pair
from strategies.search.options import Choices, Menu, Side
from strategies.search.problem import Problem
from strategies.search.transfers import Integers, Rows, Seconds, Transfers

Name = tuple[int, bytes]
"""Of a group: how many levels are known, and where their axes are."""


class Classes(Menu):
    """One option per class of assignments."""

    def __init__(self, problem: Problem, transfers: Transfers, alike: Alike) -> None:
        super().__init__(problem, transfers)
        self.alike = alike
        self.placed: dict[int, Integers] = {}
        """By choices: where the axes of every option are, [options, axes]."""

    def _places(self, sharding: Sharding) -> Integers:
        found = super()._places(sharding)
        for places in self.alike.places:
            found = found[(np.diff(found[:, places], axis=1) >= 0).all(1)]
        self._last = found
        return found

    def _choices(self, operator: Operator) -> Choices:
        self._last = np.zeros((1, len(self.axes)), dtype=np.int64)
        found = super()._choices(operator)
        self.placed[id(found)] = self._last
        return found


@dataclass(frozen=True)
class Grouped:
    """Groups as options, the name of each that is more than one class, and a class of each."""

    choices: Choices
    names: tuple[Name | None, ...]
    heads: Integers


class Groups:
    """A menu of groups: classes that agree in the outer levels, as far as nobody looked into them. Its prices are those
    of `Alike`."""

    def __init__(self, classes: Classes) -> None:
        self.classes, self.problem, self.transfers = classes, classes.problem, classes.alike
        self.looked: dict[int, set[Name]] = {}
        self.known: dict[int, Grouped] = {}
        self.every = {operator.id: classes.of(operator) for operator in self.problem.graph.operators}
        self.pressure = 0.0

    def of(self, operator: Operator) -> Choices:
        return self.group(operator).choices

    def group(self, operator: Operator) -> Grouped:
        every = self.every[operator.id]
        if id(every) not in self.known:
            self.known[id(every)] = self._grouped(every)
        return self.known[id(every)]

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
        places, alike, looked = self.classes.placed[id(every)], self.transfers, self.looked.get(id(every), set())
        levels = len(alike.levels)
        numbers: dict[Name, int] = {}
        group_of, heads = np.zeros(len(places), dtype=np.int64), []
        prefixes = [np.concatenate(alike.places[: depth + 1]) for depth in range(levels)]
        for number, row in enumerate(places):
            for depth in range(levels):
                name = depth + 1, row[prefixes[depth]].tobytes()
                if name not in looked:
                    break
            if name not in numbers:
                numbers[name] = len(numbers)
                heads.append(number)
            group_of[number] = numbers[name]
        first, depths = np.array(heads), np.array([depth for depth, _ in numbers])

        def least(seconds: Seconds) -> Seconds:
            found = np.full(len(numbers), np.inf)
            np.minimum.at(found, group_of, seconds)
            return found

        def side(one: Side) -> Side:
            numbered = one.of_option[first] * (levels + 1) + depths
            _, at, of_group = np.unique(numbered, return_index=True, return_inverse=True)
            chosen = one.of_option[first][at]
            rows, again = alike.grouped(Rows(one.rows.dims[chosen], one.rows.partial[chosen]), depths[at])
            return Side(rows, again[of_group])

        choices = Choices(
            tuple(every.assignments[i] for i in heads),
            least(every.own),
            least(every.bytes),
            *(tuple(map(side, sides)) for sides in (every.wanted, every.returned, every.given)),
        )
        return Grouped(choices, tuple(name if name[0] < levels else None for name in numbers), first)


class Within(Menu):
    """The layouts of a few classes per operator: `chosen` tells where their axes are."""

    def __init__(self, problem: Problem, transfers: Transfers, alike: Alike, chosen: Mapping[str, Integers]) -> None:
        super().__init__(problem, transfers)
        self.alike, self.chosen = alike, chosen

    def _signature(self, operator: Operator) -> tuple[Any, ...]:
        return (*super()._signature(operator), self.chosen[operator.id].tobytes())

    def _choices(self, operator: Operator) -> Choices:
        self._now = self.chosen[operator.id]
        return super()._choices(operator)

    def _places(self, sharding: Sharding) -> Integers:
        places = super()._places(sharding)
        canonical = places.copy()
        for level in self.alike.places:
            canonical[:, level] = np.sort(places[:, level], axis=1)
        return places[(canonical[:, None] == self._now).all(2).any(1)]


def price_pairs(building: Building, alike: Alike, picks: list[int], least: float) -> None:
    """Prices the pairs of classes that a solution uses layout by layout. Pairs that together take less than `least`
    seconds stay as they are."""
    times: Counter[tuple[int, int, int]] = Counter()
    pairs: dict[int, Pair] = {}
    for _, producer, given, uses in building.used:
        row = 0 if producer is None else int(given.of_option[picks[producer]])
        for user, pair in uses:
            times[id(pair), row, int(pair.of_option[picks[user]])] += 1
            pairs[id(pair)] = pair
    for (name, row, target), count in times.items():
        pair = pairs[name]
        if pair.seconds[row, target] * count > least:
            alike.settle_all(pair.given, pair.wanted, pair.spec, row, int(pair.come[target]))
            if pair.returned is not None:
                alike.settle_all(pair.returned, pair.whole, pair.spec, int(pair.go[target]), row)


def shared(problem: Problem) -> bool:
    """Whether a parameter has several uses: its layout would be one for all of them."""
    users = problem.graph.users
    return any(len(users[Ref(source.id)]) > 1 for source in problem.graph.of_kind("parameter"))
