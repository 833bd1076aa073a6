"""The cheapest choice of many variables whose costs are tables over a few of them: elimination in min-fill order.

A variable is eliminated by adding the tables that hold it and keeping the least over its values; going back, each takes
the value that was the least. Exact, as long as no table grows beyond `LARGEST` entries; where one would, the variable
that is in most of its tables is settled first, with what is least so far. Source: Bertele and Brioschi, Nonserial
Dynamic Programming (1972). Cost: linear in the variables times the largest table.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.float64]
LARGEST = 200_000


def cheapest(sizes: Sequence[int], tables: Mapping[tuple[int, ...], Table]) -> list[int]:
    """The value of every variable (0 .. sizes[v] - 1) for which the sum of the tables is least. `tables[v, w]` has a
    dim per variable, in that order, all different."""
    return _Elimination(sizes, tables).solve()


class _Elimination:
    def __init__(self, sizes: Sequence[int], tables: Mapping[tuple[int, ...], Table]) -> None:
        self.sizes, self.tables = sizes, dict(enumerate(tables.items()))
        self.holding: list[set[int]] = [set() for _ in sizes]
        for number, (variables, _) in self.tables.items():
            for variable in variables:
                self.holding[variable].add(number)
        self.next = len(self.tables)
        self.back: list[tuple[int, tuple[int, ...], npt.NDArray[np.intp]]] = []

    def solve(self) -> list[int]:
        queue = [(self._size(variable), variable) for variable in range(len(self.sizes))]
        heapq.heapify(queue)
        left = set(range(len(self.sizes)))
        while left:
            size, variable = heapq.heappop(queue)
            if variable not in left:
                continue
            now = self._size(variable)
            if now > size:
                heapq.heappush(queue, (now, variable))
                continue
            if now > LARGEST:
                variable = max(left, key=lambda v: (len(self.holding[v]), -v))
                self._settle(variable)
                near = set[int]()
            else:
                near = self._eliminate(variable)
            left.remove(variable)
            if now > LARGEST:
                near = left
                queue = []
            for other in near:
                heapq.heappush(queue, (self._size(other), other))
        chosen = [0] * len(self.sizes)
        for variable, others, best in reversed(self.back):
            chosen[variable] = int(best[tuple(chosen[other] for other in others)])
        return chosen

    def _near(self, variable: int) -> set[int]:
        return {other for number in self.holding[variable] for other in self.tables[number][0]} - {variable}

    def _size(self, variable: int) -> int:
        return math.prod(self.sizes[other] for other in self._near(variable)) * self.sizes[variable]

    def _sum(self, variable: int, others: tuple[int, ...]) -> Table:
        """The tables that hold `variable`, added over (others, variable) and taken out."""
        order = (*others, variable)
        total = np.zeros([self.sizes[v] for v in order])
        for number in self.holding[variable].copy():
            variables, table = self.tables.pop(number)
            places = [order.index(v) for v in variables]
            table = table.transpose(np.argsort(places))
            total += table.reshape([self.sizes[v] if v in variables else 1 for v in order])
            for v in variables:
                self.holding[v].discard(number)
        return total

    def _keep(self, variables: tuple[int, ...], table: Table) -> None:
        self.tables[self.next] = variables, table
        for variable in variables:
            self.holding[variable].add(self.next)
        self.next += 1

    def _eliminate(self, variable: int) -> set[int]:
        near = self._near(variable)
        others = tuple(sorted(near))
        total = self._sum(variable, others)
        self.back.append((variable, others, total.argmin(-1)))
        if others:
            self._keep(others, total.min(-1))
        return near

    def _settle(self, variable: int) -> None:
        """Give `variable` the value that is least if every table goes its own way, and leave it out of all tables."""
        price = np.zeros(self.sizes[variable])
        held = [self.tables[number] for number in self.holding[variable]]
        for variables, table in held:
            place = variables.index(variable)
            price += table.min(tuple(i for i in range(table.ndim) if i != place))
        value = int(price.argmin())
        self.back.append((variable, (), np.array(value)))
        for number in self.holding[variable].copy():
            variables, table = self.tables.pop(number)
            for v in variables:
                self.holding[v].discard(number)
            rest = tuple(v for v in variables if v != variable)
            if rest:
                self._keep(rest, np.asarray(table.take(value, variables.index(variable))))
