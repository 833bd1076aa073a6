"""Exact minimisation over a network of tables: variables are eliminated one by one.

Eliminating a variable adds up the tables that it is in and keeps, for every choice of its neighbours, the least sum.
The variable whose elimination makes the smallest table goes first. Going back through the eliminated variables, each
takes the option that is best in the tables that it was in (to note all options would take as long as the minima). The
order depends on the places of tables alone: a network whose prices have changed is eliminated in the same order again,
and what follows from tables that are still the same objects is taken over.
Source: R. Dechter, "Bucket elimination: a unifying framework for reasoning" (1999), over the min-plus semiring.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import attrgetter, is_
from typing import Any

import numpy as np

from strategies.search.cells import Known, Name, Part, Table, table
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
        self.done: set[int] = set()
        """The tables that were added up."""
        self._plan(set(sizes) - set(kept), LARGEST if largest is None else largest)
        self.left = [number for number in range(len(self.scopes)) if number not in self.done]
        self.added: list[Seconds] = []
        self.rest: Rest | None = None

    def solve(self, known: Known | None = None) -> Rest:
        """With the tables' seconds as they are now; what is `known` already is not added up again."""
        made: list[Seconds] = []
        known = Known() if known is None else known
        for step in self.steps:
            made.append(step.least(self.tables, made, known))
        left = [self.tables[n].seconds if n < len(self.tables) else made[n - len(self.tables)] for n in self.left]
        if self.rest is None or not _same(left, self.added):
            places = [tuple([self.order.index(v) for v in self.scopes[n]]) for n in self.left]
            parts = [_placed(one, at, len(self.order)) for one, at in zip(left, places, strict=True)]
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
            splitting = self.at[variable] & self.splitting
            scopes = {n: self.scopes[n] for n in numbers}
            self.steps.append(Eliminated(variable, around, scopes, *(splitting if len(splitting) == 1 else ())))
            used = self.at.pop(variable)
            self.done |= used
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
    """A variable with the tables that it was in: `scopes` by number, of which `splitting` is taken in parts."""

    def __init__(
        self, variable: int, around: Variables, scopes: Mapping[int, Variables], splitting: int | None = None
    ) -> None:
        self.variable, self.around, self.splitting = variable, around, splitting
        order = {v: place for place, v in enumerate((variable, *around))}
        places = {number: tuple([order[v] for v in scope]) for number, scope in scopes.items()}
        """Per table, where its dims are among the variable itself and those around."""
        self.split_places = places.pop(splitting) if splitting is not None else ()
        self.numbers, self.places = list(places), list(places.values())
        self.used: list[Seconds] = []
        """What was added up last."""
        self.parts: list[tuple[Part, ...]] = []
        """The same by tables: one array, or several of which the table is the least."""
        self.name: Name = ()
        self.made: Seconds = np.zeros(())

    def least(self, tables: Sequence[Table], made: Sequence[Seconds], known: Known) -> Seconds:
        """The least sum for all options of the variables around; `made` are the results of the steps before."""
        count = len(tables)
        whole = [tables[n].cell.seconds if n < count else made[n - count] for n in self.numbers]
        split = () if self.splitting is None else tables[self.splitting].cell.parts
        used = [*whole, *[seconds for _, seconds in split]]
        if self.used and _same(used, self.used):
            return known.least(self.name, self.parts, lambda: self.made)
        self.used = used  # which keeps the arrays, and so their names
        self.parts = [((places, seconds),) for places, seconds in zip(self.places, whole, strict=True)]
        if split:
            placed = [(tuple([self.split_places[dim] for dim in dims]), seconds) for dims, seconds in split]
            self.parts.append(tuple(placed))
        self.name = tuple(sorted([(len(one), places, id(seconds)) for one in self.parts for places, seconds in one]))
        self.made = known.least(self.name, self.parts, self._least)
        return self.made

    def _least(self) -> Seconds:
        dims = 1 + len(self.around)
        placed = [[_placed(seconds, places, dims) for places, seconds in parts] for parts in self.parts]
        whole = [one[0] for one in placed if len(one) == 1]
        split = [one for parts in placed if len(parts) > 1 for one in parts]
        return reduce(np.minimum, [minimised([*whole, one]) for one in split]) if split else minimised(whole)

    def best(self, picks: Mapping[int, int]) -> int:
        """The option that costs least where its neighbours take `picks`."""
        chosen: list[Any] = [slice(None), *[picks[v] for v in self.around]]
        found = [
            reduce(np.minimum, [seconds[tuple([chosen[place] for place in places])] for places, seconds in parts])
            for parts in self.parts
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
    """The least sum over dim 0 of arrays that broadcast together (0 of none). Large ones are made in parts that fit a
    cache."""
    if not parts:
        return np.zeros(())
    shape = [max(sizes) for sizes in zip(*[one.shape for one in parts], strict=True)]
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


_size = attrgetter("size")


def added(parts: Sequence[Seconds]) -> Seconds:
    """The sum of arrays that broadcast together, small ones first."""
    first, *others = sorted(parts, key=_size)
    return reduce(np.add, others, first)


def _placed(seconds: Seconds, places: tuple[int, ...], dims: int) -> Seconds:
    """Seconds with so many dims, of which the own ones are at `places`."""
    shape = [1] * dims
    for place, size in zip(places, seconds.shape, strict=True):
        shape[place] = size
    return seconds.transpose(_order(places)).reshape(shape)


@cache
def _order(places: tuple[int, ...]) -> tuple[int, ...]:
    """The dims by their places."""
    return tuple(sorted(range(len(places)), key=lambda dim: places[dim]))


def _same(first: Sequence[Seconds], second: Sequence[Seconds]) -> bool:
    """Whether these are the same objects."""
    return len(first) == len(second) and all(map(is_, first, second))
