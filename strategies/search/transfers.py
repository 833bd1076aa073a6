"""Seconds of redistributions between many layouts at once.

A layout is a row of numbers: per dim the number of its tuple of axes (for axes in the order of the mesh, a bit per
axis), and the bits of the axes over which it is partial. Pairs of rows that ask for the same pattern of collectives
are found with numpy, and each pattern's chain is searched for once. Invariant: seconds that are settled are those
of the chain that the engine executes; all others are not above them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from strategies.cost.cluster import Cluster
from strategies.cost.collectives import step_seconds
from strategies.graph import TensorSpec
from strategies.layout import Layout
from strategies.mesh import Mesh
from strategies.redistribution import LARGE, LOCAL, Step, chain
from strategies.search.bounds import Bounds
from strategies.search.ways import FAR, Ways, levels_of

Integers = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]
WHOLE, PARTIAL = -1, -2
"""Where an axis stands that slices no dim."""
MIXING = np.int64(-7046029254386353131)
"""An odd number whose multiples differ in many bits (2**64 over the golden ratio)."""
Pattern = tuple[int, ...]
"""What tells one pattern, see `_told`."""
WAYS_FROM = 3
"""Axes from which on what is settled tells something of all that begins in the same class."""
WIDTH = 2**16
"""More than there are tuples of axes."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Layouts of one tensor, each once: `dims` [layouts, dims] and `partial` [layouts]."""

    dims: Integers
    partial: Integers

    def __len__(self) -> int:
        return len(self.partial)


@dataclass(eq=False)
class Asked:
    """Pairs of layouts of a tensor: what tells their patterns (`told` [patterns, numbers]), each with a pair that has
    it (`rows`, `columns`) and its seconds or a lower bound (`values`); `inverse` [before, after] tells every pair's."""

    before: Rows
    after: Rows
    spec: TensorSpec
    told: Integers
    rows: Integers
    columns: Integers
    inverse: Integers
    values: Seconds
    changes: int = 0

    def __post_init__(self) -> None:
        self.mixed = _mixed(self.told)

    def name(self, position: int) -> Pattern:
        return tuple(self.told[position].tolist())

    def place(self, name: Pattern, mixed: int) -> int | None:
        """Where a pattern stands; `mixed` is its number as in `_mixed`."""
        for position in np.flatnonzero(self.mixed == mixed).tolist():
            if self.name(position) == name:
                return position
        return None


class Prices(Protocol):
    """Seconds of redistributions, or lower bounds where they are not settled; see `Transfers`."""

    raised: int

    def rows_of(self, layouts: Sequence[Layout]) -> Rows: ...

    def whole(self, rows: Rows) -> Rows: ...

    def seconds(self, before: Rows, after: Rows, spec: TensorSpec) -> Seconds: ...

    def settle(self, before: Rows, after: Rows, spec: TensorSpec, row: int, column: int) -> None: ...

    def changes(self, before: Rows, after: Rows, spec: TensorSpec) -> int: ...


