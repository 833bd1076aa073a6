"""Sliced dims of pictures: the rows that each slice of windows' places needs, fetched from other slices (halos).

Rows and places are cut into equal blocks each, the last ones perhaps shorter. The places of a block need the rows from
the first one of their first window to the last one of their last window: fewer than the block's own where windows are
far apart, those of several neighbours where windows are large. Every slice gets as many, those beyond the picture's
ends filled up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from strategies.core.graph import Ref
from strategies.rules.registry import local_function
from strategies.rules.sharding import Local

Interval = tuple[int, int]
"""(start, stop) of rows."""


@local_function
def framed(
    x: Tensor, dim: int, position: int, begins: Sequence[int], stops: Sequence[int], length: int, fill: float
) -> Tensor:
    """`length` rows of `x` from row `begins[position]` on, with `fill` for rows before row 0 or from row
    `stops[position]` on."""
    begin, stop = begins[position], min(stops[position], begins[position] + length)
    start = min(max(begin, 0), x.shape[dim])
    rows = x.narrow(dim, start, max(stop - start, 0))
    before = min(max(-begin, 0), length)
    after = length - before - rows.shape[dim]
    return F.pad(rows, (*(0, 0) * (x.dim() - 1 - dim), before, after), value=fill) if before or after else rows


@dataclass(frozen=True)
class Frames:
    """What the slices of a sliced dim compute from: slice i takes `length` rows from `starts[i]` on."""

    starts: tuple[int, ...]
    length: int


@dataclass(frozen=True)
class PictureDim:
    """A dim of a picture that an operator changes.

    Attributes:
        factor: of rows and places.
        dim: of the operand, from the front.
        rows: of the operand.
        places: The result's rows.
    """

    factor: str
    dim: int
    rows: int
    places: int

    @property
    def size(self) -> int:
        """What a slice count must divide for equal slices."""
        return math.gcd(self.rows, self.places)

    def block(self, slices: int) -> int:
        """The places of a slice, padding included."""
        return -(-self.places // slices)


@dataclass(frozen=True)
class PictureWindows(PictureDim):
    """The windows over one dim of a picture; each is a place of the result.

    Attributes:
        extent: Rows from a window's first to its last: dilation * (kernel - 1) + 1.
        stride: Rows between windows.
        padding: Rows before the first one that the first window begins; negative where it begins behind it.
        transposed: Whether rows are spread over windows of places.
        spare: Rows behind the last window of a slice that the operator may be given: they make no more windows.
    """

    extent: int
    stride: int
    padding: int
    transposed: bool = False
    spare: int = 0

    def frames(self, slices: int) -> Frames:
        """The rows that each slice of places needs."""
        block = self.block(slices)
        firsts = [index * block for index in range(slices)]
        if not self.transposed:
            starts = tuple(first * self.stride - self.padding for first in firsts)
            return Frames(starts, (block - 1) * self.stride + self.extent)
        stride, extent = self.stride, self.extent
        places = [first + self.padding for first in firsts]  # of rows spread without padding
        starts = tuple(min(-(-(place - extent + 1) // stride), place // stride) for place in places)
        ends = [(place + block - 1) // stride for place in places]
        lengths = [
            max(end - start + 1, -(-(place - start * stride + block - extent) // stride) + 1)
            for start, end, place in zip(starts, ends, places, strict=True)
        ]
        return Frames(starts, max(lengths))

    def offsets(self, slices: int) -> tuple[int, ...]:
        """Transposed: which place of those that a slice computes is its first own one."""
        block = self.block(slices)
        starts = self.frames(slices).starts
        return tuple(index * block + self.padding - start * self.stride for index, start in enumerate(starts))


def exchanged(
    local: Local, value: Ref, wanted: Mapping[int, tuple[str, int, Sequence[Interval]]]
) -> tuple[Ref, dict[int, Sequence[Interval]]]:
    """The rows that slices want of each other, at least.

    Args:
        local: the rank's program.
        value: the rank's slice of the first operand.
        wanted: dim -> its factor, its global length, and the (start, stop) that each slice wants.

    Returns:
        The slice with what it wants; and dim -> the (start, stop) that each slice has now. All slices are as long as
        the longest one.
    """
    far: dict[int, tuple[str, Sequence[Interval]]] = {}
    present: dict[int, Sequence[Interval]] = {}
    for dim, (factor, rows, intervals) in wanted.items():
        own = -(-rows // local.slices(factor))
        present[dim] = [(min(i * own, rows), min((i + 1) * own, rows)) for i in range(len(intervals))]
        pairs = zip(intervals, present[dim], strict=True)
        if any(start < stop and (start < a or stop > b) for (start, stop), (a, b) in pairs):
            far[dim], present[dim] = (factor, intervals), intervals
    return local.windows_over(value, far) if far else value, present


def fetched(local: Local, value: Ref, windows: Sequence[PictureWindows], fill: float) -> Ref:
    """The rows of the first operand that the rank's places need, along all dims of `windows`."""
    frames = {one.dim: one.frames(local.slices(one.factor)) for one in windows}
    wanted = {}
    for one in windows:
        inside = [min(max(start, 0), one.rows) for start in frames[one.dim].starts]
        ends = [min(max(start + frames[one.dim].length, 0), one.rows) for start in frames[one.dim].starts]
        wanted[one.dim] = one.factor, one.rows, list(zip(inside, ends, strict=True))
    value, present = exchanged(local, value, wanted)
    for one in windows:
        starts, length = frames[one.dim].starts, frames[one.dim].length
        begins = [start - have for start, (have, _) in zip(starts, present[one.dim], strict=True)]
        stops = [stop - start for start, stop in present[one.dim]]
        if any(begins) or len(set(stops)) > 1 or not 0 <= stops[0] - length <= one.spare:
            position = local.position(one.factor)
            value = local.call("local.framed", value, one.dim, position, begins, stops, length, fill)
    return value


def zeros_behind(local: Local, value: Ref, windows: Sequence[PictureWindows]) -> Ref:
    """Places of `value` behind the last one set to zero, where they may be infinite: windows outside of the picture."""
    for one in windows:
        slices, block = local.slices(one.factor), one.block(local.slices(one.factor))
        if block * slices > one.places:
            stops = [min(block, one.places - index * block) for index in range(slices)]
            position = local.position(one.factor)
            value = local.call("local.framed", value, one.dim, position, [0] * slices, stops, block, 0.0)
    return value


def each(value: Any, count: int) -> list[int]:
    """One number per dim; one for all may stand alone."""
    numbers = [value] if isinstance(value, int) else list(value)
    return numbers * count if len(numbers) == 1 else numbers


def factors_of(dims: Sequence[PictureDim]) -> Mapping[str, int]:
    """Factor -> what its slice count must divide for equal slices."""
    return {one.factor: one.size for one in dims}
