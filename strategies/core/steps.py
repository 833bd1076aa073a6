"""The steps of a redistribution as data: which collective changes which dim over which mesh axes, and what it sends.

The real engine, the simulator and every cost read the same steps. `Step.elements` counts what one rank sends,
`Step.busiest` what the rank sends that sends most. An exchange (block exchange, all-to-all-v) goes from any layout to
any other in one call; all other steps change one dim, or the partial axes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import numpy.typing as npt

from strategies.core.layout import Block, Layout
from strategies.core.mesh import Mesh

SLICE, PAD, ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, ALL_TO_ALL, EXCHANGE = (
    "slice",
    "pad",
    "all_gather",
    "all_reduce",
    "reduce_scatter",
    "all_to_all",
    "exchange",
)
LOCAL = (SLICE, PAD)
"""Steps that send nothing. `pad` is the adjoint of `slice`: zeros elsewhere, so the axes become partial."""

Axes = tuple[str, ...]
Dims = tuple[Axes, ...]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Step:
    """One step of a chain.

    `dim` is the tensor dim that changes (the one that gets sliced, for `all_to_all`); `source` is the dim that
    `all_to_all` gathers; `axes` are the mesh axes, major to minor; `before` and `after` are the layouts on both sides,
    `shape` is the global shape.
    """

    kind: str
    axes: tuple[str, ...]
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
        return f"{self.kind} dim {self.dim} over {axes}"

    def cut_length(self, mesh: Mesh) -> int | None:
        """How long dim `dim` is when it is cut, padding included; None where the shape is not known."""
        return self.after.local_shape(self.shape, mesh)[self.dim] * mesh.product(self.axes) if self.shape else None

    def joined_length(self, mesh: Mesh, dim: int) -> int | None:
        """How long `dim` is once joined and without padding that ends there; None where the shape is not known."""
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
        local = math.prod(self.before.local_shape(self.shape, mesh))
        if self.kind == ALL_GATHER:
            return local * (n - 1)
        if self.kind == ALL_REDUCE:
            return -(-2 * local * (n - 1) // n)
        if self.kind == ALL_TO_ALL:  # what is cut may be padded first; the joined dim is not yet
            local = local // (self.before.local_shape(self.shape, mesh)[self.dim] or 1) * (self.cut_length(mesh) or 0)
            return local * (n - 1) // n
        return math.prod(self.after.local_shape(self.shape, mesh)) * (n - 1)

    def busiest(self, mesh: Mesh) -> int:
        """Elements that the rank which sends most sends to others."""
        if self.kind == EXCHANGE:
            return busiest_exchange(self.before, self.after, self.shape, mesh)
        return self.elements(mesh)


Chain = tuple[Step, ...]


def size_of(block: Block) -> int:
    return math.prod(stop - start for start, stop in block)


def intersect(a: Block, b: Block) -> Block:
    return tuple((max(s, t), min(e, f)) for (s, e), (t, f) in zip(a, b, strict=True))


def receives(step: Step, mesh: Mesh, rank: int) -> list[tuple[int, Block]]:
    """For an exchange: what `rank` needs and who has it, as (peer, block of the global tensor), by increasing peer.

    Along axes that do not slice the tensor before the step, the source sits at the receiver's own coordinate: every
    replica serves itself, and a rank keeps what it has.
    """
    wanted = step.after.block(step.shape, mesh, rank)
    local = step.before.local_shape(step.shape, mesh)
    slices = [
        range(start // size, -(-stop // size)) if size else range(0)
        for (start, stop), size in zip(wanted, local, strict=True)
    ]
    found = []
    for position in product(*slices):
        peer = rank
        for dim, index in zip(step.before.dims, position, strict=True):
            for axis in reversed(dim):
                index, coordinate = divmod(index, mesh.sizes[axis])
                peer += (coordinate - mesh.coordinate(rank, axis)) * mesh.strides[axis]
        held = tuple((i * size, (i + 1) * size) for i, size in zip(position, local, strict=True))
        found.append((peer, intersect(held, wanted)))
    return sorted(found)


def sends(step: Step, mesh: Mesh, rank: int) -> list[tuple[int, Block]]:
    """For an exchange: what `rank` sends and to whom (itself included), by increasing peer."""
    return [
        (peer, block)
        for peer in sorted(mesh.group(rank, step.axes))
        for source, block in receives(step, mesh, peer)
        if source == rank
    ]


@cache
def busiest_exchange(before: Layout, after: Layout, shape: tuple[int, ...], mesh: Mesh) -> int:
    """What the busiest rank sends in an exchange."""
    if not any(
        is_padded(size, dim, mesh) for layout in (before, after) for size, dim in zip(shape, layout.dims, strict=True)
    ):
        sent, of = exchanged_share(mesh.axes, before.dims, after.dims)
        return sent * math.prod(shape) // of
    axes = exchange_step(before, after, shape, mesh).axes
    return exchange_elements(mesh.axes, before.dims, after.dims, shape, axes)


def exchange_step(before: Layout, after: Layout, shape: tuple[int, ...], mesh: Mesh) -> Step:
    """One all-to-all with uneven splits, among ranks that differ along an axis that the layouts place differently."""
    same = {
        axis
        for size, x, y in zip(shape, before.dims, after.dims, strict=True)
        if x == y or not (is_padded(size, x, mesh) or is_padded(size, y, mesh))
        for axis in x[: common(x, y)]
    }
    axes = mesh.sorted((before.axes | after.axes) - same)
    return Step(EXCHANGE, axes, 0, 0, before, after, shape)


def is_padded(size: int, axes: Sequence[str], mesh: Mesh) -> bool:
    """Whether a dim of this size sliced over these axes has padding."""
    return size % mesh.product(axes) != 0


def common(x: Axes, y: Axes) -> int:
    """How many axes two dims have in common at their beginning."""
    for position, (a, b) in enumerate(zip(x, y, strict=False)):
        if a != b:
            return position
    return min(len(x), len(y))


def exchanged_share(mesh: tuple[tuple[str, int], ...], before: Dims, after: Dims) -> tuple[int, int]:
    """What the busiest rank sends in an exchange between even layouts: so many elements of so many. Dims that nothing
    cuts, and the order of the others, do not matter."""
    pairs = tuple(sorted([pair for pair in zip(before, after, strict=True) if any(pair)]))
    used = {axis for pair in pairs for dim in pair for axis in dim}
    return _exchanged_share(tuple([one for one in mesh if one[0] in used]), pairs)


@cache
def _exchanged_share(mesh: tuple[tuple[str, int], ...], pairs: tuple[tuple[Axes, Axes], ...]) -> tuple[int, int]:
    length = math.prod(size for _, size in mesh)
    same = {axis for x, y in pairs for axis in x[: common(x, y)]}
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
    own: dict[str, Integers] = {}  # every rank's position along an axis, one array dim per axis of the group
    for place, axis in enumerate(axes):
        own[axis] = np.arange(sizes[axis]).reshape([-1 if i == place else 1 for i in range(rank)])
    senders = {axis for dim in before for axis in dim}
    elsewhere = math.prod(sizes[axis] for axis in axes if axis in senders and not any(axis in dim for dim in after))
    total: Integers = np.full((1,) * rank, elsewhere, dtype=np.int64)
    kept: Integers = np.ones((1,) * rank, dtype=np.int64)
    for size, have, want in zip(shape, before, after, strict=True):
        held = _weighted(have, sizes, own)
        length = -(-size // math.prod(sizes[axis] for axis in have))
        starts = np.minimum(held * length, size)
        stops = np.minimum(starts + length, size)
        length = -(-size // math.prod(sizes[axis] for axis in want))
        free: Integers = np.zeros(1, dtype=np.int64)
        weight = 1
        for axis in reversed(want):
            if axis in own and axis in senders:
                free = (np.arange(sizes[axis])[:, None] * weight + free).ravel()
            weight *= sizes[axis]
        fixed = _weighted(want, sizes, {axis: place for axis, place in own.items() if axis not in senders})
        begin = np.minimum((fixed[..., None] + free) * length, size)
        total = total * _overlap(starts[..., None], stops[..., None], begin, np.minimum(begin + length, size)).sum(-1)
        begin = np.minimum(_weighted(want, sizes, own) * length, size)
        kept = kept * _overlap(starts, stops, begin, np.minimum(begin + length, size))
    return int((total - kept).max())


def _weighted(dim: Axes, sizes: dict[str, int], own: dict[str, Integers]) -> Integers:
    """Every rank's position among the slices that `dim` makes; axes without an entry in `own` count as position 0."""
    position: Integers = np.zeros((1,) * next(iter(own.values())).ndim if own else (), dtype=np.int64)
    for axis in dim:
        position = position * sizes[axis] + own.get(axis, 0)
    return position


def _overlap(starts: Integers, stops: Integers, begin: Integers, end: Integers) -> Integers:
    return np.asarray(np.maximum(np.minimum(stops, end) - np.maximum(starts, begin), 0))
