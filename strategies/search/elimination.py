"""Exact minimisation over a network of tables: variables are eliminated one by one.

Eliminating a variable adds up the tables that it is in and keeps, for every choice of its neighbours, the least sum.
The variable whose elimination makes the smallest table goes first. Going back through the eliminated variables, each
takes the option that is best in the tables that it was in (to note all options would take as long as the minima). The
order depends on the tables' places alone: a network whose prices have changed is eliminated in the same order again, and
what follows from tables that are still the same objects is taken over.
Source: R. Dechter, "Bucket elimination: a unifying framework for reasoning" (1999), over the min-plus semiring.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import is_

import numpy as np

from strategies.search.cells import Part, Table, table
from strategies.search.transfers import Seconds

LARGEST = 2**24
"""Entries of a table above which narrowing a network is faster than eliminating it as it is."""
CACHED = 2**17
"""Entries of a table that are handled at once."""
Variables = tuple[int, ...]


class TooWide(Exception):
    """A table would be too large."""


class Elimination:
    """The order in which all variables of `sizes` but `kept` are eliminated from `tables`. Raises TooWide where a table
    would have more than `largest` entries (None: `LARGEST`)."""

    def __init__(
        self, sizes: Mapping[int, int], tables: Iterable[Table], kept: Sequence[int] = (), largest: float | None = None
    ) -> None:
        self.sizes, self.tables, self.order = sizes, list(tables), tuple(sorted(kept))
        self.scopes = [one.variables for one in self.tables]
        """The variables of every table: of those that are given, and of those that eliminations make."""
        self.splitting = {number for number, one in enumerate(self.tables) if one.cell.split is not None}
        self.at: dict[int, set[int]] = {variable: set() for variable in sizes}
        """The tables that a variable is in at the moment."""
        for number, scope in enumerate(self.scopes):
            for variable in scope:
                self.at[variable].add(number)
        self.steps: list[Eliminated] = []
        self._plan(set(sizes) - set(kept), LARGEST if largest is None else largest)
        used = {number for step in self.steps for number in step.numbers}
        self.left = [number for number in range(len(self.scopes)) if number not in used]
        self.added: list[Seconds] = []
        self.rest: Rest | None = None

    def solve(self) -> Rest:
        """With the tables' seconds as they are now."""
        made: list[Seconds] = []
        for step in self.steps:
            made.append(step.least(self.tables, made))
        left = [self.tables[n].seconds if n < len(self.tables) else made[n - len(self.tables)] for n in self.left]
        if self.rest is None or not _same(left, self.added):
            parts = [_placed(one, self.scopes[n], self.order) for n, one in zip(self.left, left, strict=True)]
            total = np.broadcast_to(added(parts) if parts else np.zeros(()), [self.sizes[v] for v in self.order])
            self.added, self.rest = left, Rest(table(self.order, total), tuple(self.steps))
        return self.rest

    def _plan(self, alive: set[int], largest: float) -> None:
        heap = [(self._entries(variable), variable) for variable in alive]
        heapq.heapify(heap)
        while alive:
            size, variable = heapq.heappop(heap)
            if variable not in alive:
                continue
            now = self._entries(variable)
            if now != size:
                heapq.heappush(heap, (now, variable))
                continue
            if size > largest:
                raise TooWide
            around, numbers = self._around(variable), tuple(sorted(self.at[variable]))
            self.steps.append(Eliminated(variable, around, numbers, [self.scopes[n] for n in numbers]))
            used = self.at.pop(variable)
            alive.discard(variable)
            for v in around:
                self.at[v] = (self.at[v] - used) | {len(self.scopes)}
            self.scopes.append(around)
            for v in around:
                if v in alive:
                    heapq.heappush(heap, (self._entries(v), v))

    def _around(self, variable: int) -> Variables:
        return tuple(sorted({v for number in self.at[variable] for v in self.scopes[number]} - {variable}))

    def _entries(self, variable: int) -> int:
        """Of the tables that eliminating a variable adds up and makes."""
        at, sizes = self.at[variable], self.sizes
        splitting = at & self.splitting
        result = math.prod([sizes[v] for v in {v for number in at for v in self.scopes[number]} if v != variable])
        if len(splitting) != 1:
            return result * sizes[variable]
        (one,) = splitting
        others = {v for number in at if number != one for v in self.scopes[number]}
        scopes = [[self.scopes[one][dim] for dim in dims] for dims, _ in self.tables[one].cell.parts]
        return result + sum(math.prod([sizes[v] for v in others.union(scope)]) for scope in scopes)


