"""The layout of one tensor on the mesh: the axes that slice each dim (major to minor), and those of a partial sum.

Invariant: an axis occurs at most once in a layout. Every rank's slice is one rectangular block of the tensor, and all
slices have the same local shape: where a dim does not divide, slices are as long as the first one, and what the last
one holds beyond the end of the dim is padding (zeros, or whatever operators made of zeros; gradients there are zero).
On a mesh with a `Share` slices along its axis have different lengths, without padding. A slice of a packed tensor is
several blocks: a stripe of each of its sections, one behind the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from strategies.core.errors import StrategyError
from strategies.core.graph import FusedSections, TensorSpec
from strategies.core.mesh import Mesh

Block = tuple[tuple[int, int], ...]
"""(start, stop) per dim."""


def indices(block: Block, origin: Block | None = None) -> tuple[slice, ...]:
    """What selects `block` in a tensor whose first element is at the corner of `origin`, or at 0 in every dim."""
    corner = [start for start, _ in origin] if origin else [0] * len(block)
    return tuple([slice(start - base, stop - base) for (start, stop), base in zip(block, corner, strict=True)])


@dataclass(frozen=True)
class Layout:
    """`dims[d]` are the axes that slice dim d; `partial` are axes over which the ranks' tensors must be added; over
    `deferred` the tensor is replicated, but its gradient stays a partial sum."""

    dims: tuple[tuple[str, ...], ...]
    partial: frozenset[str] = frozenset()
    deferred: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        used = [axis for dim in self.dims for axis in dim] + list(self.partial) + list(self.deferred)
        if len(set(used)) != len(used):
            twice = sorted({axis for axis in used if used.count(axis) > 1})
            raise StrategyError("MW408", f"Layout {self} uses mesh axis {', '.join(twice)} more than once.")

    def __str__(self) -> str:
        dims = ", ".join("*".join(dim) if dim else "-" for dim in self.dims)
        partial = f" partial over {'*'.join(sorted(self.partial))}" if self.partial else ""
        deferred = f" gradient partial over {'*'.join(sorted(self.deferred))}" if self.deferred else ""
        return f"({dims}){partial}{deferred}"

    @staticmethod
    def replicated(dims: int) -> Layout:
        return Layout(((),) * dims)

    @cached_property
    def axes(self) -> frozenset[str]:
        """The axes that slice some dim."""
        return frozenset(axis for dim in self.dims for axis in dim)

    @property
    def reduced(self) -> Layout:
        """The layout once its partial sums are reduced: the same slices, nothing partial."""
        return Layout(self.dims) if self.partial or self.deferred else self

    @property
    def gradient(self) -> Layout:
        """The layout in which a value's gradient comes back."""
        return Layout(self.dims, self.deferred)

    def counts(self, mesh: Mesh) -> tuple[int, ...]:
        """Slices per dim."""
        return tuple([mesh.product(dim) if dim else 1 for dim in self.dims])

    def check_even(self, shape: Sequence[int], mesh: Mesh) -> None:
        """Raises StrategyError if a dim does not divide into equal slices."""
        for dim, (size, count) in enumerate(zip(shape, self.counts(mesh), strict=True)):
            if size % count:
                raise StrategyError(
                    "MW402", f"Dim {dim} of a tensor of shape {tuple(shape)} cannot be cut into {count} equal slices."
                )

    def local_shape(self, shape: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
        """Shape of one slice, padding included."""
        return tuple([mesh.length(size, dim) if dim else size for size, dim in zip(shape, self.dims, strict=True)])

    def local_elements(self, shape: Sequence[int], mesh: Mesh) -> int:
        """Elements of one slice, padding included."""
        return math.prod(self.local_shape(shape, mesh))

    def block(self, shape: Sequence[int], mesh: Mesh, rank: int) -> Block:
        """The part of the tensor that `rank` holds, (start, stop) per dim, without padding."""
        local = self.local_shape(shape, mesh)
        starts = [mesh.start(rank, size, dim) for dim, size in zip(self.dims, shape, strict=True)]
        return tuple(
            (min(start, length), min(start + size, length))
            for start, size, length in zip(starts, local, shape, strict=True)
        )

    def blocks(self, shape: Sequence[int], mesh: Mesh, rank: int) -> tuple[tuple[Block, Block], ...]:
        """The parts of the tensor that `rank` holds, without padding, each with its place in the rank's slice."""
        block = self.block(shape, mesh, rank)
        return ((block, tuple((0, stop - start) for start, stop in block)),)

    def replica_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """The axes along which ranks hold the same slice (or the same partial sum's terms)."""
        return mesh.others(self.axes)

    def replica_group(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same slice as `rank`."""
        return mesh.group(rank, self.replica_axes(mesh))


@dataclass(frozen=True)
class WindowLayout(Layout):
    """Slices that overlap or leave out: slice i of dim d is `windows[d][i]`, (start, stop); dims without windows have
    equal slices. Every local shape is that of the longest window; what a shorter one lacks at its end is zero."""

    windows: tuple[tuple[tuple[int, int], ...], ...] = ()

    def local_shape(self, shape: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
        equal = super().local_shape(shape, mesh)
        return tuple(
            [
                max(stop - start for start, stop in windows) if windows else size
                for windows, size in zip(self.windows, equal, strict=True)
            ]
        )

    def block(self, shape: Sequence[int], mesh: Mesh, rank: int) -> Block:
        equal = Layout(self.dims).block(shape, mesh, rank)
        return tuple(
            [
                windows[mesh.index(rank, dim)] if windows else own
                for windows, dim, own in zip(self.windows, self.dims, equal, strict=True)
            ]
        )


@dataclass(frozen=True)
class Stripes(Layout):
    """Slices of a packed tensor along the dim in which it is packed."""

    packed: FusedSections = field(kw_only=True)

    def block(self, shape: Sequence[int], mesh: Mesh, rank: int) -> Block:
        raise TypeError(f"A slice of a tensor that is {self.packed} is several blocks.")

    def blocks(self, shape: Sequence[int], mesh: Mesh, rank: int) -> tuple[tuple[Block, Block], ...]:
        dim, found, end = self.packed.dim, [], 0
        for offset, size in zip(accumulate(self.packed.sizes, initial=0), self.packed.sizes, strict=False):
            section = (*shape[:dim], size, *shape[dim + 1 :])
            ((block, place),) = Layout(self.dims).blocks(section, mesh, rank)
            (first, last), (_, length) = block[dim], place[dim]
            block = (*block[:dim], (offset + first, offset + last), *block[dim + 1 :])
            found.append((block, (*place[:dim], (end, end + length), *place[dim + 1 :])))
            end += length
        return tuple(found)


def stored(layout: Layout, spec: TensorSpec, mesh: Mesh) -> Layout:
    """The layout of a tensor by the blocks that its slices are: stripes where they divide every section."""
    if spec.packed is None or (count := mesh.product(layout.dims[spec.packed.dim])) == 1:
        return layout
    striped = all(size % count == 0 for size in spec.packed.sizes)
    return Stripes(layout.dims, layout.partial, packed=spec.packed) if striped else layout


def recoverable(
    parameters: Iterable[Layout], mesh: Mesh, rank: int, *, stage: int = 0, split: bool = False
) -> tuple[int, ...]:
    """The ranks, `rank` among them, that have the same slices of all `parameters`, in order; any can restore it.

    `rank` is global to the run; in a pipeline `parameters` are those of its `stage`, whose ranks begin at
    `stage * mesh.size`. `split`: the optimizer's states are not the same on replicas.
    """
    first = stage * mesh.size
    if split:
        return (rank,)
    ranks = set(range(mesh.size))
    for layout in parameters:
        ranks &= set(layout.replica_group(mesh, rank - first))
    return tuple(first + other for other in sorted(ranks))
