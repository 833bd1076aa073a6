"""Seconds of redistributions between many layouts at once.

A layout is a row of numbers: per dim the number of its tuple of axes (for axes in the order of the mesh, a bit per
axis), and the bits of the axes over which it is partial. Pairs of rows that ask for the same pattern of collectives
are found with numpy, and each pattern's chain is searched for once. Invariant: the seconds are those of the chain that
the engine executes, for whatever is asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from strategies.cost.cluster import Cluster
from strategies.cost.collectives import step_seconds
from strategies.graph import TensorSpec
from strategies.layout import Layout
from strategies.mesh import Mesh
from strategies.redistribution import LARGE, LOCAL, Step, chain

Integers = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]
WHOLE, PARTIAL = -1, -2
"""Where an axis stands that slices no dim."""
WIDTH = 2**16
"""More than there are tuples of axes."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Layouts of one tensor, each once: `dims` [layouts, dims] and `partial` [layouts]."""

    dims: Integers
    partial: Integers

    def __len__(self) -> int:
        return len(self.partial)


class Transfers:
    """The prices of one mesh on one cluster."""

    def __init__(self, mesh: Mesh, cluster: Cluster) -> None:
        self.mesh, self.cluster = mesh, cluster
        self.axes = tuple(name for name, size in mesh.axes if size > 1)
        self.numbers: dict[tuple[str, ...], int] = {}
        self.tuples: list[tuple[str, ...]] = []
        for bits in range(2 ** len(self.axes)):
            self._number(tuple(axis for i, axis in enumerate(self.axes) if bits >> i & 1))
        self.patterns: dict[tuple[int, ...], int] = {}
        self.chains: list[list[int]] = []  # per pattern its steps, by number
        self.steps: dict[tuple[object, ...], int] = {}
        self.shown: list[tuple[Step, int]] = []  # per step an example, and the elements of its tensor
        self.priced: dict[float, list[float]] = {}
        self.known: dict[tuple[object, ...], Seconds] = {}

    def _number(self, axes: tuple[str, ...]) -> int:
        if axes not in self.numbers:
            self.numbers[axes] = len(self.tuples)
            self.tuples.append(axes)
        return self.numbers[axes]

    def rows(self, places: Integers, dims: int) -> Rows:
        """From places [layouts, axes]: the dim that an axis slices, WHOLE or PARTIAL."""
        bits = 1 << np.arange(len(self.axes))
        return Rows(
            np.stack([((places == dim) * bits).sum(1) for dim in range(dims)], 1)
            if dims
            else np.zeros((len(places), 0), dtype=np.int64),
            ((places == PARTIAL) * bits).sum(1),
        )

    def rows_of(self, layouts: Sequence[Layout]) -> Rows:
        """From layouts, whose axes may stand in any order."""
        single = {name for name, size in self.mesh.axes if size == 1}
        return Rows(
            np.array(
                [[self._number(tuple(a for a in dim if a not in single)) for dim in one.dims] for one in layouts],
                dtype=np.int64,
            ).reshape(len(layouts), len(layouts[0].dims)),
            np.array([sum(1 << self.axes.index(a) for a in one.partial if a not in single) for one in layouts]),
        )

    def layout(self, rows: Rows, index: int) -> Layout:
        partial = frozenset(axis for i, axis in enumerate(self.axes) if rows.partial[index] >> i & 1)
        return Layout(tuple(self.tuples[number] for number in rows.dims[index]), partial)

    def seconds(self, before: Rows, after: Rows, spec: TensorSpec) -> Seconds:
        """[before, after]: seconds of the redistribution of a tensor like `spec` between every two layouts."""
        key = (
            before.dims.tobytes(), before.partial.tobytes(), after.dims.tobytes(), after.partial.tobytes(), spec.shape,
            spec.item_bytes,
        )  # fmt: skip
        if key not in self.known:
            self.known[key] = self._seconds(before, after, spec)
        return self.known[key]

    def _seconds(self, before: Rows, after: Rows, spec: TensorSpec) -> Seconds:
        count = (len(before), len(after))
        parts, kinds = [], self._kinds(before, after, spec.shape)
        for dim, kind in enumerate(kinds):
            parts.append((kind * WIDTH + before.dims[:, dim, None]) * WIDTH + after.dims[None, :, dim])
        if len(parts) > 2:  # dims but the first have no order in a pattern
            parts[1:] = list(np.sort(np.stack(parts[1:]), axis=0))
        parts += [np.broadcast_to(before.partial[:, None], count), np.broadcast_to(after.partial[None, :], count)]
        flat = [np.broadcast_to(part, count).ravel() for part in parts]
        _, first, inverse = np.unique(_joined(flat), return_index=True, return_inverse=True)
        patterns = np.empty(len(first), dtype=np.int64)
        for position, pair in enumerate(first):
            key = tuple(int(part[pair]) for part in flat)
            if key not in self.patterns:
                self._search(key, before, after, divmod(int(pair), count[1]), spec.shape)
            patterns[position] = self.patterns[key]
        prices = self._prices(spec)
        found = np.array([sum(prices[step] for step in self.chains[pattern]) for pattern in patterns])
        return found[inverse].reshape(count)

    def _kinds(self, before: Rows, after: Rows, shape: tuple[int, ...]) -> list[int]:
        """Per dim a number that says all that chains need to know of its size. Where layouts are padded or the tensor
        is small, that is the size itself."""
        counts = np.array([self.mesh.product(axes) for axes in self.tuples])
        even = all(
            not (size % counts[rows.dims[:, dim]]).any() for rows in (before, after) for dim, size in enumerate(shape)
        )
        size = math.prod(shape)
        if even and size and (size % self.mesh.size**2 == 0 or size >= LARGE):
            return [math.gcd(extent, self.mesh.size) for extent in shape]
        return [self.mesh.size + 1 + extent for extent in shape]

    def _search(
        self, key: tuple[int, ...], before: Rows, after: Rows, pair: tuple[int, int], shape: tuple[int, ...]
    ) -> None:
        elements, numbers = math.prod(shape), []
        for step in chain(self.layout(before, pair[0]), self.layout(after, pair[1]), shape, self.mesh):
            local = [math.prod(layout.local_shape(shape, self.mesh)) for layout in (step.before, step.after)]
            sent = step.busiest(self.mesh)
            name = (step.kind, step.axes, step.dim > 0, *(part / elements for part in (*local, sent)))
            if step.kind in LOCAL:
                name = (step.kind, *name[2:])
            if name not in self.steps:
                self.steps[name] = len(self.shown)
                self.shown.append((step, elements))
            numbers.append(self.steps[name])
        self.patterns[key] = len(self.chains)
        self.chains.append(numbers)

    def _prices(self, spec: TensorSpec) -> list[float]:
        """Seconds of every step for a tensor of this size."""
        size = spec.elements * spec.item_bytes
        prices = self.priced.setdefault(size, [])
        for step, elements in self.shown[len(prices) :]:
            prices.append(step_seconds(step, size / elements, self.mesh, self.cluster))
        return prices


def _joined(parts: Sequence[Integers]) -> Integers:
    """One number per place that differs where any of the parts differs."""
    found: Integers = np.zeros_like(parts[0])
    for part in parts:
        values, inverse = np.unique(part, return_inverse=True)
        found = found * len(values) + inverse
        if found.max(initial=0) > 2**31:
            _, found = np.unique(found, return_inverse=True)
    return found
