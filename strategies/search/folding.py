"""Repeated layers: found in the network alone, solved once, raised to their number by doubling.

A run is a stretch of variables in which every one looks like the one `period` before it: the same tables (as objects)
to neighbours that are as far away, or that are the same ones in front of the run. One block of it is eliminated down to
a min-plus matrix from the variables of the block before that it touches to its own that the next one touches; the n-th
power of the matrix is all n blocks. The last block stays as it is: what follows may touch any of its variables.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from strategies.search.cells import Cell, Known, Network, Table
from strategies.search.elimination import Elimination
from strategies.search.transfers import Integers, Seconds

SHORTEST = 3
"""Blocks that a run has at least."""


@dataclass(frozen=True)
class Run:
    """`count` blocks of `period` variables from `start` on; blocks touch the variables `inward` of the block before
    (numbers relative to that block's start) and `outside` in front of the run."""

    start: int
    period: int
    count: int
    inward: tuple[int, ...]
    outside: tuple[int, ...]


class Folded:
    """A network with its runs, which depend on the tables' places alone: solved again when prices have changed."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.attached: list[list[Table]] = [[] for _ in network.sizes]
        for one in network.tables:
            self.attached[max(one.variables)].append(one)
        names, places = dict[tuple[int, ...], int](), dict[tuple[int, ...], int]()
        told = []
        for v, (size, tables) in enumerate(zip(network.sizes, self.attached, strict=True)):
            name = names.setdefault((size, *[id(one.cell) for one in tables]), len(names))
            place = (name, *[v - around for one in tables for around in one.variables])
            told.append((name, places.setdefault(place, len(places))))
        self.names, self.places = np.array(told, dtype=np.int64).reshape(len(told), 2).T
        """Per variable a number for its tables, and one for these and how far away their other variables are."""
        self.runs = list(self._runs(0, len(network.sizes)))

    @cached_property
    def powers(self) -> list[Power]:
        return [Power(run, self.attached, self.network) for run in self.runs]

    @cached_property
    def others(self) -> Elimination:
        """Of all variables that are not within a run."""
        folded = {v for power in self.powers for v in power.folded}
        tables = [one for v in range(len(self.attached)) if v not in folded for one in self.attached[v]]
        hidden = folded.difference(*(power.ending for power in self.powers))
        sizes = {v: size for v, size in enumerate(self.network.sizes) if v not in hidden}
        return Elimination(sizes, [*tables, *(power.table for power in self.powers)])

    def _runs(self, low: int, high: int) -> Iterator[Run]:
        run = self._run(low, high)
        if run is not None:
            yield run
            yield from self._runs(low, run.start)
            yield from self._runs(run.start + run.period * run.count, high)

    def solve(self) -> tuple[list[int], float]:
        """The best option of every variable, and what they cost. Raises TooWide."""
        known, picks = self.network.known, dict[int, int]()
        with known.solving():
            for power in self.powers:
                power.renew(known)
            rest = self.others.solve(known)
        rest.complete(picks)
        for power in self.powers:
            power.complete(picks)
        return [picks[v] for v in range(len(self.network.sizes))], float(rest.table.seconds)

    def _run(self, low: int, high: int) -> Run | None:
        """The run between two variables that saves most; None where nothing is repeated."""
        seen: dict[int, int] = {}
        distances: Counter[int] = Counter()
        for position, name in enumerate(self.names[low:high].tolist()):
            if name in seen:
                distances[position - seen[name]] += 1
            seen[name] = position
        best, saved = None, 0
        for period, _ in distances.most_common(6):
            for start, length in self._stretches(low, high, period):
                if length >= (SHORTEST - 1) * period and length > saved:
                    run = _placed(self.attached, self.network.sizes, start, period, length + period, high)
                    if run is not None:
                        best, saved = run, length
        return best

    def _stretches(self, low: int, high: int, period: int) -> list[tuple[int, int]]:
        """Where variables that are like those one `period` later begin, and how many there are."""
        first, second = slice(low, high - period), slice(low + period, high)
        alike = self.places[first] == self.places[second]
        for position in np.flatnonzero(~alike & (self.names[first] == self.names[second])).tolist():
            alike[position] = _alike(self.attached[low + position], self.attached[low + position + period], period)
        edges = np.flatnonzero(np.diff(alike.astype(np.int8), prepend=0, append=0)).tolist()
        return [(low + start, end - start) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def _alike(first: Sequence[Table], second: Sequence[Table], period: int) -> bool:
    """Whether the same tables, `period` apart, are over corresponding variables, or over the same ones."""
    return all(
        y in (x, x + period)
        for a, b in zip(first, second, strict=True)
        for x, y in zip(a.variables, b.variables, strict=True)
    )


def _placed(
    attached: Sequence[Sequence[Table]], sizes: Sequence[int], first: int, period: int, length: int, high: int
) -> Run | None:
    """The run within a stretch of repeated variables whose blocks touch least of one another."""
    later = {
        v for variable in range(first + length, len(attached)) for one in attached[variable] for v in one.variables
    }
    pairs = {
        v: [
            (x, y)
            for a, b in zip(attached[v], attached[v + period], strict=True)
            for x, y in zip(a.variables, b.variables, strict=True)
        ]
        for v in range(first, min(first + 2 * period, first + length - period))
    }
    """The variables around some variable, and those around the one that is one `period` later."""
    best, least = None, math.inf
    for start in range(first, first + period):
        count = (first + length - start) // period
        last = start + (count - 1) * period
        if count < SHORTEST or any(start <= v < last for v in later):
            continue
        inward, outside, fits = set(), set(), True
        for v in range(start, start + period):
            for x, y in pairs[v]:
                if x == y:
                    outside.add(x)
                elif y < start + period:
                    inward.add(y - start)
                    fits &= y >= start
        entering = {start - period + place for place in inward}
        rest = range(start + count * period, first + length)
        touched = {v for variable in rest for table in attached[variable] for v in table.variables}
        if not fits or entering & outside or min(entering, default=0) < 0 or any(start <= v < last for v in touched):
            continue
        width = math.prod(sizes[start + place] for place in inward) * math.prod(sizes[v] for v in outside)
        if width < least:
            best, least = Run(start, period, count, tuple(sorted(inward)), tuple(sorted(outside))), width
    return best


class Power:
    """All blocks of a run but the last as one table over what they touch in front, and what the last block touches."""

    def __init__(self, run: Run, attached: Sequence[Sequence[Table]], network: Network) -> None:
        sizes = network.sizes
        self.run, self.blocks = run, run.count - 1
        self.folded = range(run.start, run.start + run.period * self.blocks)
        """The variables whose tables this one stands for."""
        start, period = run.start, run.period
        self.entering = tuple(start - period + place for place in run.inward)
        self.leaving = tuple(start + place for place in run.inward)
        self.ending = tuple(start + (run.count - 2) * period + place for place in run.inward)
        own = range(start, start + period)
        kept = tuple(dict.fromkeys((*run.outside, *self.entering, *self.leaving)))
        self.block = Elimination({v: sizes[v] for v in (*kept, *own)}, [one for v in own for one in attached[v]], kept)
        self.order = [self.block.order.index(v) for v in (*run.outside, *self.entering, *self.leaving)]
        self.shape = [sizes[start + place] for place in run.inward]
        self.before = [sizes[v] for v in run.outside]
        self.levels = [level for level in range(self.blocks.bit_length()) if self.blocks >> level & 1]
        self.rest = self.block.solve(network.known)
        self.table = Table((*run.outside, *self.entering, *self.ending), Cell(self._raised))

    def renew(self, known: Known) -> None:
        """Looks at the prices of a block again."""
        rest = self.block.solve(known)
        if rest is not self.rest:
            self.rest = rest
            self.table.cell.refresh()

    def _raised(self) -> Seconds:
        width = math.prod(self.shape)
        matrix = self.rest.table.seconds.transpose(self.order).reshape(math.prod(self.before), width, width)
        self.doubled: list[tuple[Seconds, Integers | None]] = [(matrix, None)]
        while len(self.doubled) <= self.levels[-1]:
            self.doubled.append(product(self.doubled[-1][0], self.doubled[-1][0]))
        total, self.joints = self.doubled[self.levels[0]][0], []
        for level in self.levels[1:]:
            total, joint = product(total, self.doubled[level][0])
            self.joints.append(joint)
        return np.asarray(total.reshape((*self.before, *self.shape, *self.shape)))

    def complete(self, picks: dict[int, int]) -> None:
        """Adds the options of all blocks' variables, from those of the table's."""
        outside = int(np.ravel_multi_index([picks[v] for v in self.run.outside], self.before)) if self.before else 0
        first, last = (
            int(np.ravel_multi_index([picks[v] for v in variables], self.shape)) if self.shape else 0
            for variables in (self.entering, self.ending)
        )
        states = [first, *self._between(outside, first, last), last]
        own = range(self.run.start, self.run.start + self.run.period)
        blocks: dict[tuple[int, int], dict[int, int]] = {}
        for block, ends in enumerate(pairwise(states)):
            if ends not in blocks:
                found = blocks[ends] = {v: picks[v] for v in self.run.outside}
                for variables, index in zip((self.entering, self.leaving), ends, strict=True):
                    found |= dict(zip(variables, map(int, np.unravel_index(index, self.shape)), strict=True))
                self.rest.complete(found)
            shift = block * self.run.period
            picks |= {v + shift: blocks[ends][v] for v in own}

    def _between(self, outside: int, first: int, last: int) -> list[int]:
        """The states between the first and the last block."""
        ends = [last]
        for joint in reversed(self.joints):
            ends.insert(0, int(joint[outside, first, ends[0]]))
        found, state = [], first
        for level, end in zip(self.levels, ends, strict=True):
            found += [*self._inside(level, outside, state, end), end]
            state = end
        return found[:-1]

    def _inside(self, level: int, outside: int, first: int, last: int) -> list[int]:
        middle = self.doubled[level][1]
        if middle is None:
            return []
        state = int(middle[outside, first, last])
        left = self._inside(level - 1, outside, first, state)
        return [*left, state, *self._inside(level - 1, outside, state, last)]


def product(left: Seconds, right: Seconds) -> tuple[Seconds, Integers]:
    """The min-plus product of matrices [batch, n, n], and the middle that makes each entry."""
    best, middle = np.empty_like(left), np.empty(left.shape, dtype=np.int64)
    for row in range(left.shape[1]):
        sums = left[:, row, :, None] + right
        middle[:, row] = sums.argmin(1)
        best[:, row] = sums.min(1)
    return best, middle
