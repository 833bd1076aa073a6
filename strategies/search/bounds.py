"""The least seconds that any redistribution between two layouts takes, for many pairs at once.

Per level of the cluster: what the ranks of a unit together must receive from other units, over all their links. A
layout seen from outside a unit is the layout without the axes inside it. Where one axis moves and all others stay,
there is one collective, and the bound is its price.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from strategies.chains import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from strategies.cost.cluster import Cluster
from strategies.cost.collectives import collective_seconds
from strategies.mesh import Mesh

Integers = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]
KINDS = (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL)


class Bounds:
    """Bounds for pairs of layouts on one mesh and cluster. A dim is told by the bits of the axes that slice it, in mesh
    order: `before` and `after` [pairs, dims], and `partial` [pairs] before; nothing is partial after."""

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
        self.latency = min(level.link.latency + level.link.call for level in cluster.levels)

    def seconds(self, before: Integers, after: Integers, partial: Integers, size: float) -> Seconds:
        """[pairs] for a tensor of `size` bytes."""
        found = np.zeros(len(partial))
        for seen, bandwidth, ranks in self.levels:
            share = self._missing(before & seen, after & seen, partial & seen)
            found = np.maximum(found, share * size / ranks / bandwidth)
        found += self.latency * (found > 0)
        changed = (before != after).any(1) | (partial > 0)
        local = size / self.product[before].prod(1)
        copy = self.cluster.launch + 2 * local / self.cluster.memory_bandwidth
        found = np.where(changed & (found == 0), copy, found)
        return np.maximum(found, self._single(before, after, partial, size))

    def _missing(self, before: Integers, after: Integers, partial: Integers) -> Seconds:
        """The share of the tensor that a unit at least sends."""
        now, wanted = np.bitwise_or.reduce(before, 1), np.bitwise_or.reduce(after, 1)
        prefix = self.prefixes[before, after]
        mine, other = before & ~prefix, after & ~prefix
        apart = ((mine & wanted[:, None]) == 0) | ((other & now[:, None]) == 0)
        cut = np.where(
            apart,
            self.product[before] * self.product[other],
            self.product[prefix] * np.maximum(self.product[mine], self.product[other]),
        )
        target = 1.0 / self.product[after].prod(1)
        moved = np.maximum(target - 1.0 / cut.prod(1), 0.0)
        summed = self.product[partial]
        used = self.product[now | wanted | partial]
        return np.asarray(np.where(summed > 1, (summed - 2) / used + target, moved))

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

    def _single(self, before: Integers, after: Integers, partial: Integers, size: float) -> Seconds:
        """The price where one axis moves; 0 elsewhere."""
        pairs, dims = before.shape
        source, target = np.full((pairs, len(self.axes)), -1), np.full((pairs, len(self.axes)), -1)
        for place in range(len(self.axes)):
            for dim in range(dims):
                source[before[:, dim] >> place & 1 == 1, place] = dim
                target[after[:, dim] >> place & 1 == 1, place] = dim
            source[partial >> place & 1 == 1, place] = -2
        moving = (source != -1) & (source != target)
        axis = moving.argmax(1)
        every = np.arange(pairs)
        start, end = source[every, axis], target[every, axis]
        starting = ((source == -1) & (target >= 0)).any(1)
        kept = source == target
        behind = (kept & (source >= 0) & ((source == start[:, None]) | (target == end[:, None]))).any(1)
        simple = (moving.sum(1) == 1) & ~starting & ~behind
        now = size / self.product[before].prod(1)
        n = np.array(self.sizes)[axis]
        kind = np.where(start == -2, np.where(end == -1, 0, 1), np.where(end == -1, 2, 3))
        sent = now * np.choose(kind, [2 * (n - 1) / n, (n - 1) / n, n - 1, (n - 1) / n])
        copied = np.choose(kind, [now, now * (end > 0), now * n * (start > 0), 2 * now])
        bandwidth = self.cluster.memory_bandwidth
        found = np.where(copied > 0, self.cluster.launch + 2 * copied / bandwidth, 0.0)
        told = np.stack([kind.astype(float), axis.astype(float), sent], 1)[simple]
        if len(told):
            names, inverse = np.unique(told, axis=0, return_inverse=True)
            prices = [
                collective_seconds(KINDS[int(k)], s, (self.axes[int(a)],), self.mesh, self.cluster) for k, a, s in names
            ]
            found[simple] += np.array(prices)[inverse.ravel()]
        return np.where(simple, found, 0.0)