class Eliminated:
    """A variable with the tables that it was in, of which `numbers` and `scopes` tell which they are."""

    def __init__(self, variable: int, around: Variables, numbers: Sequence[int], scopes: Sequence[Variables]) -> None:
        self.variable, self.around, self.numbers, self.scopes = variable, around, numbers, scopes
        self.used: list[Seconds] = []
        """The seconds that were added up last."""
        self.looked: list[list[tuple[Variables, Seconds]]] = []
        """Per table its parts: the variables around, and the seconds by their options and the own ones."""
        self.made: Seconds = np.zeros(())

    def least(self, tables: Sequence[Table], made: Sequence[Seconds]) -> Seconds:
        """The least sum for all options of the variables around; `made` are the results of the steps before."""
        count = len(tables)
        splitting = [n for n in self.numbers if n < count and tables[n].cell.split is not None]
        parts: list[Sequence[Part]] = []
        for number, scope in zip(self.numbers, self.scopes, strict=True):
            if number < count and len(splitting) == 1 and number == splitting[0]:
                parts.append(tables[number].cell.parts)
            else:
                seconds = tables[number].seconds if number < count else made[number - count]
                parts.append(((tuple(range(len(scope))), seconds),))
        used = [seconds for one in parts for _, seconds in one]
        if not _same(used, self.used):
            self.used = used
            self._add(parts)
        return self.made

    def _add(self, parts: Sequence[Sequence[Part]]) -> None:
        order = (self.variable, *self.around)
        whole: list[Seconds] = []
        split: list[Seconds] = []
        self.looked = []
        for scope, found in zip(self.scopes, parts, strict=True):
            named = [(tuple([scope[dim] for dim in dims]), seconds) for dims, seconds in found]
            placed = [_placed(seconds, variables, order) for variables, seconds in named]
            if len(placed) == 1:
                whole += placed
            else:
                split = placed
            self.looked.append([_own_last(seconds, variables, self.variable) for variables, seconds in named])
        self.made = reduce(np.minimum, [minimised([*whole, one]) for one in split]) if split else minimised(whole)

    def best(self, picks: Mapping[int, int]) -> int:
        """The option that costs least where its neighbours take `picks`."""
        found = [
            reduce(np.minimum, [seconds[tuple([picks[v] for v in around])] for around, seconds in parts])
            for parts in self.looked
        ]
        return int(reduce(np.add, found).argmin()) if found else 0


@dataclass(frozen=True, eq=False)
class Rest:
    """`table` holds the least seconds over the variables that were kept; `steps` lead back to the others, until the
    same network is eliminated again."""

    table: Table
    steps: tuple[Eliminated, ...]

    def complete(self, picks: dict[int, int]) -> None:
        """Adds the eliminated variables' options to those of the kept ones."""
        for step in reversed(self.steps):
            picks[step.variable] = step.best(picks)


def eliminate(
    sizes: Mapping[int, int], tables: Iterable[Table], kept: Sequence[int] = (), largest: float | None = None
) -> Rest:
    """Eliminates all variables of `sizes` but `kept`, which the resulting table has in order; see `Elimination`."""
    return Elimination(sizes, tables, kept, largest).solve()


def minimised(parts: Sequence[Seconds]) -> Seconds:
    """The least sum over dim 0 of arrays that broadcast together. Large ones are made in parts that fit a cache."""
    shape = np.broadcast_shapes(*(one.shape for one in parts))
    entries = math.prod(shape)
    if entries <= CACHED or len(shape) < 3:
        return np.asarray(added(parts).min(0))
    common = [one for one in parts if one.shape[1] == 1]
    if len(common) > 1:
        common = [added(common)]
    others = [one for one in parts if one.shape[1] > 1]
    least = np.empty(shape[1:])
    step = max(CACHED * shape[1] // entries, 1)
    for start in range(0, shape[1], step):
        some = [*common, *(one[:, start : start + step] for one in others)]
        if step > 1 or len(shape) < 4:
            added(some).min(0, out=least[start : start + step])
        else:
            least[start] = minimised([one[:, 0] for one in some])
    return least


def added(parts: Sequence[Seconds]) -> Seconds:
    """The sum of arrays that broadcast together, small ones first."""
    first, *others = sorted(parts, key=np.size)
    return reduce(np.add, others, first)


def _placed(seconds: Seconds, variables: Variables, order: Variables) -> Seconds:
    """Seconds with one dim per variable of `order`."""
    places = [order.index(v) for v in variables]
    shape = [1] * len(order)
    for place, size in zip(places, seconds.shape, strict=True):
        shape[place] = size
    return seconds.transpose(sorted(range(len(places)), key=places.__getitem__)).reshape(shape)


def _own_last(seconds: Seconds, variables: Variables, variable: int) -> tuple[Variables, Seconds]:
    """The other variables, and the seconds by their options and those of `variable`."""
    if variable not in variables:
        return variables, seconds[..., None]
    place = variables.index(variable)
    others = [dim for dim in range(len(variables)) if dim != place]
    return tuple([variables[dim] for dim in others]), seconds.transpose([*others, place])


def _same(first: Sequence[Seconds], second: Sequence[Seconds]) -> bool:
    """Whether these are the same objects."""
    return len(first) == len(second) and all(map(is_, first, second))