class Transfers:
    """The prices of one mesh on one cluster. Up to `few` patterns are priced at once; of more, only those that are
    settled, and the others have lower bounds."""

    def __init__(self, mesh: Mesh, cluster: Cluster, few: int = 64) -> None:
        self.mesh, self.cluster = mesh, cluster
        self.axes = tuple(name for name, size in mesh.axes if size > 1)
        self.numbers: dict[tuple[str, ...], int] = {}
        self.tuples: list[tuple[str, ...]] = []
        for bits in range(2 ** len(self.axes)):
            self._number(tuple(axis for i, axis in enumerate(self.axes) if bits >> i & 1))
        self.patterns: dict[Pattern, int] = {}
        self.mixed: list[int] = []  # the numbers of the patterns, as in `_mixed`
        self.chains: list[list[int]] = []  # per pattern its steps, by number
        self.steps: dict[tuple[object, ...], int] = {}
        self.shown: list[tuple[Step, int]] = []  # per step an example, and the elements of its tensor
        self.priced: dict[float, list[float]] = {}
        self.made: dict[tuple[object, ...], Rows] = {}
        self.asked: dict[tuple[object, ...], Asked] = {}
        self.bounds = Bounds(mesh, cluster, self.axes)
        self.few = few
        self.ways: dict[int, Ways] = {}
        self.placed: dict[int, Integers] = {}
        self.looked: set[tuple[int, float, int]] = set()
        self.raised = 0
        """How often a price was settled above its bound."""

    @property
    def counts(self) -> Integers:
        """Slices that every tuple of axes makes, by its number."""
        return np.array([self.mesh.product(axes) for axes in self.tuples])

    def _number(self, axes: tuple[str, ...]) -> int:
        if axes not in self.numbers:
            self.numbers[axes] = len(self.tuples)
            self.tuples.append(axes)
        return self.numbers[axes]

    def rows(self, places: Integers, dims: int) -> Rows:
        """From places [layouts, axes]: the dim that an axis slices, WHOLE or PARTIAL."""
        bits = 1 << np.arange(len(self.axes))
        sliced = (places[:, None, :] == np.arange(dims)[:, None]) @ bits
        return self._once(sliced, (places == PARTIAL) @ bits)

    def rows_of(self, layouts: Sequence[Layout]) -> Rows:
        """From layouts, whose axes may stand in any order."""
        single = {name for name, size in self.mesh.axes if size == 1}
        dims = [[self._number(tuple(a for a in dim if a not in single)) for dim in one.dims] for one in layouts]
        partial = [sum(1 << self.axes.index(a) for a in one.partial if a not in single) for one in layouts]
        return self._once(
            np.array(dims, dtype=np.int64).reshape(len(layouts), len(layouts[0].dims)),
            np.array(partial, dtype=np.int64),
        )

    def whole(self, rows: Rows) -> Rows:
        """The same slices, nothing partial."""
        return self._once(rows.dims, np.zeros_like(rows.partial))

    def _once(self, dims: Integers, partial: Integers) -> Rows:
        """Equal rows are one object."""
        key = (dims.shape, dims.tobytes(), partial.tobytes())
        return self.made.setdefault(key, Rows(dims, partial))

    def layout(self, rows: Rows, index: int) -> Layout:
        partial = frozenset(axis for i, axis in enumerate(self.axes) if rows.partial[index] >> i & 1)
        return Layout(tuple(self.tuples[number] for number in rows.dims[index]), partial)

    def seconds(self, before: Rows, after: Rows, spec: TensorSpec, few: int | None = None) -> Seconds:
        """[before, after]: seconds of the redistribution of a tensor like `spec` between every two layouts; where they
        are not settled yet, a lower bound. `few`: up to how many patterns are settled at once."""
        key = self._key(before, after, spec)
        if key not in self.asked:
            self.asked[key] = self._asked(before, after, spec, self.few if few is None else few)
        asked = self.asked[key]
        return np.asarray(asked.values[asked.inverse])

    def _key(self, before: Rows, after: Rows, spec: TensorSpec) -> tuple[object, ...]:
        return id(before), id(after), spec.shape, spec.item_bytes

    def _asked(self, before: Rows, after: Rows, spec: TensorSpec, few: int) -> Asked:
        count = (len(before), len(after))
        kinds = self._kinds(before, after, spec.shape)
        tuples, partials = len(self.tuples), 2 ** len(self.axes)
        numbers = {kind: number for number, kind in enumerate(sorted(set(kinds)))}
        dims = [
            (numbers[kind] * tuples + before.dims[:, dim, None]) * tuples + after.dims[None, :, dim]
            for dim, kind in enumerate(kinds)
        ]
        if len(dims) > 2:  # as in `_told`
            dims[1:] = list(np.sort(np.stack(dims[1:]), axis=0))
        ends = before.partial[:, None] * partials + after.partial[None, :]
        joined = _joined([*dims, ends], [*[len(numbers) * tuples**2] * len(dims), partials**2])
        _, first, inverse = np.unique(joined, return_index=True, return_inverse=True)
        rows, columns = np.divmod(first, count[1])
        told = _told(before, after, kinds, rows, columns)
        ordered = max(before.dims.max(initial=0), after.dims.max(initial=0)) < 2 ** len(self.axes)
        if ordered and len(told) > few:
            values = self.bounds.seconds(
                before.dims[rows], after.dims[columns], before.partial[rows], float(spec.elements * spec.item_bytes)
            )
            values[after.partial[columns] > 0] = 0.0  # what may stay a partial sum need not be sent
        else:
            values = np.full(len(told), -1.0)
        asked = Asked(before, after, spec, told, rows, columns, inverse.reshape(count), values)
        for position in np.flatnonzero(values < 0).tolist():
            if asked.name(position) not in self.patterns:
                self._search(asked.name(position), asked, position)
        for position in np.flatnonzero(np.isin(asked.mixed, self.mixed)).tolist():
            if (name := asked.name(position)) in self.patterns:
                values[position] = self._price(name, spec)
        return asked

    def settle(self, before: Rows, after: Rows, spec: TensorSpec, row: int, column: int) -> None:
        """Prices one pair, and all pairs with its pattern."""
        asked = self.asked[self._key(before, after, spec)]
        position = int(asked.inverse[row, column])
        name = asked.name(position)
        if name not in self.patterns:
            self._search(name, asked, position)
            if len(self.axes) >= WAYS_FROM:
                self._look_around(before, spec, row, float(asked.values[position]))

    def _look_around(self, before: Rows, spec: TensorSpec, row: int, near: float) -> None:
        """Raises what is told of all redistributions from the class of a layout to what they take at least; of very
        many only of those that are about as `near`."""
        dims, size = before.dims.shape[1], float(spec.elements * spec.item_bytes)
        start = int(self._states(before)[row])
        if before.dims[row].max(initial=0) >= 2 ** len(self.axes) or (dims, size, start) in self.looked:
            return
        self.looked.add((dims, size, start))
        found = self.ways[dims].seconds(start, size, FAR * near)
        for one in self.asked.values():
            if one.before.dims.shape[1] != dims or one.spec.elements * one.spec.item_bytes != size:
                continue
            ends = self._states(one.after)[one.columns]
            chosen = (self._states(one.before)[one.rows] == start) & (one.after.partial[one.columns] == 0)
            higher = np.flatnonzero(chosen & (found[ends] > one.values * (1 + 1e-12)))
            if len(higher):
                one.values[higher] = found[ends[higher]]
                one.changes += 1
                self.raised += 1

    def _states(self, rows: Rows) -> Integers:
        """The class of every layout among `ways`."""
        if id(rows) not in self.placed:
            dims = rows.dims.shape[1]
            if dims not in self.ways:
                self.ways[dims] = Ways(self.mesh, self.cluster, levels_of(self.mesh, self.cluster), dims)
            bits = np.array([sum(1 << self.axes.index(axis) for axis in axes) for axes in self.tuples])[rows.dims]
            levels = [[self.axes.index(axis) for axis in level] for level in self.ways[dims].levels]
            sliced, partial = (
                np.stack([sum(part >> place & 1 for place in level) for level in levels], -1)
                for part in (bits, rows.partial)
            )
            known = np.full(len(rows), len(levels))
            self.placed[id(rows)] = self.ways[dims].places(sliced, partial, known)
        return self.placed[id(rows)]

    def changes(self, before: Rows, after: Rows, spec: TensorSpec) -> int:
        """How often prices of these pairs were settled."""
        return self.asked[self._key(before, after, spec)].changes

    def _price(self, name: tuple[int, ...], spec: TensorSpec) -> float:
        prices = self._prices(spec)
        return sum(prices[step] for step in self.chains[self.patterns[name]])

    def _kinds(self, before: Rows, after: Rows, shape: tuple[int, ...]) -> list[int]:
        """Per dim a number that says all that chains need to know of its size. Where layouts are padded or the tensor
        is small, that is the size itself."""
        counts = self.counts
        even = all(
            not (size % counts[rows.dims[:, dim]]).any() for rows in (before, after) for dim, size in enumerate(shape)
        )
        size = math.prod(shape)
        if even and size and (size % self.mesh.size**2 == 0 or size >= LARGE):
            return [math.gcd(extent, self.mesh.size) for extent in shape]
        return [self.mesh.size + 1 + extent for extent in shape]

    def _search(self, name: tuple[int, ...], asked: Asked, position: int) -> None:
        shape = asked.spec.shape
        elements, numbers = math.prod(shape), []
        before = self.layout(asked.before, int(asked.rows[position]))
        after = self.layout(asked.after, int(asked.columns[position]))
        for step in chain(before, after, shape, self.mesh):
            local = [math.prod(layout.local_shape(shape, self.mesh)) for layout in (step.before, step.after)]
            sent = step.busiest(self.mesh)
            told: tuple[object, ...] = (
                step.kind,
                step.axes,
                step.dim > 0,
                *(part / elements for part in (*local, sent)),
            )
            if step.kind in LOCAL:
                told = (step.kind, *told[2:])
            if told not in self.steps:
                self.steps[told] = len(self.shown)
                self.shown.append((step, elements))
            numbers.append(self.steps[told])
        self.patterns[name] = len(self.chains)
        self.chains.append(numbers)
        mixed = int(asked.mixed[position])
        self.mixed.append(mixed)
        for one in self.asked.values():
            place = one.place(name, mixed)
            if place is not None:
                price = self._price(name, one.spec)
                self.raised += price > one.values[place] * (1 + 1e-12)
                one.values[place] = price
                one.changes += 1

    def _prices(self, spec: TensorSpec) -> list[float]:
        """Seconds of every step for a tensor of this size."""
        size = spec.elements * spec.item_bytes
        prices = self.priced.setdefault(size, [])
        for step, elements in self.shown[len(prices) :]:
            prices.append(step_seconds(step, size / elements, self.mesh, self.cluster))
        return prices


