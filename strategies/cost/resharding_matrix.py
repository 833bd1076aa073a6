"""Seconds of resharding between many layouts at once: exact where needed, a lower bound elsewhere.

A layout is a row of numbers: per dim the number of its tuple of axes (for axes in the order of the mesh, a bit per
axis), and the bits of the axes over which it is partial. Pairs of rows with the same pattern of collectives are found
with numpy, and the shortest path of each pattern is searched for once. A pattern consists of the kinds of a tensor's
dims and both layouts, whatever the order of dims behind the first; so tensors of the same kinds share patterns.

Invariant: exact entries are the seconds of the resharding path that the engine executes; all others are not above them,
and all pairs with a pattern become exact at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from strategies.core.graph import TensorSpec
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.steps import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, LOCAL, REDUCE_SCATTER
from strategies.cost.cluster import Cluster
from strategies.cost.collectives import collective_seconds, copied_elements, moved_seconds
from strategies.resharding.path import LARGE, resharding_path

Integers = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]
Booleans = npt.NDArray[np.bool_]
REPLICATED, PARTIAL, UNREDUCED = -1, -2, -3
"""Values in place of the dim of an axis that slices none."""
AT_ONCE, MANY = 64, 4096
"""Patterns of a pair of tables up to which all become exact at once; pairs of layouts that surely have more."""
EQUAL = 1e-6
"""Relative difference of bounds that count as the same."""
UNREACHABLE = 1e4
"""Seconds between layouts that no path connects: more than any plan takes, and little enough to be added exactly."""
KINDS = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL)
MIXING = np.int64(-7046029254386353131)
"""An odd number whose multiples differ in many bits (2**64 over the golden ratio)."""
WIDTH = 2**16
"""More than there are tuples of axes."""
DimKinds = tuple[int, ...]
"""Per dim a number for all that a path depends on of its size."""
Pattern = tuple[int, ...]
"""Per dim its kind and both tuples of axes as one number, and the partial axes."""


@dataclass(frozen=True, eq=False)
class LayoutTable:
    """Layouts of one tensor, each once: `dims` [layouts, dims], `partial` and `deferred` [layouts]."""

    dims: Integers
    partial: Integers
    deferred: Integers

    def __len__(self) -> int:
        return len(self.partial)

    @cached_property
    def tuples(self) -> list[tuple[Integers, Integers]]:
        """Per dim the tuples of axes that occur, and which of them every layout has."""
        return [np.unique(dim, return_inverse=True) for dim in self.dims.T]


@dataclass(eq=False)
class _Matrix:
    """Seconds between two tables of layouts, [before, after]: `hashes` of the patterns, `values` in seconds or lower
    bounds, and which are `exact`; `changes` counts updates."""

    before: LayoutTable
    after: LayoutTable
    spec: TensorSpec
    kinds: DimKinds
    hashes: Integers
    values: Seconds
    exact: Booleans
    changes: int = 0

    def pattern(self, row: int, column: int) -> Pattern:
        dims = zip(self.kinds, self.before.dims[row].tolist(), self.after.dims[column].tolist(), strict=True)
        parts = [(kind * WIDTH + have) * WIDTH + want for kind, have, want in dims]
        ends = int(self.before.partial[row]), int(self.after.partial[column])
        return *parts[:1], *sorted(parts[1:]), *ends  # dims but the first have no order in a pattern


Entry = tuple[_Matrix, int, int]
"""A matrix, a row and a column."""


class ReshardingCosts:
    """The seconds of one mesh on one cluster.

    Args:
        mesh: the mesh.
        cluster: the cluster.
        at_once: patterns between two tables up to which all entries are exact from the beginning.
    """

    def __init__(self, mesh: Mesh, cluster: Cluster, at_once: int = AT_ONCE) -> None:
        self.mesh, self.cluster, self.at_once = mesh, cluster, at_once
        self.axes = tuple(name for name, size in mesh.axes if size > 1)
        self.numbers: dict[tuple[str, ...], int] = {}
        self.tuples: list[tuple[str, ...]] = []
        self._counts: Integers = np.zeros(0, dtype=np.int64)
        for bits in range(2 ** len(self.axes)):
            self._number(tuple(axis for i, axis in enumerate(self.axes) if bits >> i & 1))
        self.paths: dict[Pattern, list[int]] = {}
        """Per pattern the steps of its path, by number."""
        self._steps: dict[tuple[object, ...], int] = {}
        self._examples: list[tuple[str, tuple[str, ...], int, int, int]] = []
        """Per step its kind and axes; of an example, the elements that it copies, sends and has."""
        self._step_seconds: dict[float, list[float]] = {}
        self._tables: dict[tuple[object, ...], LayoutTable] = {}
        self._matrices: dict[tuple[object, ...], _Matrix] = {}
        self._groups: dict[DimKinds, _MatrixGroup] = {}
        self._bounds = _Bounds(mesh, cluster, self.axes)
        self.raised = 0
        """The number of entries that became exact above their bounds."""

    @property
    def counts(self) -> Integers:
        """Shards that every tuple of axes makes, by its number."""
        if len(self._counts) < len(self.tuples):
            self._counts = np.array([self.mesh.product(axes) for axes in self.tuples])
        return self._counts

    def _number(self, axes: tuple[str, ...]) -> int:
        if axes not in self.numbers:
            self.numbers[axes] = len(self.tuples)
            self.tuples.append(axes)
        return self.numbers[axes]

    def table(self, sliced: Integers, dims: int) -> LayoutTable:
        """Make a table from the dim that every axis slices [layouts, axes], or REPLICATED, PARTIAL or UNREDUCED."""
        bits = 1 << np.arange(len(self.axes))
        numbers = (sliced[:, None, :] == np.arange(dims)[:, None]) @ bits
        return self._unique(numbers, (sliced == PARTIAL) @ bits, (sliced == UNREDUCED) @ bits)

    def table_of(self, layouts: Sequence[Layout]) -> LayoutTable:
        """Make a table of layouts, whose axes may be in any order."""
        single = {name for name, size in self.mesh.axes if size == 1}
        dims = [[self._number(tuple(a for a in dim if a not in single)) for dim in one.dims] for one in layouts]
        partial, deferred = (
            np.array([sum(1 << self.axes.index(a) for a in one if a not in single) for one in every], dtype=np.int64)
            for every in ([one.partial for one in layouts], [one.deferred for one in layouts])
        )
        numbers = np.array(dims, dtype=np.int64).reshape(len(layouts), len(layouts[0].dims))
        return self._unique(numbers, partial, deferred)

    def gradients(self, table: LayoutTable) -> LayoutTable:
        """The layouts of the gradients of values with these."""
        return self._unique(table.dims, table.deferred, np.zeros_like(table.deferred))

    def _unique(self, dims: Integers, partial: Integers, deferred: Integers) -> LayoutTable:
        """Equal tables are one object."""
        key = (dims.shape, dims.tobytes(), partial.tobytes(), deferred.tobytes())
        return self._tables.setdefault(key, LayoutTable(dims, partial, deferred))

    def layout(self, table: LayoutTable, index: int) -> Layout:
        """One layout of a table."""
        partial, deferred = (
            frozenset(axis for i, axis in enumerate(self.axes) if bits[index] >> i & 1)
            for bits in (table.partial, table.deferred)
        )
        return Layout(tuple(self.tuples[number] for number in table.dims[index]), partial, deferred)

    def seconds(self, before: LayoutTable, after: LayoutTable, spec: TensorSpec, at_once: int | None = None) -> Seconds:
        """[before, after]: seconds of resharding a tensor like `spec`, or a lower bound where they are not exact yet.
        `at_once` is as in the constructor, for these tables."""
        key = self._key(before, after, spec)
        if key not in self._matrices:
            self._matrices[key] = self._matrix(before, after, spec, self.at_once if at_once is None else at_once)
        return self._matrices[key].values.copy()

    def _key(self, before: LayoutTable, after: LayoutTable, spec: TensorSpec) -> tuple[object, ...]:
        return id(before), id(after), spec.shape, spec.item_bytes

    def _matrix(self, before: LayoutTable, after: LayoutTable, spec: TensorSpec, at_once: int) -> _Matrix:
        kinds = self._kinds(before, after, spec.shape)
        hashes = pattern_hashes(before, after, kinds)
        made = _Matrix(before, after, spec, kinds, hashes, np.zeros(hashes.shape), np.zeros(hashes.shape, np.bool_))
        ordered = max(before.dims.max(initial=0), after.dims.max(initial=0)) < 2 ** len(self.axes)
        many = ordered and (hashes.size >= max(at_once, MANY) or len(np.unique(hashes)) > at_once)
        if many:
            made.values = self._bounds.seconds(before, after, float(spec.elements * spec.item_bytes))
            made.values[:, after.partial > 0] = 0.0  # what may stay partial need not be sent
        else:
            made.values[:] = np.inf
        unreachable = (after.partial & ~self._varying(before)[:, None]) != 0
        made.values[unreachable], made.exact[unreachable] = UNREACHABLE, True
        self._groups.setdefault(_ordered(kinds), _MatrixGroup()).adopt(made, self._pattern_seconds)
        while not many and not made.exact.all():  # patterns with one hash become exact one after the other
            self._evaluate([(made, row, column) for row, column in np.argwhere(~made.exact).tolist()])
        made.changes = 0
        return made

    def _varying(self, table: LayoutTable) -> Integers:
        """The bits of the axes along which ranks hold something else."""
        bits = np.array([sum(1 << self.axes.index(axis) for axis in axes) for axes in self.tuples], dtype=np.int64)
        return np.asarray(np.bitwise_or.reduce(bits[table.dims], 1) | table.partial)

    def evaluate(self, before: LayoutTable, after: LayoutTable, spec: TensorSpec, row: int, column: int) -> None:
        """Makes one entry exact, with all that have its pattern. Where its bound was too low, so are probably equal
        bounds from or to the same layout, of which the next solution would take one: they become exact, too."""
        made = self._matrices[self._key(before, after, spec)]
        if made.exact[row, column]:
            return
        bound = made.values[row, column]
        self._evaluate([(made, row, column)])
        if made.values[row, column] <= bound * (1 + EQUAL):
            return
        for line, at in ((row, slice(None)), (slice(None), column)):
            same = ~made.exact[line, at] & (np.abs(made.values[line, at] - bound) <= EQUAL * bound)
            places = np.flatnonzero(same).tolist()
            if places:
                self._evaluate([(made, row, one) if line is row else (made, one, column) for one in places])

    def learn(self, other: ReshardingCosts) -> None:
        """Makes exact what had bounds that were too low on another mesh of as many axes: mostly they are here, too."""
        for kinds, group in self._groups.items():
            if kinds in other._groups and (entries := group.entries(other._groups[kinds].raised)):
                self._evaluate(entries)

    def changes(self, before: LayoutTable, after: LayoutTable, spec: TensorSpec) -> int:
        """The number of updates of entries between these tables."""
        return self._matrices[self._key(before, after, spec)].changes

    def _kinds(self, before: LayoutTable, after: LayoutTable, shape: tuple[int, ...]) -> DimKinds:
        """The greatest common divisor of a dim's size with that of the mesh; where layouts are padded or the tensor is
        small, the size itself."""
        size, ranks = math.prod(shape), self.mesh.size
        even = not any(
            (extent % self.counts[tuples]).any()
            for table in (before, after)
            for extent, (tuples, _) in zip(shape, table.tuples, strict=True)
        )
        if even and size and (size % ranks**2 == 0 or size >= LARGE):
            return tuple([math.gcd(extent, ranks) for extent in shape])
        return tuple([ranks + 1 + extent for extent in shape])

    def _evaluate(self, entries: Sequence[Entry]) -> None:
        """Searches for the paths of the patterns of entries of one group, and updates all matrices in which these
        occur."""
        group, hashes = self._groups[_ordered(entries[0][0].kinds)], dict[int, None]()
        for made, row, column in entries:
            number = int(made.hashes[row, column])
            if number in hashes:
                continue
            hashes[number] = None
            pattern = group.patterns[number] = made.pattern(row, column)
            if pattern not in self.paths:
                self.paths[pattern] = self._path(made, row, column)
        raised = group.update(hashes, self._pattern_seconds)
        self.raised += bool(raised)
        group.raised |= raised

    def _pattern_seconds(self, pattern: Pattern, spec: TensorSpec) -> float:
        size = spec.elements * spec.item_bytes
        seconds = self._step_seconds.setdefault(size, [])
        for kind, axes, copied, sent, elements in self._examples[len(seconds) :]:
            seconds.append(moved_seconds(kind, axes, copied, sent, size / elements, self.mesh, self.cluster))
        return sum([seconds[step] for step in self.paths[pattern]])

    def _path(self, made: _Matrix, row: int, column: int) -> list[int]:
        """The steps from one layout to another, by number."""
        shape, numbers = made.spec.shape, []
        elements = max(math.prod(shape), 1)  # an empty tensor sends nothing
        before, after = self.layout(made.before, row), self.layout(made.after, column)
        for step in resharding_path(before, after, shape, self.mesh):
            local = [layout.local_elements(shape, self.mesh) for layout in (step.before, step.after)]
            sent = step.busiest(self.mesh)
            shares = tuple(part / elements for part in (*local, sent))
            key: tuple[object, ...] = (step.kind, step.axes, step.dim > 0, *shares)
            if step.kind in LOCAL:
                key = (step.kind, *key[2:])
            if key not in self._steps:
                self._steps[key] = len(self._examples)
                self._examples.append((step.kind, step.axes, copied_elements(step, self.mesh), sent, elements))
            numbers.append(self._steps[key])
        return numbers


PatternSeconds = Callable[[Pattern, TensorSpec], float]
"""Seconds of the path of a pattern, for a tensor."""


class _MatrixGroup:
    """All matrices of tensors of the same kinds; `patterns` have known paths, by their hashes. Those that `raised` a
    bound took more seconds than that."""

    def __init__(self) -> None:
        self.matrices: list[_Matrix] = []
        self.patterns: dict[int, Pattern] = {}
        self.raised: set[int] = set()

    def adopt(self, made: _Matrix, seconds: PatternSeconds) -> None:
        """Adds a matrix, of which entries with known paths become exact."""
        if self.patterns:
            self._update(_Concatenated([made]), [made], self.patterns, seconds)
        self.matrices.append(made)
        self.__dict__.pop("concatenated", None)

    def update(self, hashes: Iterable[int], seconds: PatternSeconds) -> set[int]:
        """Makes all entries with these patterns exact; those that raised a bound."""
        return self._update(self.concatenated, self.matrices, hashes, seconds)

    def _update(
        self, every: _Concatenated, matrices: Sequence[_Matrix], hashes: Iterable[int], seconds: PatternSeconds
    ) -> set[int]:
        order = np.array(sorted(hashes), dtype=np.int64)
        patterns = np.array([self.patterns[number] for number in order.tolist()], dtype=np.int64)
        nearest = np.minimum(np.searchsorted(order, every.hashes), len(order) - 1)
        places = np.flatnonzero(order[nearest] == every.hashes)
        nearest = nearest[places]
        tables = np.searchsorted(every.starts, places, side="right") - 1
        same = (every.patterns(places, tables) == patterns[nearest]).all(1)
        places, nearest, tables = places[same], nearest[same], tables[same]
        names, inverse = np.unique(tables * len(order) + nearest, return_inverse=True)
        pairs = [divmod(one, len(order)) for one in names.tolist()]
        exact = [seconds(self.patterns[int(order[number])], matrices[table].spec) for table, number in pairs]
        before, now = every.values[places], np.array(exact)[inverse]
        every.values[places], every.exact[places] = now, True
        for table in set(tables[now != before].tolist()):
            matrices[table].changes += 1
        return set(every.hashes[places[now > before * (1 + 1e-12)]].tolist())

    def entries(self, hashes: Iterable[int]) -> list[Entry]:
        """One that is not exact for each of these hashes that has any."""
        every = self.concatenated
        places = np.flatnonzero(np.isin(every.hashes, np.array([*hashes], dtype=np.int64)) & ~every.exact)
        places = places[np.unique(every.hashes[places], return_index=True)[1]]
        tables = np.searchsorted(every.starts, places, side="right") - 1
        rows, columns = np.divmod(places - every.starts[tables], every.widths[tables])
        return [
            (self.matrices[table], row, column)
            for table, row, column in zip(tables.tolist(), rows.tolist(), columns.tolist(), strict=True)
        ]

    @cached_property
    def concatenated(self) -> _Concatenated:
        return _Concatenated(self.matrices)


class _Concatenated:
    """Matrices behind one another; their values become views of the arrays here."""

    def __init__(self, matrices: Sequence[_Matrix]) -> None:
        self.hashes = np.concatenate([one.hashes.ravel() for one in matrices])
        self.values = np.concatenate([one.values.ravel() for one in matrices])
        self.exact = np.concatenate([one.exact.ravel() for one in matrices])
        self.starts = _starts([one.hashes.size for one in matrices])
        for one, start in zip(matrices, self.starts.tolist(), strict=True):
            one.values = self.values[start : start + one.hashes.size].reshape(one.hashes.shape)
            one.exact = self.exact[start : start + one.hashes.size].reshape(one.hashes.shape)
        self.kinds = np.array([one.kinds for one in matrices], dtype=np.int64).reshape(len(matrices), -1)
        self.widths = np.array([len(one.after) for one in matrices])
        self.before = [np.concatenate([getattr(one.before, part) for one in matrices]) for part in ("dims", "partial")]
        self.after = [np.concatenate([getattr(one.after, part) for one in matrices]) for part in ("dims", "partial")]
        self.rows = _starts([len(one.before) for one in matrices])
        self.columns = _starts([len(one.after) for one in matrices])

    def patterns(self, places: Integers, tables: Integers) -> Integers:
        """[pairs, numbers]: the patterns of pairs."""
        rows, columns = np.divmod(places - self.starts[tables], self.widths[tables])
        rows, columns = rows + self.rows[tables], columns + self.columns[tables]
        parts = (self.kinds[tables] * WIDTH + self.before[0][rows]) * WIDTH + self.after[0][columns]
        parts[:, 1:] = np.sort(parts[:, 1:], axis=1)
        return np.concatenate([parts, self.before[1][rows, None], self.after[1][columns, None]], 1)


def _starts(sizes: Sequence[int]) -> Integers:
    return np.array([0, *accumulate(sizes)][:-1], dtype=np.int64)


def _ordered(kinds: DimKinds) -> DimKinds:
    """The kinds in the order of a pattern."""
    return kinds[:1] + tuple(sorted(kinds[1:]))


def pattern_hashes(before: LayoutTable, after: LayoutTable, kinds: DimKinds) -> Integers:
    """[before, after]: a number that is equal where patterns are, and hardly anywhere else."""
    total = _scattered(before.partial[:, None] * WIDTH + after.partial)
    dims = zip(kinds, before.tuples, after.tuples, strict=True)
    for place, (kind, (have, row), (want, column)) in enumerate(dims):
        each = _scattered((kind * WIDTH + have[:, None]) * WIDTH + want)
        total += (_scattered(each + 1) if place == 0 else each)[row][:, column]
    return total


def _scattered(numbers: Integers) -> Integers:
    """Numbers that differ in many bits where these differ in few. Source: the finaliser of splitmix64."""
    mixed = numbers * MIXING
    mixed ^= mixed >> 31
    mixed *= MIXING
    mixed ^= mixed >> 29
    return mixed


@dataclass(frozen=True, eq=False)
class _Compared:
    """The inputs of bounds that do not depend on a tensor's size. Of [before, after]: seconds of a byte that is `sent`,
    and whether anything `changed` or is `copied` beside that; `slices` [before] are the slices before. The pairs in
    which one axis moves alone, at `rows` and `columns`, send and copy `single` [4, pairs] (kind, axis, slices before,
    factor) and `doubled` times their slice; `first` are the distinct pairs of `single`, to which `inverse` maps all."""

    before: LayoutTable
    after: LayoutTable
    sent: Seconds
    changed: Booleans
    copied: Booleans
    slices: Integers
    rows: Integers
    columns: Integers
    single: Seconds
    doubled: Seconds
    first: Integers
    inverse: Integers


class _Bounds:
    """The least seconds that any resharding between two layouts takes, for many pairs at once.

    Per level of the cluster: what the ranks of a unit together must receive from other units, over all their links. A
    layout seen from outside a unit is the layout without the axes inside it. Where one axis moves and all others stay,
    there is one collective, and the bound is its seconds. The axes that slice a dim are in mesh order, so the number of
    their tuple has a bit for each; nothing is partial after.
    """

    def __init__(self, mesh: Mesh, cluster: Cluster, axes: Sequence[str]) -> None:
        self.mesh, self.cluster, self.axes = mesh, cluster, tuple(axes)
        self.sizes = [mesh.sizes[axis] for axis in axes]
        bits = np.arange(2 ** len(axes))
        self.product = np.prod([np.where(bits >> i & 1, size, 1) for i, size in enumerate(self.sizes)], axis=0)
        fastest = max(level.link.bandwidth for level in cluster.levels)
        self.levels: list[tuple[int, float, int]] = [(2 ** len(axes) - 1, fastest, 1)]
        inside = 1
        for level in reversed(cluster.levels[1:]):
            inside *= level.size
            outer = [axis for axis in axes if mesh.strides[axis] >= inside]
            if all(axis in outer or mesh.strides[axis] * mesh.sizes[axis] <= inside for axis in axes):
                seen = sum(1 << self.axes.index(axis) for axis in outer)
                slower = max(one.link.bandwidth for one in cluster.levels[: cluster.levels.index(level)])
                self.levels.append((seen, slower, min(inside, mesh.size)))
        self.compared: dict[tuple[int, int], _Compared] = {}
        self.latency = min(level.link.latency + level.link.call for level in cluster.levels)

    def seconds(self, before: LayoutTable, after: LayoutTable, size: float) -> Seconds:
        """[before, after] for a tensor of `size` bytes."""
        key = id(before), id(after)
        if key not in self.compared:
            self.compared[key] = self._compared(before, after)
        one, bandwidth, launch = self.compared[key], self.cluster.memory_bandwidth, self.cluster.launch
        found = one.sent * size
        found += self.latency * (one.sent > 0) + (launch + 4 * size / self.mesh.size / bandwidth) * one.copied
        copy = launch + 2 * (size / one.slices) / bandwidth
        found = np.where((one.sent > 0) | ~one.changed, found, copy[:, None])
        kind, axis, slices, factor = one.single[:, one.first]
        prices = np.array(
            [
                collective_seconds(KINDS[int(k)], s, (self.axes[int(a)],), self.mesh, self.cluster) if s else 0.0
                for k, a, s in zip(kind, axis, (size / slices * factor).tolist(), strict=True)
            ]
        )
        copied = size / one.single[2] * one.doubled
        alone = np.where(copied > 0, launch + 2 * copied / bandwidth, 0.0) + prices[one.inverse]
        found[one.rows, one.columns] = np.maximum(found[one.rows, one.columns], alone)
        return found

    def _compared(self, before: LayoutTable, after: LayoutTable) -> _Compared:
        have, want, partial = before.dims, after.dims, before.partial
        sent = np.zeros((len(before), len(after)))
        for seen, bandwidth, ranks in self.levels:
            share = self._missing(have & seen, want & seen, partial & seen)
            np.maximum(sent, share / ranks / bandwidth, out=sent)
        source, target = self._lying(have, partial), self._lying(want, np.zeros_like(after.partial))
        differ = sum((source[:, place, None] != target[:, place]).astype(np.int8) for place in range(len(self.axes)))
        rows, columns = np.nonzero(differ == 1)
        alone, single, doubled = self._single(source[rows], target[columns], self.product[have].prod(1)[rows])
        _, first, inverse = np.unique(single[:, alone], axis=1, return_index=True, return_inverse=True)
        return _Compared(
            before,
            after,
            sent,
            differ > 0,
            self._copied(have, want, partial) & (sent > 0),
            self.product[have].prod(1),
            rows[alone],
            columns[alone],
            single[:, alone],
            doubled[alone],
            first,
            inverse.ravel(),
        )

    def _copied(self, before: Integers, after: Integers, partial: Integers) -> Booleans:
        """[before, after]: whether any chain copies slices. Only gathers of dim 0 and sums that are scattered along it
        do not; all other steps hold two of the smallest slices at once, or one of twice the size."""
        if not before.shape[1]:
            return np.zeros((len(before), len(after)), dtype=np.bool_)
        base = 2 ** (len(self.axes) * np.arange(before.shape[1] - 1))
        others = (before[:, 1:] @ base)[:, None] != after[:, 1:] @ base
        first = (partial[:, None] == 0) & (self.prefixes[before[:, :1], after[:, 0]] != after[:, 0])
        return np.asarray(others | first)

    def _lying(self, dims: Integers, partial: Integers) -> Integers:
        """[layouts, axes]: which dim an axis slices, -1 for none, -2 where it is partial."""
        places = np.arange(len(self.axes))
        found = np.arange(1, dims.shape[1] + 1) @ (dims[:, :, None] >> places & 1) - 1
        return np.where(partial[:, None] >> places & 1, -2, found)

    def _missing(self, before: Integers, after: Integers, partial: Integers) -> Seconds:
        """[before, after]: the share of the tensor that a unit at least sends."""
        now, wanted = np.bitwise_or.reduce(before, 1), np.bitwise_or.reduce(after, 1)
        width = 2 ** len(self.axes)
        have, row = np.unique(before * width + now[:, None], return_inverse=True)
        want, column = np.unique(after * width + wanted[:, None], return_inverse=True)
        each, fewer = self._cut(have[:, None] // width, want // width, have[:, None] % width, want % width)
        cut, most = np.ones((len(before), len(after))), np.ones((len(before), len(after)))
        for mine, other in zip(row.reshape(before.shape).T, column.reshape(after.shape).T, strict=True):
            cut *= each[mine][:, other]
            np.maximum(most, fewer[mine][:, other], out=most)
        cut *= most
        target = 1.0 / self.product[after].prod(1)
        found: Seconds = np.maximum(target - 1.0 / cut, 0.0)
        summed = np.flatnonzero(self.product[partial] > 1)
        used = self.product[(now | partial)[summed, None] | wanted]
        found[summed] = (self.product[partial][summed, None] - 2) / used + target
        return found

    def _cut(self, before: Integers, after: Integers, now: Integers, wanted: Integers) -> tuple[Seconds, Seconds]:
        """The number of parts into which the slices of a dim, before and after, cut it, of which a rank has at most
        one; and how many times fewer it has on average, per dim, because the ranks that have more of one dim may be
        the same in others. `now` and `wanted` are the axes that slice any dim."""
        prefix = self.prefixes[before, after]
        mine, other = before & ~prefix, after & ~prefix
        apart = ((mine & wanted) == 0) | ((other & now) == 0)
        most = self.product[prefix] * np.maximum(self.product[mine], self.product[other])
        parts = np.where(apart, self.product[before] * self.product[other], most)
        return parts.astype(np.float64), np.where(apart, 1.0, 1.0 / (self.common[before, after] * most))

    @cached_property
    def common(self) -> Seconds:
        """[bits before, bits after]: the part of a dim that a rank has and wants, on average."""
        ranks, every = np.arange(self.mesh.size), np.arange(2 ** len(self.axes))
        index = np.zeros((len(every), self.mesh.size), dtype=np.int64)
        for place, (axis, size) in enumerate(zip(self.axes, self.sizes, strict=True)):
            sliced = (every >> place & 1 == 1)[:, None]
            index = np.where(sliced, index * size + ranks // self.mesh.strides[axis] % size, index)
        start, end = index / self.product[:, None], (index + 1) / self.product[:, None]
        both = [np.minimum(end[one], end) - np.maximum(start[one], start) for one in every]
        return np.stack([np.maximum(one, 0.0).mean(1) for one in both])

    @cached_property
    def prefixes(self) -> Integers:
        """[bits before, bits after]: the outermost axes of a dim that stay where they are."""
        every = np.arange(2 ** len(self.axes))
        before, after = np.meshgrid(every, every, indexing="ij")
        found, open_ = np.zeros_like(before), np.ones(before.shape, dtype=bool)
        for place in range(len(self.axes)):
            x, y = before >> place & 1, after >> place & 1
            found |= (open_ & (x == 1) & (y == 1)) * np.int64(1 << place)
            open_ &= x == y
        return found

    def _single(self, source: Integers, target: Integers, slices: Integers) -> tuple[Booleans, Seconds, Seconds]:
        """Whether one collective suffices for [pairs] with the axis allocations `source` and `target` [pairs, axes],
        and what it sends and copies, as in `Compared`."""
        moving = (source != -1) & (source != target)
        axis = moving.argmax(1)
        every = np.arange(len(axis))
        start, end = source[every, axis], target[every, axis]
        starting = ((source == -1) & (target >= 0)).any(1)
        kept = source == target
        behind = (kept & (source >= 0) & ((source == start[:, None]) | (target == end[:, None]))).any(1)
        n = np.array(self.sizes)[axis]
        kind = np.where(start == -2, np.where(end == -1, 0, 1), np.where(end == -1, 2, 3))
        factor = np.choose(kind, [2 * (n - 1) / n, (n - 1) / n, n - 1, (n - 1) / n])
        doubled = np.choose(kind, [1, end > 0, n * (start > 0), 2])
        single = np.stack([kind, axis, slices, factor]).astype(np.float64)
        return (moving.sum(1) == 1) & ~starting & ~behind, single, doubled.astype(np.float64)
