"""One step of a resharding path, as data: which collective, over which mesh axes, between which layouts, and how many
elements every rank sends.

The ranks and the simulator carry out the same steps; the search counts the same elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product

import numpy as np
import numpy.typing as npt

from strategies.core.layout import Block, Layout, WindowLayout
from strategies.core.mesh import Mesh

SLICE, PAD, ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, ALL_TO_ALL, EXCHANGE, ROTATE, MIRROR = (
    "slice",
    "pad",
    "all_gather",
    "all_reduce",
    "reduce_scatter",
    "all_to_all",
    "exchange",
    "rotate",
    "mirror",
)
"""Kinds of steps. `all_to_all` moves axes from one dim to another; `exchange` is an all-to-all-v of blocks between any
two layouts; from `Windows`, which overlap, it adds what several ranks send. `rotate` hands every rank's tensor to the
next rank of a ring, `mirror` the first rank's to the last one, the second's to the last but one, and so on."""
LOCAL = (SLICE, PAD)
"""Kinds that send nothing. `pad` is the adjoint of `slice`: zeros elsewhere, so the axes become partial."""

Axes = tuple[str, ...]
Dims = tuple[Axes, ...]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Step:
    """One step of a resharding path.

    Attributes:
        kind: One of the constants of this module.
        axes: The mesh axes over which ranks communicate, major to minor.
        dim: The tensor dim that changes (for `all_to_all` the one that is sliced).
        source: The dim that `all_to_all` gathers; it is 0 for others.
        before: The layout of the operand.
        after: The layout of the result.
        shape: The global shape; empty where it is not known.
    """

    kind: str
    axes: Axes
    dim: int
    source: int
    before: Layout
    after: Layout
    shape: tuple[int, ...]

    def __str__(self) -> str:
        axes = "*".join(self.axes)
        if self.kind == EXCHANGE:
            return f"exchange {self.before} -> {self.after}"
        if self.kind == ALL_REDUCE:
            return f"all_reduce over {axes}"
        if self.kind == ALL_TO_ALL:
            return f"all_to_all from dim {self.source} to dim {self.dim} over {axes}"
        if self.kind in (ROTATE, MIRROR):
            return f"{self.kind} over {axes}"
        return f"{self.kind} dim {self.dim} over {axes}"

    def cut_length(self, mesh: Mesh) -> int | None:
        """The length of dim `dim` before it is sliced, padding included; None where the shape is not known."""
        return self.after.local_shape(self.shape, mesh)[self.dim] * mesh.product(self.axes) if self.shape else None

    def joined_length(self, mesh: Mesh, dim: int) -> int | None:
        """The length of `dim` once gathered, without padding that ends there; None where the shape is not known."""
        return self.after.local_shape(self.shape, mesh)[dim] if self.shape else None

    def group(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """The ranks that take part, in the order of the slices; this rank alone for local steps."""
        return (rank,) if self.kind in LOCAL else mesh.group(rank, self.axes)

    def elements(self, mesh: Mesh, rank: int = 0) -> int:
        """Elements that `rank` sends to others."""
        if self.kind in LOCAL:
            return 0
        n = mesh.product(self.axes)
        if self.kind == EXCHANGE:
            return sum(size_of(block) for peer, block in sends(self, mesh, rank) if peer != rank)
        local = self.before.local_elements(self.shape, mesh)
        if self.kind == ROTATE or (self.kind == MIRROR and 2 * mesh.index(rank, self.axes) + 1 != n):
            return local
        if self.kind == MIRROR:
            return 0
        if self.kind == ALL_GATHER:
            return local * (n - 1)
        if self.kind == ALL_REDUCE:
            return -(-2 * local * (n - 1) // n)
        if self.kind == ALL_TO_ALL:  # the sliced dim may be padded first; the gathered dim is not yet
            local = local // (self.before.local_shape(self.shape, mesh)[self.dim] or 1) * (self.cut_length(mesh) or 0)
            return local * (n - 1) // n
        return self.after.local_elements(self.shape, mesh) * (n - 1)

    def busiest(self, mesh: Mesh) -> int:
        """Elements that the rank which sends most sends to others."""
        if self.kind == EXCHANGE:
            return _busiest_in_exchange(self, mesh)
        return self.elements(mesh)


ReshardingPath = tuple[Step, ...]
"""Steps that lead from one layout to another."""


def size_of(block: Block) -> int:
    """The number of elements of a block."""
    return math.prod(stop - start for start, stop in block)


def intersect(a: Block, b: Block) -> Block:
    """The common part of two blocks; some dim is empty or negative where there is none."""
    return tuple((max(s, t), min(e, f)) for (s, e), (t, f) in zip(a, b, strict=True))


@lru_cache(maxsize=2**14)
def receives(step: Step, mesh: Mesh, rank: int) -> tuple[tuple[int, Block], ...]:
    """What `rank` receives in an exchange.

    Along axes that do not slice the tensor before the step, the sender has the receiver's own coordinate: every replica
    serves itself, and a rank keeps what it has.

    Returns:
        (peer, block of the global tensor), by increasing peer, the rank itself included.
    """
    wanted = step.after.block(step.shape, mesh, rank)
    if isinstance(step.before, WindowLayout):
        parts = [
            (peer, intersect(step.before.block(step.shape, mesh, peer), wanted)) for peer in mesh.group(rank, step.axes)
        ]
        return tuple(sorted((peer, part) for peer, part in parts if all(start < stop for start, stop in part)))
    local = step.before.local_shape(step.shape, mesh)
    slices = [
        range(start // size, -(-stop // size)) if size else range(0)
        for (start, stop), size in zip(wanted, local, strict=True)
    ]
    blocks = []
    for position in product(*slices):
        peer = rank
        for dim, index in zip(step.before.dims, position, strict=True):
            for axis in reversed(dim):
                index, coordinate = divmod(index, mesh.sizes[axis])
                peer += (coordinate - mesh.coordinate(rank, axis)) * mesh.strides[axis]
        owned = tuple((i * size, (i + 1) * size) for i, size in zip(position, local, strict=True))
        blocks.append((peer, intersect(owned, wanted)))
    return tuple(sorted(blocks))


def sends(step: Step, mesh: Mesh, rank: int) -> list[tuple[int, Block]]:
    """What `rank` sends in an exchange: (peer, block), by increasing peer, the rank itself included."""
    return [
        (peer, block)
        for peer in sorted(mesh.group(rank, step.axes))
        for source, block in receives(step, mesh, peer)
        if source == rank
    ]


@cache
def _busiest_in_exchange(step: Step, mesh: Mesh) -> int:
    before, after, shape = step.before, step.after, step.shape
    if isinstance(before, WindowLayout) or isinstance(after, WindowLayout):
        if mesh.share is None:
            return _busiest_between_windows(step, mesh)
        return max(step.elements(mesh, rank) for rank in mesh.group(0, step.axes))
    if any(
        size % mesh.product(dim) for layout in (before, after) for size, dim in zip(shape, layout.dims, strict=True)
    ):
        return exchange_elements(mesh.axes, before.dims, after.dims, shape, step.axes)
    sent, total = exchange_share(mesh.axes, before.dims, after.dims)
    return sent * math.prod(shape) // total


def _busiest_between_windows(step: Step, mesh: Mesh) -> int:
    """As `sends` has it: what every rank of the group has of what every other one wants, for all pairs at once."""
    coordinates, senders = _coordinates(step.axes, mesh.sizes), step.before.axes
    ranks = mesh.product(step.axes)
    sent: Integers = np.ones((ranks, ranks), dtype=np.int64)
    for dim, size in enumerate(step.shape):
        starts, stops = _spans(step.before, dim, size, mesh, coordinates)
        begin, end = _spans(step.after, dim, size, mesh, coordinates)
        sent = sent * _overlap(starts[:, None], stops[:, None], begin, end)
    np.fill_diagonal(sent, 0)
    for axis in () if isinstance(step.before, WindowLayout) else step.axes:
        if axis not in senders:  # a rank is served by the replica at its own position
            at = np.broadcast_to(coordinates[axis], [mesh.sizes[axis] for axis in step.axes]).ravel()
            sent = sent * (at[:, None] == at)
    return int(sent.sum(1).max())


def _spans(
    layout: Layout, dim: int, size: int, mesh: Mesh, coordinates: dict[str, Integers]
) -> tuple[Integers, Integers]:
    """Where the slice of every rank of a group starts and stops in a dim; one entry where it is the same for all."""
    axes = layout.dims[dim]
    index = _slice_index(axes, mesh.sizes, coordinates)
    if any(axis in coordinates for axis in axes):
        index = np.broadcast_to(index, [mesh.sizes[axis] for axis in coordinates])
    index = index.ravel()
    if isinstance(layout, WindowLayout) and layout.windows[dim]:
        spans = np.array(layout.windows[dim], dtype=np.int64)[index]
        return spans[:, 0], spans[:, 1]
    length = -(-size // mesh.product(axes))
    starts = np.minimum(index * length, size)
    return starts, np.minimum(starts + length, size)


@cache
def common_prefix(x: Axes, y: Axes) -> int:
    """How many axes two dims have in common at their beginning."""
    for position, (a, b) in enumerate(zip(x, y, strict=False)):
        if a != b:
            return position
    return min(len(x), len(y))


def exchange_share(mesh: tuple[tuple[str, int], ...], before: Dims, after: Dims) -> tuple[int, int]:
    """The volume that the busiest rank sends in an all-to-all-v between layouts without padding.

    Replicated dims, and the order of the others, do not matter.

    Args:
        mesh: (axis, size), outermost first.
        before: Axes per dim.
        after: Axes per dim.

    Returns:
        (elements sent, elements of the tensor): the ratio as a fraction.
    """
    pairs = tuple(sorted([pair for pair in zip(before, after, strict=True) if any(pair)]))
    used = {axis for pair in pairs for dim in pair for axis in dim}
    return _exchange_share(tuple([axis for axis in mesh if axis[0] in used]), pairs)


@cache
def _exchange_share(mesh: tuple[tuple[str, int], ...], pairs: tuple[tuple[Axes, Axes], ...]) -> tuple[int, int]:
    length = math.prod(size for _, size in mesh)
    same = {axis for x, y in pairs for axis in x[: common_prefix(x, y)]}
    axes = tuple([axis for axis, _ in mesh if axis not in same])
    before, after = zip(*pairs, strict=True)
    sent = exchange_elements(mesh, before, after, (length,) * len(pairs), axes)
    return sent, length ** len(pairs)


def exchange_elements(
    mesh: tuple[tuple[str, int], ...], before: Dims, after: Dims, shape: tuple[int, ...], axes: Axes
) -> int:
    """Elements that the busiest rank sends to others in an exchange among the ranks that differ along `axes`.

    A rank serves the ranks at its own position along the axes that do not slice the tensor before. The overlap of its
    slice with all of theirs is a product over dims, each a sum over the positions that only this dim depends on.
    """
    sizes, rank = dict(mesh), len(axes)
    coordinates = _coordinates(axes, sizes)
    senders = {axis for dim in before for axis in dim}
    elsewhere = math.prod(sizes[axis] for axis in axes if axis in senders and not any(axis in dim for dim in after))
    total: Integers = np.full((1,) * rank, elsewhere, dtype=np.int64)
    kept: Integers = np.ones((1,) * rank, dtype=np.int64)
    for size, have, want in zip(shape, before, after, strict=True):
        length = -(-size // math.prod(sizes[axis] for axis in have))
        starts = np.minimum(_slice_index(have, sizes, coordinates) * length, size)
        stops = np.minimum(starts + length, size)
        length = -(-size // math.prod(sizes[axis] for axis in want))
        free: Integers = np.zeros(1, dtype=np.int64)
        weight = 1
        for axis in reversed(want):
            if axis in coordinates and axis in senders:
                free = (np.arange(sizes[axis])[:, None] * weight + free).ravel()
            weight *= sizes[axis]
        fixed = _slice_index(want, sizes, {axis: at for axis, at in coordinates.items() if axis not in senders})
        begin = np.minimum((fixed[..., None] + free) * length, size)
        total = total * _overlap(starts[..., None], stops[..., None], begin, np.minimum(begin + length, size)).sum(-1)
        begin = np.minimum(_slice_index(want, sizes, coordinates) * length, size)
        kept = kept * _overlap(starts, stops, begin, np.minimum(begin + length, size))
    return int((total - kept).max())


def _coordinates(axes: Axes, sizes: Mapping[str, int]) -> dict[str, Integers]:
    """The position of every rank of a group along each of its axes, one array dim per axis."""
    rank = len(axes)
    return {
        axis: np.arange(sizes[axis]).reshape([-1 if i == number else 1 for i in range(rank)])
        for number, axis in enumerate(axes)
    }


def _slice_index(dim: Axes, sizes: Mapping[str, int], coordinates: dict[str, Integers]) -> Integers:
    """Every rank's position among the slices that `dim` makes; axes without coordinates count as position 0."""
    rank = next(iter(coordinates.values())).ndim if coordinates else 0
    position: Integers = np.zeros((1,) * rank, dtype=np.int64)
    for axis in dim:
        position = position * sizes[axis] + coordinates.get(axis, 0)
    return position


def _overlap(starts: Integers, stops: Integers, begin: Integers, end: Integers) -> Integers:
    return np.asarray(np.maximum(np.minimum(stops, end) - np.maximum(starts, begin), 0))
