"""Sliced dims of pictures: the rows that each slice of windows' places needs, fetched from other slices (halos).

Rows and places are cut into equal blocks. The places of a block need the rows from the first one of their first window
to the last one of their last window: fewer than the block's own where windows are far apart, those of several
neighbours where windows are large. Every slice gets as many, those beyond the picture's ends filled up.
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
    """`length` rows of `x` from row `begins[position]` on, with `fill` for what lies before row 0 or from row
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
class Windows:
    """The windows over one dim of a picture.

    Attributes:
        factor: of rows and places.
        dim: of the operand, from the front.
        rows: of the picture.
        places: of windows.
        extent: Rows from a window's first to its last: dilation * (kernel - 1) + 1.
        stride: Rows between windows.
        padding: Rows before the first one that the first window begins.
        transposed: Whether rows are spread over windows of places.
    """

    factor: str
    dim: int
    rows: int
    places: int
    extent: int
    stride: int
    padding: int
    transposed: bool = False

    @property
    def size(self) -> int:
        """What a slice count must divide."""
        return math.gcd(self.rows, self.places)

    def frames(self, slices: int) -> Frames:
        """The rows that each slice of places needs."""
        block = -(-self.places // slices)
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
        block = -(-self.places // slices)
        starts = self.frames(slices).starts
        return tuple(index * block + self.padding - start * self.stride for index, start in enumerate(starts))


def fetched(local: Local, value: Ref, windows: Sequence[Windows], fill: float) -> Ref:
    """The rows of the first operand that the rank's places need, along all dims of `windows`."""
    plans: dict[int, tuple[Frames, list[int], list[int], int]] = {}
    far: dict[int, tuple[str, Sequence[Interval]]] = {}
    for one in windows:
        slices = local.slices(one.factor)
        frames, own = one.frames(slices), -(-one.rows // slices)
        wanted = [
            (min(max(start, 0), one.rows), min(max(start + frames.length, 0), one.rows)) for start in frames.starts
        ]
        present = [(min(index * own, one.rows), min(index * own + own, one.rows)) for index in range(slices)]
        if any(start < stop and (start < a or stop > b) for (start, stop), (a, b) in zip(wanted, present, strict=True)):
            far[one.dim], present = (one.factor, wanted), wanted
            own = max(stop - start for start, stop in wanted)
        begins = [start - a for start, (a, _) in zip(frames.starts, present, strict=True)]
        plans[one.dim] = frames, begins, [b - a for a, b in present], own
    if far:
        value = local.windows_over(value, far)
    for one in windows:
        frames, begins, stops, own = plans[one.dim]
        spare = own - frames.length  # rows behind the last window that are fewer than a stride make no more windows
        if any(begins) or set(stops) != {own} or not 0 <= spare < (1 if one.transposed else one.stride):
            position = local.position(one.factor)
            value = local.call("local.framed", value, one.dim, position, begins, stops, frames.length, fill)
    return value


def each(value: Any, count: int) -> list[int]:
    """One number per dim; one for all may stand alone."""
    numbers = [value] if isinstance(value, int) else list(value)
    return numbers * count if len(numbers) == 1 else numbers


def factors_of(windows: Sequence[Windows]) -> Mapping[str, int]:
    """Factor -> what its slice count must divide."""
    return {one.factor: one.size for one in windows}
