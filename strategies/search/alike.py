"""Prices of redistributions between classes of layouts, where axes that are alike may change places.

Axes of one level and size are alike: a class says how many of them slice every dim, and over how many a tensor is
partial. Classes may be known for the outer levels alone. Invariant: what is told for two classes is not above the price
between any layout of the one and any layout of the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product

import numpy as np

from strategies.core.graph import TensorSpec
from strategies.core.layout import Layout
from strategies.search.transfers import Integers, Rows, Seconds, Transfers
from strategies.search.ways import Levels, Ways

MOST_PAIRS = 400
"""Layouts of one class times those of another, up to which all are priced."""


@dataclass(frozen=True, eq=False)
class ClassRows(Rows):
    """Classes of layouts of one tensor: `dims` [classes, dims * levels] and `partial` [classes, levels + 1] count axes;
    the last column of `partial` is the number of levels that are known."""


def _known(rows: Rows) -> Integers:
    return np.asarray(rows.partial[:, -1])


@dataclass(eq=False)
class _Priced:
    """A table of prices, and how often some were settled."""

    before: Rows
    after: Rows
    values: Seconds
    changes: int = 0


@dataclass
class _Sized:
    """Tables of tensors of one size, and the prices from the classes that are settled, known as far as `reach`."""

    ways: Ways
    tables: list[_Priced] = field(default_factory=list)
    rows: dict[int, Seconds] = field(default_factory=dict)
    reach: dict[int, float] = field(default_factory=dict)
    pairs: set[tuple[int, int]] = field(default_factory=set)


@dataclass
class Alike:
    """The prices of one mesh, as `Transfers` has them for single layouts (`single`)."""

    single: Transfers
    levels: Levels
    raised: int = 0
    made: dict[tuple[object, ...], ClassRows] = field(default_factory=dict)
    tables: dict[tuple[object, ...], _Priced] = field(default_factory=dict)
    ways: dict[int, Ways] = field(default_factory=dict)
    sized: dict[tuple[int, int], _Sized] = field(default_factory=dict)
    placed: dict[int, Integers] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mesh, self.cluster, self.axes = self.single.mesh, self.single.cluster, self.single.axes
        self.places = [np.array([self.axes.index(axis) for axis in level]) for level in self.levels]
        self.weights = np.log2([self.mesh.sizes[level[0]] for level in self.levels])
        self.lengths = np.array([len(level) for level in self.levels])
        self.views = list(self._views())

    def _views(self) -> Iterator[tuple[int, float, int]]:
        """Levels that are seen from outside a unit, the bandwidth of a rank's link there, and ranks of a unit."""
        every = self.single.bounds.levels
        for seen, bandwidth, ranks in every:
            outer = [level for level, places in enumerate(self.places) if all(seen >> p & 1 for p in places)]
            inner = [level for level, places in enumerate(self.places) if not any(seen >> p & 1 for p in places)]
            if outer == list(range(len(outer))) and len(outer) + len(inner) == len(self.levels):
                yield len(outer), bandwidth, ranks

    def counted(self, bits: Integers) -> Integers:
        """[..., levels]: how many axes of every level are among `bits`."""
        return np.stack([sum((bits >> p & 1) for p in places) for places in self.places], -1)

    def classes(self, rows: Rows, known: Integers) -> ClassRows:
        """The classes of single layouts, of which so many levels are `known` [rows]."""
        seen = np.arange(len(self.levels)) < known[:, None]
        dims = self.counted(self.bits(rows)) * seen[:, None, :]
        partial = self.counted(rows.partial) * seen
        return self._once(dims.reshape(len(rows), -1), np.concatenate([partial, known[:, None]], 1))

    def grouped(self, rows: Rows, known: Integers) -> tuple[ClassRows, Integers]:
        """As `classes`, each once, and which one every layout is of."""
        every = self.classes(rows, known)
        _, first, of_row = np.unique(
            np.concatenate([every.dims, every.partial], 1), axis=0, return_index=True, return_inverse=True
        )
        return self._once(every.dims[first], every.partial[first]), of_row.ravel()

    def bits(self, rows: Rows) -> Integers:
        """The axes of every dim as bits, in whatever order they slice."""
        numbers = [sum(1 << self.axes.index(axis) for axis in axes) for axes in self.single.tuples]
        return np.asarray(np.array(numbers)[rows.dims])

    def rows_of(self, layouts: Sequence[Layout]) -> ClassRows:
        rows = self.single.rows_of(layouts)
        return self.classes(rows, np.full(len(rows), len(self.levels)))

    def whole(self, rows: Rows) -> ClassRows:
        partial = np.zeros_like(rows.partial)
        partial[:, -1] = _known(rows)
        return self._once(rows.dims, partial)

    def _once(self, dims: Integers, partial: Integers) -> ClassRows:
        key = (dims.shape, dims.tobytes(), partial.tobytes())
        return self.made.setdefault(key, ClassRows(dims, partial))

    def seconds(self, before: Rows, after: Rows, spec: TensorSpec, few: int | None = None) -> Seconds:
        """[before, after]: at least so long a redistribution of a tensor like `spec` takes."""
        key = self._key(before, after, spec)
        if key not in self.tables:
            made = _Priced(before, after, self._bounds(before, after, float(spec.elements * spec.item_bytes)))
            self.tables[key] = made
            group = self._group(spec)
            group.tables.append(made)
            for start, found in group.rows.items():
                self._raise(made, group.ways, start, found)
        return self.tables[key].values

    def _key(self, before: Rows, after: Rows, spec: TensorSpec) -> tuple[object, ...]:
        return id(before), id(after), spec.elements * spec.item_bytes

    def _group(self, spec: TensorSpec) -> _Sized:
        dims = len(spec.shape)
        key = dims, spec.elements * spec.item_bytes
        if key not in self.sized:
            if dims not in self.ways:
                self.ways[dims] = Ways(self.mesh, self.cluster, self.levels, dims)
            self.sized[key] = _Sized(self.ways[dims])
        return self.sized[key]

    def _raise(self, table: _Priced, ways: Ways, start: int, found: Seconds) -> None:
        rows = np.flatnonzero(self._states(table.before, ways) == start)
        if len(rows):
            new = np.maximum(table.values[rows], ways.least(found, self._states(table.after, ways)))
            higher = new > table.values[rows] * (1 + 1e-12)
            if higher.any():
                self.raised += 1
                table.changes += 1
                table.values[rows] = new

    def _states(self, rows: Rows, ways: Ways) -> Integers:
        """The state of every class; of one that is not known in all levels, the place of its group behind them."""
        if id(rows) not in self.placed:
            dims = rows.dims.reshape(len(rows), -1, len(self.levels))
            self.placed[id(rows)] = ways.places(dims, rows.partial[:, :-1], _known(rows))
        return self.placed[id(rows)]

    def changes(self, before: Rows, after: Rows, spec: TensorSpec) -> int:
        return self.tables[self._key(before, after, spec)].changes

    def settle(self, before: Rows, after: Rows, spec: TensorSpec, row: int, column: int) -> None:
        """Finds the least prices of all ways from a class that is known in all levels."""
        if _known(before)[row] < len(self.levels):
            return
        group = self._group(spec)
        start = int(self._states(before, group.ways)[row])
        near = float(self.tables[self._key(before, after, spec)].values[row, column])
        if near >= group.reach.get(start, 0.0):
            self._look(group, start, int(self._states(after, group.ways)[column]), near, spec)

    def _look(self, group: _Sized, start: int, end: int, near: float, spec: TensorSpec) -> None:
        """Finds the least prices of all ways from a class as far as to another."""
        found, reach = group.ways.until(start, float(spec.elements * spec.item_bytes), end, near)
        if reach > group.reach.get(start, 0.0):
            group.reach[start] = reach
            found = group.rows[start] = np.maximum(found, group.rows.get(start, 0.0))
            for one in group.tables:
                self._raise(one, group.ways, start, found)

    def settle_all(self, before: Rows, after: Rows, spec: TensorSpec, row: int, column: int) -> None:
        """Finds the least price of all pairs of layouts of two classes; too many pairs stay as they are."""
        if min(_known(before)[row], _known(after)[column]) < len(self.levels):
            return
        group = self._group(spec)
        start = int(self._states(before, group.ways)[row])
        end = int(self._states(after, group.ways)[column])
        first, second = self._members(before, row), self._members(after, column)
        if (start, end) in group.pairs or len(first) * len(second) > MOST_PAIRS:
            return
        group.pairs.add((start, end))
        price = self._cheapest(first, second, spec)
        if start not in group.rows:
            self._look(group, start, end, price, spec)
        found = group.rows[start]
        found[end] = max(found[end], price)
        for one in group.tables:
            self._raise(one, group.ways, start, found)

    def _cheapest(self, before: Rows, after: Rows, spec: TensorSpec) -> float:
        """The least price between two sets of layouts: the least bound is settled until it is a price."""
        while True:
            seconds = self.single.seconds(before, after, spec, few=0)
            row, column = np.unravel_index(int(seconds.argmin()), seconds.shape)
            raised = self.single.raised
            self.single.settle(before, after, spec, int(row), int(column))
            if self.single.raised == raised:
                return float(seconds.min())

    def _members(self, rows: Rows, index: int) -> Rows:
        """All layouts of a class, their axes in the order of the mesh."""
        dims = rows.dims.shape[1] // len(self.levels)
        counts = rows.dims[index].reshape(dims, len(self.levels))
        ways = []
        for level, places in enumerate(self.places):
            wanted = [*counts[:, level].tolist(), int(rows.partial[index, level])]
            ways.append(list(_shared_out([int(p) for p in places], wanted)))
        found = [[sum(parts) for parts in zip(*way, strict=True)] for way in product(*ways)]
        bits = np.array(found, dtype=np.int64).reshape(len(found), dims + 1)
        return self.single._once(bits[:, :-1].copy(), bits[:, -1].copy())

    def _bounds(self, before: Rows, after: Rows, size: float) -> Seconds:
        levels, dims = len(self.levels), before.dims.shape[1] // len(self.levels)
        have = before.dims.reshape(len(before), dims, levels) * self.weights
        want = after.dims.reshape(len(after), dims, levels) * self.weights
        partial = before.partial[:, :-1] * self.weights
        known = np.minimum(_known(before)[:, None], _known(after))
        found = np.zeros((len(before), len(after)))
        for outer, bandwidth, ranks in self.views:
            a, b, p = have[:, :, :outer].sum(2), want[:, :, :outer].sum(2), partial[:, :outer].sum(1)
            target = 2.0 ** -b.sum(1)
            kept = sum((np.maximum(a[:, None, d], b[None, :, d]) for d in range(dims)), np.zeros(found.shape))
            share = np.maximum(target - 2.0**-kept, 0.0)
            used = np.minimum(a.sum(1)[:, None] + p[:, None] + b.sum(1), (self.lengths * self.weights)[:outer].sum())
            apart = np.maximum(1.0 - 2.0 ** (used - kept), 0.0)  # of the elements that no rank holds which wants them
            summed = (2.0 ** p[:, None] - 2 + apart) / 2.0**used + target
            share = np.where(p[:, None] > 0, summed, share)
            seconds = np.where(known >= outer, share * size / ranks / bandwidth, 0.0)
            found = np.maximum(found, seconds)
        found += self.single.bounds.latency * (found > 0)
        differ = partial.sum(1)[:, None] > 0
        for place in range(before.dims.shape[1]):
            differ = differ | (before.dims[:, None, place] != after.dims[None, :, place])
        copy = self.cluster.launch + 2 * (size / 2.0 ** have.sum((1, 2))) / self.cluster.memory_bandwidth
        local = differ & (found == 0) & (known == levels)
        found = np.where(local, copy[:, None], found)
        found[:, after.partial[:, :-1].sum(1) > 0] = 0.0  # what may stay a partial sum need not be sent
        return found


def _shared_out(axes: list[int], wanted: list[int]) -> Iterator[list[int]]:
    """All ways to give `wanted` of the axes to each of some places, as bits."""
    if not wanted:
        yield []
        return
    for chosen in combinations(axes, wanted[0]):
        rest = [axis for axis in axes if axis not in chosen]
        for others in _shared_out(rest, wanted[1:]):
            yield [sum(1 << axis for axis in chosen), *others]
