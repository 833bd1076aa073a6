"""Exact minimisation over a network of tables: variables are eliminated one by one.

Eliminating a variable adds up the tables that it is in and keeps, for every choice of its neighbours, the least sum and
the option that makes it. The variable whose elimination makes the smallest table goes first. Going back through the
eliminated variables reads the best solution. Source: R. Dechter, "Bucket elimination: a unifying framework for
reasoning" (1999), over the min-plus semiring.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from strategies.search.cells import Table, table
from strategies.search.transfers import Seconds

LARGEST = 2**28
"""Entries of a table above which a search needs too much memory."""


CACHED = 2**17
"""Entries of a table that are handled at once."""


class TooWide(Exception):
    """A table would be larger than `LARGEST`."""


@dataclass(frozen=True, eq=False)
class Eliminated:
    """The best option of `variable` for every choice of `neighbours`."""

    variable: int
    neighbours: tuple[int, ...]
    best: npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Rest:
    """`table` holds the least seconds over the variables that were kept; `steps` lead back to the others."""

    table: Table
    steps: tuple[Eliminated, ...]

    def complete(self, picks: dict[int, int]) -> None:
        """Adds the eliminated variables' options to those of the kept ones."""
        for step in reversed(self.steps):
            picks[step.variable] = int(step.best[tuple(picks[v] for v in step.neighbours)])


def eliminate(sizes: Mapping[int, int], tables: Iterable[Table], kept: Sequence[int] = ()) -> Rest:
    """Eliminates all variables of `sizes` but `kept`, which the resulting table has in order. Raises TooWide."""
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
        if size > LARGEST:
            raise TooWide
        around = neighbours(variable)
        least, best = minimised([waiting.pop(number) for number in sorted(at[variable])], (*around, variable), sizes)
        steps.append(Eliminated(variable, tuple(around), best))
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


def minimised(
    tables: Sequence[Table], order: tuple[int, ...], sizes: Mapping[int, int]
) -> tuple[Seconds, npt.NDArray[np.int32]]:
    """The least sum of tables over the last variable of `order`, and the option that makes it. Large ones are made in
    parts that fit a cache."""
    shape = [sizes[v] for v in order]
    splitting = [one for one in tables if one.cell.split is not None]
    if len(splitting) == 1 and math.prod(shape) > CACHED:
        return _by_parts([one for one in tables if one is not splitting[0]], splitting[0].parts(), order, sizes)
    if math.prod(shape) <= CACHED or len(order) < 3:
        total = combined(tables, order, sizes)
        best = total.argmin(-1)
        return np.take_along_axis(total, best[..., None], -1)[..., 0], best.astype(np.int32)
    first, rest = order[0], order[1:]
    with_first = [one for one in tables if first in one.variables]
    common = combined([one for one in tables if first not in one.variables], rest, sizes)
    least, best = np.empty(shape[:-1]), np.empty(shape[:-1], dtype=np.int32)
    for option in range(shape[0]):
        parts = [_taken(one, first, option) for one in with_first]
        total = common + combined(parts, rest, sizes)
        best[option] = total.argmin(-1)
        least[option] = np.take_along_axis(total, best[option][..., None].astype(np.int64), -1)[..., 0]
    return least, best


def _taken(one: Table, variable: int, option: int) -> Table:
    """A table with one variable decided."""
    left = np.asarray(one.seconds.take(option, one.variables.index(variable)))
    return table(tuple(v for v in one.variables if v != variable), left)


def _by_parts(
    tables: Sequence[Table], parts: Sequence[Table], order: tuple[int, ...], sizes: Mapping[int, int]
) -> tuple[Seconds, npt.NDArray[np.int32]]:
    """As `minimised`, with one more table that is the least of `parts`: each is minimised alone."""
    around = order[:-1]
    least, best = np.full([sizes[v] for v in around], np.inf), np.zeros([sizes[v] for v in around], dtype=np.int32)
    for part in parts:
        used = {v for one in (*tables, part) for v in one.variables}
        seconds, options = minimised([*tables, part], tuple(v for v in order if v in used), sizes)
        shape = [sizes[v] if v in used else 1 for v in around]
        seconds, options = seconds.reshape(shape), options.reshape(shape)
        best = np.where(seconds < least, options, best)
        least = np.minimum(seconds, least)
    return least, best


def combined(tables: Sequence[Table], order: tuple[int, ...], sizes: Mapping[int, int]) -> Seconds:
    """The sum of tables, one array dim per variable of `order`."""
    total = np.zeros([sizes[v] for v in order])
    for one in sorted(tables, key=lambda one: one.seconds.size):
        places = [order.index(v) for v in one.variables]
        shape = [1] * len(order)
        for place in places:
            shape[place] = sizes[order[place]]
        total += one.seconds.transpose(np.argsort(places)).reshape(shape)
    return total
