"""Interpolation and padding: each place of the result is a row of the operand, a constant, or a mean of some rows.

Which rows is read off the operator itself, applied to the row numbers 0, 1, 2, ...: nearest, reflected and replicated
rows are what it makes of them, and linear interpolation makes of them the point between two rows. So every size, scale
and convention about corners is torch's own. Of cubic and antialiased interpolation, which take more rows, the weights
are what the operator makes of combs: pictures of ones at every n-th row, n being the most rows that a place takes. A
slice of the places fetches the rows that they are made of (see `halos`). Circular padding keeps the dims that it
changes replicated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from strategies.core.graph import Operator, Ref, TensorSpec, wide
from strategies.rules.halos import Interval, PictureDim, PictureWindows, exchanged, factors_of, fetched
from strategies.rules.registry import arguments, local_function, rule
from strategies.rules.sharding import Local, Sharding, numbered, sharding

LINEAR = {"upsample_linear1d": 1, "upsample_bilinear2d": 2, "upsample_trilinear3d": 3}
NEAREST = {f"{kind}{n}d": n for kind in ("upsample_nearest", "_upsample_nearest_exact") for n in (1, 2, 3)}
"""Operators -> the number of dims that they interpolate."""
ANTIALIASED = ("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
"""torch 2.13 gives them the weights of the first row for all rows where the result is one place wide."""
SMOOTH = ("upsample_bicubic2d", *ANTIALIASED)
"""Operators whose places are means of several rows, dim by dim."""
UNITS = 256
"""Unit vectors that are interpolated at once."""


def points(operator: str, given: Sequence[Any], rows: int, like: torch.dtype, device: torch.device | None) -> Tensor:
    """The row that each place is, or the point between two rows, for pictures of dtype `like`: [places], what
    `operator` makes in one dimension of the row numbers."""
    double = operator in LINEAR or like == torch.float64
    numbers = torch.arange(rows, dtype=torch.float64 if double else torch.float32, device=device)
    found: Tensor = getattr(torch.ops.aten, operator).default(numbers.view(1, 1, rows), *given)
    return found.view(-1)


@lru_cache(maxsize=2**10)
def _points(operator: str, given: tuple[Any, ...], rows: int, dtype: str) -> list[float]:
    return points(operator, given, rows, getattr(torch, dtype), None).tolist()


@local_function
def sampled(
    x: Tensor, dim: int, position: int, begins: Sequence[int], block: int, rows: int, operator: str, *given: Any
) -> Tensor:
    """Block number `position` of the places along `dim` that `operator` makes of a picture, of which `x` has the rows
    from `begins[position]` on."""
    every = points(operator, given, rows, x.dtype, x.device)
    places = torch.arange(block, device=x.device) + position * block
    point = every[places.clamp(max=every.shape[0] - 1)] - begins[position]
    low, last = point.floor(), x.shape[dim] - 1
    below = x.index_select(dim, low.long().clamp(0, last))
    if operator not in LINEAR:
        return below
    above = x.index_select(dim, (low.long() + 1).clamp(0, last))
    return torch.lerp(below, above, (point - low).to(x.dtype).view(-1, *(1,) * (x.dim() - 1 - dim)))


@lru_cache(maxsize=2**8)
def taps(operator: str, given: tuple[Any, ...], rows: int, dtype: torch.dtype) -> tuple[list[int], int]:
    """The first row that each place takes [places], and how many rows a place takes at most: where `operator` makes
    something of unit vectors [1, rows, rows, 2]."""
    every = []
    for start in range(0, rows, UNITS):
        units = torch.eye(rows, dtype=dtype)[start : start + UNITS].view(1, -1, rows, 1).expand(-1, -1, -1, 2)
        every.append(getattr(torch.ops.aten, operator).default(units.contiguous(), *given)[0, :, :, 0] != 0)
    used = torch.cat(every).int()  # [rows, places]
    firsts = used.argmax(0)
    count = int((rows - used.flip(0).argmax(0) - firsts).max())
    return firsts.clamp(max=rows - count).tolist(), count


def means(
    operator: str, given: Sequence[Any], rows: int, count: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The rows that each place takes and their weights, [count, places] each: a place takes one row of each of `count`
    combs, and the comb times the row numbers says which."""
    comb = torch.eye(count, dtype=dtype, device=device).repeat(1, -(-rows // count))[:, :rows]
    both = torch.stack((comb, comb * torch.arange(rows, dtype=dtype, device=device)))
    pictures = both.view(1, 2 * count, rows, 1).expand(-1, -1, -1, 2).contiguous()
    made = getattr(torch.ops.aten, operator).default(pictures, *given)[0, :, :, 0]
    weights, numbers = made.unflatten(0, (2, count)).unbind(0)
    return torch.where(weights != 0, numbers / weights, 0).round().long(), weights


@local_function
def weighed(
    x: Tensor,
    dim: int,
    position: int,
    begins: Sequence[int],
    block: int,
    rows: int,
    count: int,
    operator: str,
    *given: Any,
) -> Tensor:
    """`sampled`, for places that are means of `count` rows at most."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    numbers, weights = means(operator, given, rows, count, dtype, x.device)
    places = (torch.arange(block, device=x.device) + position * block).clamp(max=numbers.shape[1] - 1)
    there = (numbers[:, places] - begins[position]).clamp(0, x.shape[dim] - 1)
    wider, shape = x.to(dtype), (-1, *(1,) * (x.dim() - 1 - dim))
    parts = zip(there.unbind(0), weights[:, places].unbind(0), strict=True)
    total = sum(wider.index_select(dim, row) * weight.view(shape) for row, weight in parts)
    assert isinstance(total, Tensor)
    return total.to(x.dtype)


@dataclass(frozen=True)
class Samples(PictureDim):
    """Places along one dim of a picture that are rows, or points between two rows.

    Attributes:
        operator: in one dimension.
        given: its arguments behind the picture.
        dtype: of the picture.
    """

    operator: str
    given: tuple[Any, ...]
    dtype: str

    @property
    def points(self) -> list[float]:
        return _points(self.operator, self.given, self.rows, self.dtype)

    @property
    def same(self) -> bool:
        """Whether the places are the rows."""
        return self.points == list(range(self.rows))

    @property
    def certain(self) -> bool:
        """Whether single and double precision find the same rows: else torch's own kernels, and its forward and
        backward, differ."""
        single, double = (_points(self.operator, self.given, self.rows, dtype) for dtype in ("float32", "float64"))
        return single == double

    def intervals(self, slices: int) -> list[Interval]:
        """The rows that each slice of places is made of."""
        block = self.block(slices)
        every = self.points
        parts = [every[index * block : index * block + block] for index in range(slices)]
        return [(math.floor(min(part)), math.ceil(max(part)) + 1) for part in parts]

    @property
    def program(self) -> tuple[Any, ...]:
        """The local function that computes a slice, and its arguments behind the number of rows."""
        return "local.sampled", self.operator, *self.given


@dataclass(frozen=True)
class Means(Samples):
    """Places along one dim of a picture that are means of several rows each."""

    @property
    def _taps(self) -> tuple[list[int], int]:
        return taps(self.operator, self.given, self.rows, getattr(torch, wide(self.dtype)))

    @property
    def same(self) -> bool:
        return self._taps == (list(range(self.rows)), 1)

    def intervals(self, slices: int) -> list[Interval]:
        block, (firsts, count) = self.block(slices), self._taps
        parts = [firsts[index * block : index * block + block] for index in range(slices)]
        return [(min(part), max(part) + count) for part in parts]

    @property
    def program(self) -> tuple[Any, ...]:
        return "local.weighed", self._taps[1], self.operator, *self.given


def taken(local: Local, value: Ref, samples: Sequence[Samples]) -> Ref:
    """The rank's places along the dims of `samples`, from its slice of the first operand."""
    moved = [one for one in samples if not one.same]
    wanted = {one.dim: (one.factor, one.rows, one.intervals(local.slices(one.factor))) for one in moved}
    value, present = exchanged(local, value, wanted)
    for one in moved:
        begins, block = [start for start, _ in present[one.dim]], one.block(local.slices(one.factor))
        numbers = one.dim, local.position(one.factor), begins, block, one.rows
        target, *rest = one.program
        value = local.call(target, value, *numbers, *rest)
    return value


@rule(*LINEAR, *NEAREST, *SMOOTH)
def interpolation(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x [n, c, ...] -> [n, c, ...] with other rows."""
    given, op, (x,) = arguments(operator), operator.op, specs
    rows, places = x.shape[2:], operator.results[0].shape[2:]
    corners = (given["align_corners"],) if "align_corners" in given else ()
    scales = given.get("scale_factors") or [given[name] for name in given if name.startswith("scales")]
    scales = scales or [None] * len(rows)
    alone = "upsample_linear1d" if corners else f"{op[:-2]}1d"
    numbers = enumerate(zip(rows, places, scales, strict=True))
    kind, like, rest = (Means, op, ((2,), (None,))) if op in SMOOTH else (Samples, alone, ((), ()))
    every = [
        kind(f"w{i}", 2 + i, size, n, like, ((n, *rest[0]), *corners, scale, *rest[1]), x.dtype)
        for i, (size, n, scale) in numbers
    ]
    exact = x.floating and not (op in ANTIALIASED and places[-1] == 1)  # integers would be rounded
    samples = [one for one in every if (exact if corners else one.certain)]
    dims = ("n", "c", *(one.factor if one in samples else None for one in every))
    program = partial(_interpolated, every=every, corners=corners, scales=scales) if samples else None
    return sharding(
        operator, specs, [dims], [dims], sizes=factors_of(samples), padded=filter(None, dims), local=program
    )


def _interpolated(
    operator: Operator, local: Local, *, every: Sequence[Samples], corners: Sequence[bool], scales: Sequence[Any]
) -> Ref:
    """Rows along sliced dims first, then the operator along the others, which leaves equal sizes as they are. Means are
    taken along all dims: a slice may be one place wide."""
    sliced = [one for one in every if local.slices(one.factor) > 1]
    if not sliced:
        return local.itself()
    if operator.op in SMOOTH:
        sliced = list(every)
    value = taken(local, next(iter(local.arguments.values())), sliced)
    if all(one.same for one in every if one not in sliced):
        return local.call("aten.alias.default", value) if all(one.same for one in sliced) else value
    sizes = [one.block(local.slices(one.factor)) for one in every]
    rest = [None if one in sliced else scale for one, scale in zip(every, scales, strict=True)]
    return local.call(f"aten.{operator.op}.default", value, sizes, *corners, *rest)


@rule("constant_pad_nd", "pad")
def pad(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """pad(x, (last dim's left, right, the dim before's left, ...))."""
    given, (x,) = arguments(operator), specs
    rank, widths, mode = len(x.shape), given["pad"], given.get("mode", "constant")
    sides = {rank - 1 - i // 2: (widths[i], widths[i + 1]) for i in range(0, len(widths), 2)}
    sides = {dim: both for dim, both in sides.items() if any(both)}
    fill = given["value"] or 0
    changed: list[PictureDim] = []
    for dim, (left, right) in sides.items():
        rows, places = x.shape[dim], operator.results[0].shape[dim]
        if mode == "constant":
            changed.append(PictureWindows(f"d{dim}", dim, rows, places, 1, 1, left))
        elif mode in ("reflect", "replicate"):
            changed.append(Samples(f"d{dim}", dim, rows, places, "pad", ((left, right), mode), x.dtype))
    dims = numbered(rank, () if changed else sides)
    endless = {one.factor for one in changed if mode == "constant" and not math.isfinite(fill)}
    return sharding(
        operator,
        specs,
        [dims],
        [dims],
        sizes=factors_of(changed),
        padded=[factor for factor in dims if factor not in endless],
        local=partial(_padded, changed=changed, fill=fill) if changed else None,
    )


def _padded(operator: Operator, local: Local, *, changed: Sequence[Any], fill: float) -> Ref:
    """Sliced dims first, then the operator along the others."""
    sliced = [one for one in changed if local.slices(one.factor) > 1]
    if not sliced:
        return local.itself()
    name, given = next(iter(local.arguments)), local.arguments
    constant = isinstance(sliced[0], PictureWindows)
    value = fetched(local, given[name], sliced, fill) if constant else taken(local, given[name], sliced)
    done = {len(operator.results[0].shape) - 1 - one.dim for one in sliced}
    widths = [0 if i // 2 in done else width for i, width in enumerate(given["pad"])]
    if any(widths):
        return local.itself(**{name: value, "pad": widths})
    return local.call("aten.alias.default", value) if value == given[name] else value
