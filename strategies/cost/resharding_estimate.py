"""Seconds of resharding on any number of axes, in closed form: a path that a rule writes down, without a search.

First local slices and reductions (a reduce-scatter where the target slices next over partial axes, else an all-reduce),
then all-to-alls of a dim's last axes for another dim's next ones, and gathers of what the target replicates; where axes
change places in a way that these cannot follow, one block exchange. Invariant: the engine could execute the path, so
its own, which it searches for, never sends more. The work is linear in the axes of the two layouts.
"""

from __future__ import annotations

import math
from functools import cache

from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.steps import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    EXCHANGE,
    REDUCE_SCATTER,
    SLICE,
    ReshardingPath,
    Step,
    common_prefix,
)
from strategies.cost.cluster import Cluster
from strategies.cost.collectives import collective_seconds, copied_elements


def direct_path(before: Layout, after: Layout, shape: tuple[int, ...], mesh: Mesh) -> ReshardingPath:
    """Steps from `before` to `after` for a tensor of global `shape`; `after` must not be partial.

    >>> mesh = Mesh((("a", 2), ("b", 2)))
    >>> before, after = Layout((("a",), ()), frozenset("b")), Layout((("a", "b"), ()))
    >>> [str(step) for step in direct_path(before, after, (8, 8), mesh)]
    ['reduce_scatter dim 0 over b']
    """
    if before == after:
        return ()
    path = _DirectPath(before, after, shape)
    path.slice()
    path.sum(mesh)
    path.slice()
    path.exchange()
    path.slice()
    if path.crossed():
        path.move(after, mesh)
    path.gather()
    return tuple(path.steps)


class _DirectPath:
    """The path so far, and the layout that it has reached."""

    def __init__(self, before: Layout, after: Layout, shape: tuple[int, ...]) -> None:
        self.now, self.wanted, self.shape = before, after.dims, shape
        self.steps: list[Step] = []

    def differing(self) -> list[int]:
        """The dims that differ from the target."""
        return [dim for dim, (have, want) in enumerate(zip(self.now.dims, self.wanted, strict=True)) if have != want]

    def sum(self, mesh: Mesh) -> None:
        if not self.now.partial:
            return
        for dim in self.differing():
            axes = self._next(dim, self.now.partial)
            if axes:
                left = self.now.partial - frozenset(axes)
                self._step(REDUCE_SCATTER, axes, dim, {dim: self.now.dims[dim] + axes}, left)
        if self.now.partial:
            self._step(ALL_REDUCE, mesh.sorted(self.now.partial), 0, {}, frozenset())

    def slice(self) -> None:
        for dim in self.differing():
            axes = self._next(dim, frozenset(self.wanted[dim]) - self.now.axes - self.now.partial)
            if axes:
                self._step(SLICE, axes, dim, {dim: self.now.dims[dim] + axes})

    def exchange(self) -> None:
        """All-to-alls of axes at the end of a dim that another dim wants next."""
        for dim in self.differing():
            for source in self.differing():
                have = self.now.dims[source]
                surplus = have[common_prefix(have, self.wanted[source]) :]
                axes = self._next(dim, frozenset(surplus)) if source != dim and surplus else ()
                if axes and have[-len(axes) :] == axes:
                    dims = {dim: self.now.dims[dim] + axes, source: have[: -len(axes)]}
                    self._step(ALL_TO_ALL, axes, dim, dims, source=source)

    def crossed(self) -> bool:
        """Whether gathers alone would not lead to the target."""
        return any(have[: len(want)] != want for have, want in zip(self.now.dims, self.wanted, strict=True))

    def move(self, after: Layout, mesh: Mesh) -> None:
        pairs = list(zip(self.now.dims, self.wanted, strict=True))
        kept = {axis for have, want in pairs for axis in have[: common_prefix(have, want)]}
        axes = mesh.sorted((self.now.axes | after.axes) - kept)
        self._step(EXCHANGE, axes, 0, dict(enumerate(self.wanted)))

    def gather(self) -> None:
        for dim in self.differing():
            have = self.now.dims[dim]
            same = common_prefix(have, self.wanted[dim])
            if same < len(have):
                self._step(ALL_GATHER, have[same:], dim, {dim: have[:same]})

    def _next(self, dim: int, among: frozenset[str]) -> tuple[str, ...]:
        """The longest run of axes in `among` that the target wants next in `dim`; none while axes there must go."""
        have, want = self.now.dims[dim], self.wanted[dim]
        end = start = len(have)
        if not among or want[:start] != have:
            return ()
        while end < len(want) and want[end] in among:
            end += 1
        return want[start:end]

    def _step(
        self,
        kind: str,
        axes: tuple[str, ...],
        dim: int,
        changed: dict[int, tuple[str, ...]],
        partial: frozenset[str] | None = None,
        source: int = 0,
    ) -> None:
        dims = tuple(changed.get(d, old) for d, old in enumerate(self.now.dims))
        after = Layout(dims, self.now.partial if partial is None else partial)
        self.steps.append(Step(kind, axes, dim, source, self.now, after, self.shape))
        self.now = after


def estimated_seconds(
    before: Layout, after: Layout, shape: tuple[int, ...], item_bytes: int, mesh: Mesh, cluster: Cluster
) -> float:
    """Seconds of that path. What a block exchange sends is what a rank receives, which is exact where no rank keeps
    more than another. A reduction that `after` leaves partial is not sent; a slice along its axes is padded with zeros.
    Padding to equal shards is not counted."""
    size = math.prod(shape) * item_bytes
    seconds = 0.0
    if after.partial:
        if not after.partial.isdisjoint(before.axes):
            seconds += cluster.launch + 2 * after.local_elements(shape, mesh) * item_bytes / cluster.memory_bandwidth
        dims = tuple(tuple(axis for axis in dim if axis not in after.partial) for dim in before.dims)
        before, after = Layout(dims, before.partial - after.partial), Layout(after.dims)
    for kind, axes, sent, copied in shares(before, after, mesh):
        if copied:
            seconds += cluster.launch + 2 * copied * size / cluster.memory_bandwidth
        if sent:
            seconds += collective_seconds(kind, sent * size, axes, mesh, cluster)
    return seconds


@cache
def shares(before: Layout, after: Layout, mesh: Mesh) -> tuple[tuple[str, tuple[str, ...], float, float], ...]:
    """The steps of that path: kind, axes, and the shares of the tensor that a rank sends and copies, whatever its
    shape is."""
    shape = (mesh.size,) * len(before.dims)
    elements = math.prod(shape)
    found = []
    for step in direct_path(before, after, shape, mesh):
        if step.kind == EXCHANGE:
            sent = step.after.local_elements(shape, mesh)
        else:
            sent = step.elements(mesh)
        found.append((step.kind, step.axes, sent / elements, copied_elements(step, mesh) / elements))
    return tuple(found)
