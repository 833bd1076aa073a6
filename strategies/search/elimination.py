"""Exact minimisation over a network of tables: variables are eliminated one by one.

Eliminating a variable adds up the tables that it is in and keeps, for every choice of its neighbours, the least sum.
The variable whose elimination makes the smallest table goes first. Going back through the eliminated variables, each
takes the option that is best in the tables that it was in (to note all options would take as long as the minima).
Source: R. Dechter, "Bucket elimination: a unifying framework for reasoning" (1999), over the min-plus semiring.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from strategies.search.cells import Table, table
from strategies.search.transfers import Seconds

LARGEST = 2**24
"""Entries of a table above which narrowing a network is faster than eliminating it as it is."""
CACHED = 2**17
"""Entries of a table that are handled at once."""


class TooWide(Exception):
    """A table would be too large."""


class Eliminated:
    """A variable, and the tables that it was in."""

    def __init__(self, variable: int, tables: Sequence[Table]) -> None:
        self.variable = variable
        self.tables = [
            ((*one.variables[:place], *one.variables[place + 1 :]), np.moveaxis(one.seconds, place, -1))
            for one in tables
            for place in (one.variables.index(variable),)
        ]
        """The variables around, and the seconds by their options and the own ones."""

    def best(self, picks: Mapping[int, int]) -> int:
        """The option that costs least where its neighbours take `picks`."""
        found = [seconds[tuple([picks[v] for v in around])] for around, seconds in self.tables]
        return int(sum(found[1:], found[0]).argmin()) if found else 0


@dataclass(frozen=True, eq=False)
class Rest:
    """`table` holds the least seconds over the variables that were kept; `steps` lead back to the others."""

    table: Table
    steps: tuple[Eliminated, ...]

    def complete(self, picks: dict[int, int]) -> None:
        """Adds the eliminated variables' options to those of the kept ones."""
        for step in reversed(self.steps):
            picks[step.variable] = step.best(picks)


def eliminate(
    sizes: Mapping[int, int], tables: Iterable[Table], kept: Sequence[int] = (), largest: float | None = None
) -> Rest:
    """Eliminates all variables of `sizes` but `kept`, which the resulting table has in order. Raises TooWide where a
    table would have more than `largest` entries (None: `LARGEST`)."""
    largest = LARGEST if largest is None else largest
    waiting = dict(enumerate(tables))
    at: dict[int, set[int]] = {variable: set() for variable in sizes}
    for number, one in waiting.items():
        for variable in one.variables:
            at[variable].add(number)

    def neighbours(variable: int) -> list[int]:
        return sorted({v for number in at[variable] for v in waiting[number].variables} - {variable})

    def entries(variable: int) -> int:
        around, splitting = neighbours(variable), [n for n in at[variable] if waiting[n].cell.split is not None]
        result = math.prod(sizes[v] for v in around)
        if len(splitting) != 1:
            return result * sizes[variable]
        others = {v for number in at[variable] if number != splitting[0] for v in waiting[number].variables}
        return result + sum(
            math.prod(sizes[v] for v in others.union(p.variables)) for p in waiting[splitting[0]].parts()
        )

    alive = set(sizes) - set(kept)
    heap = [(entries(variable), variable) for variable in alive]
    heapq.heapify(heap)
    steps, fresh = [], len(waiting)
    while alive:
        size, variable = heapq.heappop(heap)
        if variable not in alive:
            continue
        now = entries(variable)
        if now != size:
            heapq.heappush(heap, (now, variable))
            continue
        if size > largest:
            raise TooWide
        around = neighbours(variable)
        own = tuple(waiting.pop(number) for number in sorted(at[variable]))
        least = minimised(own, (*around, variable), sizes)
        steps.append(Eliminated(variable, own))
        used = at.pop(variable)
        alive.discard(variable)
        waiting[fresh] = table(tuple(around), least)
        for v in around:
            at[v] = (at[v] - used) | {fresh}
            if v in alive:
                heapq.heappush(heap, (entries(v), v))
        fresh += 1
    order = tuple(sorted(kept))
    return Rest(table(order, combined(list(waiting.values()), order, sizes)), tuple(steps))


def minimised(tables: Sequence[Table], order: tuple[int, ...], sizes: Mapping[int, int]) -> Seconds:
    """The least sum of tables over the last variable of `order`. Large ones are made in parts that fit a cache."""
    shape = [sizes[v] for v in order]
    entries = math.prod(shape)
    splitting = [one for one in tables if one.cell.split is not None]
    if len(splitting) == 1 and entries > CACHED:
        return _by_parts([one for one in tables if one is not splitting[0]], splitting[0].parts(), order, sizes)
    if entries <= CACHED or len(order) < 3:
        return np.asarray(combined(tables, order, sizes).min(-1))
    first, rest = order[0], order[1:]
    with_first = [one for one in tables if first in one.variables]
    alone = [one for one in tables if first not in one.variables]
    common = [table(rest, combined(alone, rest, sizes))] if alone else []
    least = np.empty(shape[:-1])
    step = max(CACHED * shape[0] // entries, 1)
    for start in range(0, shape[0], step):
        parts = [_taken(one, first, start, start + step) for one in with_first]
        some = {**sizes, first: min(step, shape[0] - start)}
        if step > 1 or len(order) < 4:
            least[start : start + step] = combined([*common, *parts], order, some).min(-1)
        else:
            decided = [table(one.variables[1:], one.seconds[0]) for one in parts]
            least[start] = minimised([*common, *decided], rest, sizes)
    return least


def _taken(one: Table, variable: int, start: int, end: int) -> Table:
    """A table with some of one variable's options, which comes first."""
    place = one.variables.index(variable)
    left = np.moveaxis(one.seconds, place, 0)[start:end]
    return table((variable, *one.variables[:place], *one.variables[place + 1 :]), left)


def _by_parts(
    tables: Sequence[Table], parts: Sequence[Table], order: tuple[int, ...], sizes: Mapping[int, int]
) -> Seconds:
    """As `minimised`, with one more table that is the least of `parts`: each is minimised alone."""
    around = order[:-1]
    least = np.full([sizes[v] for v in around], np.inf)
    for part in parts:
        used = {v for one in (*tables, part) for v in one.variables}
        seconds = minimised([*tables, part], tuple(v for v in order if v in used), sizes)
        np.minimum(least, seconds.reshape([sizes[v] if v in used else 1 for v in around]), out=least)
    return least


def combined(tables: Sequence[Table], order: tuple[int, ...], sizes: Mapping[int, int]) -> Seconds:
    """The sum of tables, one array dim per variable of `order`."""
    places = {v: place for place, v in enumerate(order)}
    total = np.zeros(())
    for one in sorted(tables, key=lambda one: one.seconds.size):
        at = [places[v] for v in one.variables]
        shape = [1] * len(order)
        for place, size in zip(at, one.seconds.shape, strict=True):
            shape[place] = size
        turned = one.seconds.transpose(sorted(range(len(at)), key=at.__getitem__)).reshape(shape)
        total = total + turned
    return np.asarray(np.broadcast_to(total, [sizes[v] for v in order]))
