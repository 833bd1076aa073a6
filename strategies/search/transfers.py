"""Seconds of redistributions between many layouts at once.

A layout is a row of numbers: per dim the number of its tuple of axes (for axes in the order of the mesh, a bit per
axis), and the bits of the axes over which it is partial. Pairs of rows that ask for the same pattern of collectives
are found with numpy, and each pattern's chain is searched for once. Invariant: seconds that are settled are those
of the chain that the engine executes; all others are not above them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from strategies.core.graph import TensorSpec
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.steps import LOCAL
from strategies.cost.cluster import Cluster
from strategies.cost.collectives import copied_elements, moved_seconds
from strategies.resharding.path import LARGE, resharding_path
from strategies.search.bounds import Bounds
from strategies.search.patterns import Asked, Group, Kinds, Pattern, alike, mixed
from strategies.search.patterns import Integers as Integers
from strategies.search.patterns import Rows as Rows
from strategies.search.patterns import Seconds as Seconds
from strategies.search.ways import FAR, Ways, levels_of

WHOLE, PARTIAL = -1, -2
"""Where an axis stands that slices no dim."""
WAYS_FROM = 3
"""Axes from which on what is settled tells something of all that begins in the same class."""
ALIKE = 1e-6
"""Of a bound: how far others lie from it that count as the same."""
MANY = 4096
"""Pairs of layouts that are sure to have more patterns than are priced at once."""


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
        self._counts: Integers = np.zeros(0, dtype=np.int64)
        for bits in range(2 ** len(self.axes)):
            self._number(tuple(axis for i, axis in enumerate(self.axes) if bits >> i & 1))
        self.patterns: dict[Pattern, int] = {}
        self.chains: list[list[int]] = []  # per pattern its steps, by number
        self.steps: dict[tuple[object, ...], int] = {}
        self.shown: list[tuple[str, tuple[str, ...], int, int, int]] = []
        """Per step its kind and axes; of an example, how many elements it copies, sends and has."""
        self.priced: dict[float, list[float]] = {}
        self.made: dict[tuple[object, ...], Rows] = {}
        self.asked: dict[tuple[object, ...], Asked] = {}
        self.groups: dict[Kinds, Group] = {}
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
        if len(self._counts) < len(self.tuples):
            self._counts = np.array([self.mesh.product(axes) for axes in self.tuples])
        return self._counts

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
        return self.asked[key].values.copy()

    def _key(self, before: Rows, after: Rows, spec: TensorSpec) -> tuple[object, ...]:
        return id(before), id(after), spec.shape, spec.item_bytes

    def _asked(self, before: Rows, after: Rows, spec: TensorSpec, few: int) -> Asked:
        kinds = self._kinds(before, after, spec.shape)
        numbers = mixed(before, after, kinds)
        asked = Asked(before, after, spec, kinds, numbers, np.zeros(numbers.shape), np.zeros(numbers.shape, np.bool_))
        ordered = max(before.dims.max(initial=0), after.dims.max(initial=0)) < 2 ** len(self.axes)
        many = ordered and (numbers.size > max(few, MANY) or len(np.unique(numbers)) > few)
        if many:
            size = float(spec.elements * spec.item_bytes)
            asked.values = self.bounds.seconds(before, after, size)
            asked.values[:, after.partial > 0] = 0.0  # what may stay a partial sum need not be sent
        else:
            asked.values[:] = np.inf
        group = self.groups.setdefault(alike(kinds), Group())
        group.adopt(asked, self._price)
        while not many and not asked.settled.all():  # patterns with one number are settled one after the other
            self._settle(asked, np.argwhere(~asked.settled).tolist())
        asked.changes = 0
        return asked

    def settle(self, before: Rows, after: Rows, spec: TensorSpec, row: int, column: int) -> None:
        """Prices one pair, and all pairs with its pattern."""
        asked = self.asked[self._key(before, after, spec)]
        if not asked.settled[row, column]:
            bound = asked.values[row, column]
            self._settle(asked, [(row, column)])
            if len(self.axes) >= WAYS_FROM:
                self._look_around(before, spec, row, float(asked.values[row, column]))
            elif asked.values[row, column] > bound * (1 + ALIKE):
                self._settle_alike(asked, row, column, bound)

    def _settle_alike(self, asked: Asked, row: int, column: int, bound: float) -> None:
        """Prices the pairs with one of these layouts that had the same bound: the next solution would take one."""
        for line, at in ((row, slice(None)), (slice(None), column)):
            same = ~asked.settled[line, at] & (np.abs(asked.values[line, at] - bound) <= ALIKE * bound)
            alike = [(row, place) if line is row else (place, column) for place in np.flatnonzero(same).tolist()]
            if alike:
                self._settle(asked, alike)

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
            rows = np.flatnonzero(self._states(one.before) == start)
            ends = np.where(one.after.partial == 0, found[self._states(one.after)], 0.0)
            if (ends > one.values[rows] * (1 + 1e-12)).any():
                one.values[rows] = np.maximum(one.values[rows], ends)
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

    def _kinds(self, before: Rows, after: Rows, shape: tuple[int, ...]) -> Kinds:
        """Per dim a number that says all that chains need to know of its size. Where layouts are padded or the tensor
        is small, that is the size itself."""
        even = self._even(before, shape) and self._even(after, shape)
        size = math.prod(shape)
        if even and size and (size % self.mesh.size**2 == 0 or size >= LARGE):
            return tuple([math.gcd(extent, self.mesh.size) for extent in shape])
        return tuple([self.mesh.size + 1 + extent for extent in shape])

    def _even(self, rows: Rows, shape: tuple[int, ...]) -> bool:
        """Whether all slices of such a tensor are equal."""
        counts = self.counts
        return not any((size % counts[tuples]).any() for size, (tuples, _) in zip(shape, rows.tuples, strict=True))

    def _settle(self, asked: Asked, pairs: Iterable[Sequence[int]]) -> None:
        """Searches for the chains of the patterns of pairs, and prices them wherever they are asked for."""
        group, numbers = self.groups[alike(asked.kinds)], dict[int, None]()
        for row, column in pairs:
            number = int(asked.mixed[row, column])
            if number in numbers:
                continue
            numbers[number] = None
            name = group.named[number] = asked.pattern(row, column)
            if name not in self.patterns:
                self.patterns[name] = len(self.chains)
                self.chains.append(self._chain(asked, row, column))
        self.raised += group.price(numbers, self._price)

    def _price(self, name: Pattern, spec: TensorSpec) -> float:
        prices = self._prices(spec)
        return sum([prices[step] for step in self.chains[self.patterns[name]]])

    def _chain(self, asked: Asked, row: int, column: int) -> list[int]:
        """The steps from one layout to another, by number."""
        shape, numbers = asked.spec.shape, []
        elements = math.prod(shape)
        before, after = self.layout(asked.before, row), self.layout(asked.after, column)
        for step in resharding_path(before, after, shape, self.mesh):
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
                self.shown.append((step.kind, step.axes, copied_elements(step, self.mesh), sent, elements))
            numbers.append(self.steps[told])
        return numbers

    def _prices(self, spec: TensorSpec) -> list[float]:
        """Seconds of every step for a tensor of this size."""
        size = spec.elements * spec.item_bytes
        prices = self.priced.setdefault(size, [])
        for kind, axes, copied, sent, elements in self.shown[len(prices) :]:
            prices.append(moved_seconds(kind, axes, copied, sent, size / elements, self.mesh, self.cluster))
        return prices
