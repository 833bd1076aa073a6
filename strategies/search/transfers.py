"""Seconds of redistributions between many layouts at once.

A layout is a row of numbers: per dim the number of its tuple of axes (for axes in the order of the mesh, a bit per
axis), and the bits of the axes over which it is partial. Pairs of rows that ask for the same pattern of collectives
are found with numpy, and each pattern's chain is searched for once. Invariant: seconds that are settled are those
of the chain that the engine executes; all others are not above them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
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
from strategies.search.ways import Ways, levels_of

Integers = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]
WHOLE, PARTIAL = -1, -2
"""Where an axis stands that slices no dim."""
MIXING = np.int64(-7046029254386353131)
"""An odd number whose multiples differ in many bits (2**64 over the golden ratio)."""
Kinds = tuple[int, ...]
"""Per dim a number that says all that chains need to know of its size."""
Pattern = tuple[int, ...]
"""What tells one: per dim its kind and both tuples of axes as one number, and the partial axes."""
WAYS_FROM = 3
"""Axes from which on what is settled tells something of all that begins in the same class."""
MANY = 4096
"""Pairs of layouts that are sure to have more patterns than are priced at once."""
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
    """Pairs of layouts of a tensor, [before, after]: `mixed` is equal where patterns are (and hardly anywhere else),
    `values` are the seconds or lower bounds of them, `settled` tells which."""

    before: Rows
    after: Rows
    spec: TensorSpec
    kinds: tuple[int, ...]
    mixed: Integers
    values: Seconds
    settled: npt.NDArray[np.bool_]
    changes: int = 0

    def patterns(self, rows: Integers, columns: Integers) -> Integers:
        """[pairs, numbers]: what tells the patterns of some pairs."""
        parts = (np.array(self.kinds, dtype=np.int64) * WIDTH + self.before.dims[rows]) * WIDTH
        parts += self.after.dims[columns]
        if len(self.kinds) > 2:  # dims but the first have no order in a pattern
            parts[:, 1:] = np.sort(parts[:, 1:], axis=1)
        return np.concatenate([parts, self.before.partial[rows, None], self.after.partial[columns, None]], 1)


@dataclass(eq=False)
class Alike:
    """All that is asked of tensors of the same kinds, which alone share patterns; `named` are the patterns with known
    chains, by their numbers as in `Asked`."""

    named: dict[int, Pattern] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)

    def add(self, one: Asked) -> None:
        self.asked.append(one)
        self.__dict__.pop("mixed", None)

    @cached_property
    def mixed(self) -> tuple[Integers, list[int]]:
        """The numbers of all pairs, and where those of each table begin."""
        parts = [one.mixed.ravel() for one in self.asked]
        return np.concatenate(parts), [0, *accumulate(map(len, parts))]

    def having(self, name: Pattern, mixed: int) -> Iterator[tuple[Asked, Integers, Integers]]:
        """The rows and columns of all pairs with a pattern; `mixed` is its number."""
        every, starts = self.mixed
        found = np.flatnonzero(every == mixed).tolist()
        for one, start, end in zip(self.asked, starts, starts[1:], strict=False):
            some = found[bisect_left(found, start) : bisect_left(found, end)]
            if some:
                rows, columns = np.divmod(np.array(some) - start, len(one.after))
                same = (one.patterns(rows, columns) == name).all(1)
                yield one, rows[same], columns[same]


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
        self.shown: list[tuple[Step, int]] = []  # per step an example, and the elements of its tensor
        self.priced: dict[float, list[float]] = {}
        self.made: dict[tuple[object, ...], Rows] = {}
        self.asked: dict[tuple[object, ...], Asked] = {}
        self.alike: dict[Kinds, Alike] = {}
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
        mixed = _mixed(before, after, kinds)
        ordered = max(before.dims.max(initial=0), after.dims.max(initial=0)) < 2 ** len(self.axes)
        asked = Asked(before, after, spec, kinds, mixed, np.zeros(mixed.shape), np.zeros(mixed.shape, dtype=np.bool_))
        alike = self.alike.setdefault(_like(kinds), Alike())
        alike.add(asked)
        if ordered and (mixed.size > max(few, MANY) or len(np.unique(mixed)) > few):
            size = float(spec.elements * spec.item_bytes)
            asked.values = self.bounds.seconds(before.dims, after.dims, before.partial, size)
            asked.values[:, after.partial > 0] = 0.0  # what may stay a partial sum need not be sent
        else:
            asked.values[:] = np.inf
            for row, column in zip(*(places.tolist() for places in np.nonzero(~asked.settled)), strict=True):
                if not asked.settled[row, column]:
                    self._settle(asked, row, column)
        known = np.fromiter(alike.named, np.int64, len(alike.named))
        for number in np.intersect1d(mixed[~asked.settled], known).tolist():
            self._price(alike, alike.named[number], number)
        return asked

    def settle(self, before: Rows, after: Rows, spec: TensorSpec, row: int, column: int) -> None:
        """Prices one pair, and all pairs with its pattern."""
        asked = self.asked[self._key(before, after, spec)]
        if not asked.settled[row, column]:
            self._settle(asked, row, column)
            if len(self.axes) >= WAYS_FROM:
                self._look_around(before, spec, row)

    def _look_around(self, before: Rows, spec: TensorSpec, row: int) -> None:
        """Raises what is told of all redistributions from the class of a layout to what they take at least."""
        dims, size = before.dims.shape[1], float(spec.elements * spec.item_bytes)
        start = int(self._states(before)[row])
        if before.dims[row].max(initial=0) >= 2 ** len(self.axes) or (dims, size, start) in self.looked:
            return
        self.looked.add((dims, size, start))
        found = self.ways[dims].seconds(start, size)
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

    def _price(self, alike: Alike, name: Pattern, mixed: int) -> int:
        """Settles the pairs with a pattern whose chain is known; of how many tensors that raised a bound."""
        raised, steps = 0, self.chains[self.patterns[name]]
        for one, rows, columns in alike.having(name, mixed):
            prices, before = self._prices(one.spec), one.values[rows, columns]
            price = sum([prices[step] for step in steps])
            raised += bool((price > before * (1 + 1e-12)).any())
            one.changes += bool((price != before).any())
            one.values[rows, columns] = price
            one.settled[rows, columns] = True
        return raised

    def _kinds(self, before: Rows, after: Rows, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Per dim a number that says all that chains need to know of its size. Where layouts are padded or the tensor
        is small, that is the size itself."""
        counts = self.counts
        even = all(
            not (size % counts[rows.dims[:, dim]]).any() for rows in (before, after) for dim, size in enumerate(shape)
        )
        size = math.prod(shape)
        if even and size and (size % self.mesh.size**2 == 0 or size >= LARGE):
            return tuple([math.gcd(extent, self.mesh.size) for extent in shape])
        return tuple([self.mesh.size + 1 + extent for extent in shape])

    def _settle(self, asked: Asked, row: int, column: int) -> None:
        """Searches for the chain of a pattern, and prices it wherever it is asked for."""
        place = np.array([row]), np.array([column])
        name, mixed = tuple(asked.patterns(*place)[0].tolist()), int(asked.mixed[row, column])
        alike = self.alike[_like(asked.kinds)]
        if name not in self.patterns:
            self.patterns[name] = len(self.chains)
            self.chains.append(self._chain(asked, row, column))
            alike.named[mixed] = name
        self.raised += self._price(alike, name, mixed)

    def _chain(self, asked: Asked, row: int, column: int) -> list[int]:
        """The steps from one layout to another, by number."""
        shape, numbers = asked.spec.shape, []
        elements = math.prod(shape)
        before, after = self.layout(asked.before, row), self.layout(asked.after, column)
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
        return numbers

    def _prices(self, spec: TensorSpec) -> list[float]:
        """Seconds of every step for a tensor of this size."""
        size = spec.elements * spec.item_bytes
        prices = self.priced.setdefault(size, [])
        for step, elements in self.shown[len(prices) :]:
            prices.append(step_seconds(step, size / elements, self.mesh, self.cluster))
        return prices


def _like(kinds: Kinds) -> Kinds:
    """The kinds in the order in which patterns tell them."""
    return kinds[:1] + tuple(sorted(kinds[1:]))


def _mixed(before: Rows, after: Rows, kinds: Kinds) -> Integers:
    """[before, after]: a number that is the same where patterns are, whatever the order of dims behind the first."""
    total = _scattered(before.partial[:, None] * WIDTH + after.partial)
    for place, kind in enumerate(kinds):
        have, row = np.unique(before.dims[:, place], return_inverse=True)
        want, column = np.unique(after.dims[:, place], return_inverse=True)
        each = _scattered((kind * WIDTH + have[:, None]) * WIDTH + want)
        total += (_scattered(each + 1) if place == 0 else each)[row][:, column]
    return total


def _scattered(numbers: Integers) -> Integers:
    """Numbers that differ in many bits where these differ in few. Source: the finaliser of splitmix64."""
    found = numbers * MIXING
    found ^= found >> 31
    found *= MIXING
    found ^= found >> 29
    return found