def _told(before: Rows, after: Rows, kinds: Sequence[int], rows: Integers, columns: Integers) -> Integers:
    """What tells the patterns of some pairs: per dim its kind and both tuples of axes, and the partial axes."""
    parts = (np.array(kinds, dtype=np.int64) * WIDTH + before.dims[rows]) * WIDTH + after.dims[columns]
    if len(kinds) > 2:  # dims but the first have no order in a pattern
        parts[:, 1:] = np.sort(parts[:, 1:], axis=1)
    return np.concatenate([parts, before.partial[rows, None], after.partial[columns, None]], 1)


def _mixed(told: Integers) -> Integers:
    """A number per pattern by which it is found fast; few patterns share one."""
    found = np.zeros(len(told), dtype=np.int64)
    for column in told.T:
        found = (found ^ column ^ (found >> 29)) * MIXING
    return found


def _joined(parts: Sequence[Integers], sizes: Sequence[int]) -> Integers:
    """One number per place that differs where any of the parts differs; each part is below its size."""
    found: Integers = np.zeros(1, dtype=np.int64)
    width = 1
    for part, size in zip(parts, sizes, strict=True):
        if width * size > 2**62:
            _, names = np.unique(found, return_inverse=True)
            found, width = names.reshape(found.shape), int(names.max(initial=0)) + 1
        found, width = found * size + part, width * size
    return found.ravel()
