"""Exact search on meshes of many axes, from coarse to fine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from strategies.graph import Operator, Ref
from strategies.rules.sharding import Sharding
from strategies.search.alike import Alike
from strategies.search.folding import Folded
from strategies.search.network import Building
from strategies.search.options import Choices, Menu, Side
from strategies.search.problem import Problem
from strategies.search.transfers import Integers, Seconds, Transfers


class ClassMenu(Menu):
    """One option per class of assignments."""

    def __init__(self, problem: Problem, transfers: Transfers, alike: Alike) -> None:
        super().__init__(problem, transfers)
        self.alike = alike
        self.placed: dict[int, Integers] = {}

    def _places(self, sharding: Sharding) -> Integers:
        found = super()._places(sharding)
        for places in self.alike.places:
            found = found[(np.diff(found[:, places], axis=1) >= 0).all(1)]
        self.last = found
        return found

    def _choices(self, operator: Operator) -> Choices:
        self.last = np.zeros((1, len(self.axes)), dtype=np.int64)
        found = super()._choices(operator)
        self.placed[id(found)] = self.last
        return found


class GroupMenu:
    """Groups of classes: those that agree in the outer levels, where nobody asked to tell them apart."""

    def __init__(self, classes: ClassMenu) -> None:
        self.classes, self.problem, self.transfers = classes, classes.problem, classes.alike
        self.apart: dict[int, set[tuple[int, bytes]]] = {}
        self.known: dict[int, tuple[Choices, list[tuple[int, bytes] | None], Integers]] = {}
        self.pressure = 0.0

    def of(self, operator: Operator) -> Choices:
        return self.group(operator)[0]

    def group(self, operator: Operator) -> tuple[Choices, list[tuple[int, bytes] | None], Integers]:
        """The groups, what to tell apart to look into each (None: it is one class), and a class of each."""
        every = self.classes.of(operator)
        if id(every) not in self.known:
            self.known[id(every)] = self._grouped(every)
        return self.known[id(every)]

    def refine(self, operator: Operator, pick: int) -> bool:
        every = self.classes.of(operator)
        name = self.group(operator)[1][pick]
        if name is None:
            return False
        self.apart.setdefault(id(every), set()).add(name)
        return True

    def refined(self) -> None:
        self.known.clear()

    def _grouped(self, every: Choices) -> tuple[Choices, list[tuple[int, bytes] | None], Integers]:
        places, alike, apart = self.classes.placed[id(every)], self.transfers, self.apart.get(id(every), set())
        levels = len(alike.levels)
        names: dict[tuple[int, bytes], int] = {}
        of_class, first, known = [], [], []
        for number, row in enumerate(places):
            depth = 1
            while depth < levels:
                name = depth, row[np.concatenate(alike.places[:depth])].tobytes()
                if name not in apart:
                    break
                depth += 1
            name = depth, row[np.concatenate(alike.places[:depth])].tobytes()
            if name not in names:
                names[name] = len(names)
                first.append(number)
                known.append(depth)
            of_class.append(names[name])
        inverse, heads, depths = np.array(of_class), np.array(first), np.array(known)

        def least(seconds: Seconds) -> Seconds:
            found = np.full(len(names), np.inf)
            np.minimum.at(found, inverse, seconds)
            return found

        def side(one: Side) -> Side:
            rows = one.rows
            numbers = one.of_option[heads] * (levels + 1) + depths
            _, at, of_group = np.unique(numbers, return_index=True, return_inverse=True)
            chosen = one.of_option[heads][at]
            picked = type(rows)(rows.dims[chosen], rows.partial[chosen])
            found = alike.classes(picked, depths[at])
            keys = np.concatenate([found.dims, found.partial], 1)
            _, at, again = np.unique(keys, axis=0, return_index=True, return_inverse=True)
            return Side(alike._once(found.dims[at], found.partial[at]), again.ravel()[of_group.ravel()])

        choices = Choices(
            tuple(every.assignments[i] for i in first),
            least(every.own),
            least(every.bytes),
            tuple(map(side, every.wanted)),
            tuple(map(side, every.returned)),
            tuple(map(side, every.given)),
        )
        opened = [name if depth < levels else None for name, depth in zip(names, known, strict=True)]
        return choices, opened, heads
