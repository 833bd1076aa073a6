"""The least seconds that any redistribution between two layouts takes, for many pairs at once.

Per level of the cluster: what the ranks of a unit together must receive from other units, over all their links. A
layout seen from outside a unit is the layout without the axes inside it. Where one axis moves and all others stay,
there is one collective, and the bound is its price.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from strategies.core.mesh import Mesh
from strategies.core.steps import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from strategies.cost.cluster import Cluster
from strategies.cost.collectives import collective_seconds
from strategies.search.patterns import Booleans, Rows
from strategies.search.patterns import Integers as Integers
from strategies.search.patterns import Seconds as Seconds

KINDS = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL)


@dataclass(frozen=True, eq=False)
class Compared:
    """What bounds follow from, whatever the size of a tensor. Of [before, after]: seconds of a byte that is `sent`, and
    whether anything `changed` or is `copied` beside that; `slices` [before] are the slices before. The pairs in which
    one axis moves alone, at `rows` and `columns`, send and copy `single` [4, pairs] (kind, axis, slices before, factor)
    and `doubled` times their slice, and only those of `first` differ in the former, as `inverse` tells."""

    before: Rows
    after: Rows
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


class Bounds:
    """Bounds for many layouts before and after, on one mesh and cluster. The axes that slice a dim are in mesh order,
    so the number of their tuple holds a bit for each; nothing is partial after."""

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
        self.known: dict[tuple[int, int], Compared] = {}
        self.latency = min(level.link.latency + level.link.call for level in cluster.levels)

    def seconds(self, before: Rows, after: Rows, size: float) -> Seconds:
        """[before, after] for a tensor of `size` bytes."""
        key = id(before), id(after)
        if key not in self.known:
            self.known[key] = self._compared(before, after)
        one, bandwidth, launch = self.known[key], self.cluster.memory_bandwidth, self.cluster.launch
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

    def _compared(self, before: Rows, after: Rows) -> Compared:
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
        return Compared(
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
        """Into how many parts the slices of a dim, before and after, cut it, of which a rank at most has one; and how
        many times fewer it has on average, which is told of one dim at a time, because ranks that are lucky in one may
        be in others. `now` and `wanted` are the axes that slice any dim."""
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
        """[pairs] whose axes lie as in `source` and `target` [pairs, axes]: whether one collective is all, and what it
        sends and copies as in `Compared`."""
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
