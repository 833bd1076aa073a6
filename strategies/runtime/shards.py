"""A rank's shards of a tensor: views of its memory, each a block of the global tensor, however its slice is divided.

Invariant: the views of all ranks together cover every element, and no view includes padding. A range of a row-major
slice, as ZeRO assigns to a rank, is at most 2 n - 1 blocks in n dims.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from strategies.core.layout import Block, indices

MODEL, OPTIMIZER = "model/", "optimizer/"


@dataclass(frozen=True)
class Shard:
    """`view` is the part `block` of a tensor of the global `shape`; `shared` if every rank with the same slice of the
    tensor holds the same; not `lasting` where the memory will soon be reused."""

    shape: tuple[int, ...]
    block: Block
    view: Tensor
    shared: bool = True
    lasting: bool = True


Blocks = Sequence[tuple[Block, Block]]
"""The blocks of a tensor that a rank's slice is, each with its place in the slice (`Layout.blocks`)."""
Shards = Mapping[str, Sequence[Shard]]
"""By key: `model/NAME` (the weights on which the optimizer works) or `optimizer/STATE/NAME`."""


class KnownShards:
    """Shards of tensors that stay where they are, made once: a save asks for hundreds."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Tensor, int, list[Shard]]] = {}

    def of(self, key: str, tensor: Tensor, make: Callable[[], list[Shard]]) -> list[Shard]:
        """The shards of `tensor`, which `make` makes; not to be changed."""
        known = self._made.get(key)
        if known is None or known[0] is not tensor or known[1] != tensor.data_ptr():
            known = self._made[key] = tensor, tensor.data_ptr(), make()
        return known[2]


def full(shape: Sequence[int]) -> Block:
    """The block that is all of a tensor of `shape`."""
    return tuple((0, size) for size in shape)


def overlaps(block: Block, parts: Sequence[Block]) -> Iterator[tuple[int, Block, Block]]:
    """The overlaps of `block` with disjoint parts of the same tensor.

    Yields:
        (number of the part, what they share counted from the corner of the part, and from the corner of `block`).
    """
    for number, part in enumerate(parts):
        common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(block, part, strict=True)]
        if all(start < stop for start, stop in common):
            yield number, _from(common, part), _from(common, block)


def _from(common: Sequence[tuple[int, int]], origin: Block) -> Block:
    """`common` counted from the corner of `origin`."""
    return tuple((start - base, stop - base) for (start, stop), (base, _) in zip(common, origin, strict=True))


def replicated(tensor: Tensor) -> Shard:
    """All of a tensor that every rank holds."""
    return Shard(tuple(tensor.shape), full(tensor.shape), tensor.detach())


def of_slice(shape: Sequence[int], blocks: Blocks, local: Tensor) -> list[Shard]:
    """A rank's slice of a tensor of `shape`; `local` may be longer by padding."""
    return [Shard(tuple(shape), block, local.detach()[indices(place)]) for block, place in blocks]


def of_range(shape: Sequence[int], blocks: Blocks, local_shape: Sequence[int], first: int, flat: Tensor) -> list[Shard]:
    """The elements from `first` on of a slice, which has `local_shape` with padding and is counted row by row: `flat`,
    in a 1-D tensor."""
    if 0 in shape:
        return [Shard(tuple(shape), full(shape), flat.detach().view(tuple(shape)), shared=False)]
    found, places = [], [place for _, place in blocks]
    for box, at in boxes(local_shape, first, first + flat.numel()):
        lengths = [stop - start for start, stop in box]
        stored = flat.detach()[at : at + math.prod(lengths)].view(lengths)
        for number, inside, own in overlaps(box, places):
            block = blocks[number][0]
            part = tuple((base + start, base + stop) for (base, _), (start, stop) in zip(block, inside, strict=True))
            found.append(Shard(tuple(shape), part, stored[indices(own)], shared=False))
    return found


def boxes(shape: Sequence[int], first: int, last: int) -> Iterator[tuple[Block, int]]:
    """The elements `first` to `last` (without it) of a tensor, counted row by row, as blocks: (block, its first element
    counted from `first`)."""
    if first >= last:
        return
    if not shape:
        yield (), 0
        return
    row = math.prod(shape[1:])
    start, stop = -(-first // row), last // row  # complete rows
    if start > stop:  # within one row
        yield from _in_row(shape, stop, first, last, 0)
        return
    if first < start * row:
        yield from _in_row(shape, start - 1, first, start * row, 0)
    if start < stop:
        yield ((start, stop), *((0, size) for size in shape[1:])), start * row - first
    if stop * row < last:
        yield from _in_row(shape, stop, stop * row, last, stop * row - first)


def _in_row(shape: Sequence[int], row: int, first: int, last: int, at: int) -> Iterator[tuple[Block, int]]:
    begin = row * math.prod(shape[1:])
    for block, offset in boxes(shape[1:], first - begin, last - begin):
        yield ((row, row + 1), *block), at + offset
