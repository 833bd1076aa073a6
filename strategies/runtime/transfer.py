"""The steps of a resharding path on local tensors: what a rank computes alone, and what it packs for a collective and
unpacks from it.

Ranks and the simulator call the same functions, so tests of the simulator cover what ranks do around a collective.
Several steps of one kind over the same axes are one collective of flattened tensors; each tensor gets the value that a
separate call would give it. Invariant: the padding beyond the end of a dim is zero when a tensor is sliced and dropped
when slices are concatenated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from strategies.core.layout import Layout, Stripes, WindowLayout, indices
from strategies.core.mesh import Mesh
from strategies.core.steps import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    EXCHANGE,
    MIRROR,
    ROTATE,
    SLICE,
    Step,
    receives,
    sends,
    size_of,
)

Unpack = Callable[[Tensor], list[Tensor]]


def cut(tensor: Tensor, layout: Layout, mesh: Mesh, rank: int) -> Tensor:
    """The slice of a global tensor on `rank`: a copy of shape `layout.local_shape`, zeros in the padding."""
    pieces = [tensor[indices(block)] for block, _ in layout.blocks(tensor.shape, mesh, rank)]
    wanted = layout.local_shape(tensor.shape, mesh)
    if isinstance(layout, Stripes):
        return filled(torch.cat(pieces, layout.packed.dim), wanted)
    (piece,) = pieces
    return piece.clone() if tuple(piece.shape) == wanted else filled(piece, wanted)


def in_order(gathered: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """A tensor of `layout` whose slices have been gathered one behind the other: each section from its stripes."""
    if not isinstance(layout, Stripes):
        return gathered
    dim, count = layout.packed.dim, mesh.product(layout.dims[layout.packed.dim])
    sizes = [size // count for size in layout.packed.sizes]
    slices = [torch.split(one, sizes, dim) for one in gathered.chunk(count, dim)]
    return torch.cat([stripe for section in zip(*slices, strict=True) for stripe in section], dim)


def filled(piece: Tensor, shape: Sequence[int]) -> Tensor:
    """`piece` at the beginning of every dim of a tensor of zeros of `shape`; itself where it has that shape."""
    if tuple(piece.shape) == tuple(shape):
        return piece
    result = piece.new_zeros(tuple(shape))
    result[tuple(slice(size) for size in piece.shape)] = piece
    return result


def local(step: Step, mesh: Mesh, rank: int) -> Callable[[Tensor], Tensor]:
    """The function that carries out a step that sends nothing: its own slice, or that slice among zeros."""
    n, index, dim = mesh.product(step.axes), mesh.index(rank, step.axes), step.dim
    if mesh.share is not None and mesh.share.axis in step.axes:
        return _of_share(step, mesh, rank)
    length, end = step.cut_length(mesh), step.joined_length(mesh, step.dim)

    def own(tensor: Tensor) -> Tensor:
        piece = _resized(tensor, dim, length).chunk(n, dim)[index]
        # Not only contiguous(): where an operator returns its argument itself in the forward of an autograd.Function,
        # torch 2.11 compiles a backward whose gradient is zero.
        return piece if piece.is_contiguous() else piece.contiguous()

    def padded(tensor: Tensor) -> Tensor:
        size = tensor.shape[dim]
        wide = tensor.new_zeros((*tensor.shape[:dim], size * n, *tensor.shape[dim + 1 :]))
        wide.narrow(dim, index * size, size).copy_(tensor)
        return _resized(wide, dim, end)

    return own if step.kind == SLICE else padded


def _of_share(step: Step, mesh: Mesh, rank: int) -> Callable[[Tensor], Tensor]:
    """`local` along the axis of the mesh's share, of a dim that no other axis slices on the larger side."""
    sliced, size, dim = step.after if step.kind == SLICE else step.before, step.shape[step.dim], step.dim
    start, length = mesh.start(rank, size, sliced.dims[dim]), mesh.length(size, sliced.dims[dim])

    def own(tensor: Tensor) -> Tensor:
        return tensor.narrow(dim, start, length).contiguous()

    def padded(tensor: Tensor) -> Tensor:
        wide = tensor.new_zeros((*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]))
        wide.narrow(dim, start, length).copy_(tensor)
        return wide

    return own if step.kind == SLICE else padded


class Transfer:
    """What `rank` does before and after the one collective that stands for `steps`, which are of one kind over the same
    axes.

    Attributes:
        peers: the ranks of the process group, increasing.
        give, get: elements that an exchange sends to and receives from each of them; None for equal parts.
    """

    give: list[int] | None = None
    get: list[int] | None = None

    def __init__(self, steps: Sequence[Step], mesh: Mesh, rank: int) -> None:
        self.kind, self._rank, self._cuts = steps[0].kind, rank, [step.dim for step in steps]
        order = mesh.group(rank, steps[0].axes)  # in the order of the slices
        self.peers, self.size = sorted(order), len(order)
        self._places = [self.peers.index(peer) for peer in order]  # by slice
        self._slices = [order.index(peer) for peer in self.peers]  # by place in the process group
        self._in_order = self._places == self._slices == [*range(self.size)]
        self._lengths = [step.cut_length(mesh) for step in steps]
        self._dims = [step.source if self.kind == ALL_TO_ALL else step.dim for step in steps]
        self._ends = [step.joined_length(mesh, dim) for step, dim in zip(steps, self._dims, strict=True)]
        if self.kind in (ROTATE, MIRROR):
            size = sum(step.before.local_elements(step.shape, mesh) for step in steps)
            here = order.index(rank)
            mirror = order[-1 - here]
            ends = (mirror, mirror) if self.kind == MIRROR else (order[(here + 1) % self.size], order[here - 1])
            self.give, self.get = ([size if peer == end else 0 for peer in self.peers] for end in ends)
        if self.kind == EXCHANGE:
            (step,) = steps
            outgoing, incoming = dict(sends(step, mesh, rank)), dict(receives(step, mesh, rank))
            self.give, self.get = (
                [size_of(blocks[peer]) if peer in blocks and peer != rank else 0 for peer in self.peers]
                for blocks in (outgoing, incoming)
            )
            before, after = step.before.block(step.shape, mesh, rank), step.after.block(step.shape, mesh, rank)
            self._take = {peer: indices(block, before) for peer, block in outgoing.items()}
            self._put = {peer: indices(block, after) for peer, block in incoming.items()}
            self._shape = step.after.local_shape(step.shape, mesh)
            self._full = self._shape == tuple(stop - start for start, stop in after)
            self._added = isinstance(step.before, WindowLayout)  # several ranks may send the same elements

    def pack(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Unpack]:
        """What goes into the collective, in memory that an all-reduce may overwrite; and what makes the results of all
        steps from what comes out of it."""
        if self.kind == EXCHANGE:
            return self._pack_blocks(tensors[0])
        if len(tensors) == 1:
            return self._pack_alone(tensors[0])
        shapes = [tensor.shape for tensor in tensors]
        if self.kind in (ALL_REDUCE, ALL_GATHER, ROTATE, MIRROR):
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            return flat, lambda received: self._split(received, shapes)
        pieces = [self._pieces(number, tensor) for number, tensor in enumerate(tensors)]
        flat = torch.cat([part.reshape(-1) for parts in zip(*pieces, strict=True) for part in parts])
        cut_shapes = [parts[0].shape for parts in pieces]
        return flat, lambda received: self._split(received, cut_shapes)

    def sent(self, tensors: Sequence[Tensor], packed: Tensor) -> int:
        """Elements that the rank sends to others: as many as in calls of their own."""
        n = self.size
        if self.kind == ALL_REDUCE:
            return sum(-(-2 * (n - 1) * tensor.numel() // n) for tensor in tensors)
        if self.kind == ALL_GATHER:
            return packed.numel() * (n - 1)
        if self.give is not None:
            return sum(size for peer, size in zip(self.peers, self.give, strict=True) if peer != self._rank)
        return packed.numel() * (n - 1) // n

    def _pack_alone(self, tensor: Tensor) -> tuple[Tensor, Unpack]:
        if self.kind in (ROTATE, MIRROR):
            return tensor.reshape(-1), lambda received: [received.view(tensor.shape)]
        if self.kind == ALL_REDUCE:
            return tensor.clone(memory_format=torch.contiguous_format), lambda received: [received]
        if self.kind == ALL_GATHER:
            return tensor.contiguous(), lambda received: [self._joined(0, received)]
        if self._cuts[0] == 0 and self._in_order:
            packed = _resized(tensor, 0, self._lengths[0]).contiguous()
        else:
            packed = torch.cat(self._pieces(0, tensor))
        if self.kind == ALL_TO_ALL:
            return packed, lambda received: [self._joined(0, received)]
        return packed, lambda received: [received]

    def _pieces(self, number: int, tensor: Tensor) -> list[Tensor]:
        """The slices of a tensor in the order of the process group."""
        dim = self._cuts[number]
        pieces = _resized(tensor, dim, self._lengths[number]).chunk(self.size, dim)
        return [pieces[index] for index in self._slices]

    def _joined(self, number: int, received: Tensor | Sequence[Tensor]) -> Tensor:
        """A gathered tensor from the slices in the order of the process group, or from all of them below one
        another."""
        dim = self._dims[number]
        if isinstance(received, Tensor):
            if dim == 0 and self._in_order:
                return _resized(received, 0, self._ends[number])
            received = received.chunk(self.size)
        return _resized(torch.cat([received[place] for place in self._places], dim), dim, self._ends[number])

    def _split(self, received: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """The results of several steps from flattened ones: from one row per rank, if slices are gathered."""
        sizes = [math.prod(shape) for shape in shapes]
        if self.kind == ALL_GATHER:
            parts = torch.split(received.view(self.size, sum(sizes)), sizes, 1)
            pieces = ([row.view(shape) for row in part] for part, shape in zip(parts, shapes, strict=True))
            return [self._joined(number, piece) for number, piece in enumerate(pieces)]
        return [part.view(shape) for part, shape in zip(torch.split(received, sizes), shapes, strict=True)]

    def _pack_blocks(self, tensor: Tensor) -> tuple[Tensor, Unpack]:
        assert self.give is not None and self.get is not None
        rank, get = self._rank, self.get
        give = zip(self.peers, self.give, strict=True)
        parts = [tensor[self._take[peer]].reshape(-1) for peer, size in give if size]

        def unpack(received: Tensor) -> list[Tensor]:
            complete = self._full and not self._added
            result = tensor.new_empty(self._shape) if complete else tensor.new_zeros(self._shape)
            put = Tensor.add_ if self._added else Tensor.copy_
            if rank in self._put:
                put(result[self._put[rank]], tensor[self._take[rank]])
            for peer, piece in zip(self.peers, torch.split(received, get), strict=True):
                if piece.numel():
                    part = result[self._put[peer]]
                    put(part, piece.view(part.shape))
            return [result]

        return torch.cat(parts) if parts else tensor.new_empty(0), unpack


def _resized(tensor: Tensor, dim: int, length: int | None) -> Tensor:
    """`tensor` with `dim` of the given length: zeros are added at its end, or the end is dropped (a view). None keeps
    the length."""
    have = tensor.shape[dim] if tensor.dim() else 1
    if length is None or length == have:
        return tensor
    if length < have:
        return tensor.narrow(dim, 0, length)
    return torch.cat([tensor, tensor.new_zeros((*tensor.shape[:dim], length - have, *tensor.shape[dim + 1 :]))], dim)
