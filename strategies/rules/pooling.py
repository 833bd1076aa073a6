"""Operators over windows of an image: batch and channels pass; its own dims stay replicated, unless windows tile
them (they do not overlap, nothing is padded, and the last stride is full): then slices hold complete windows.

Also what moves elements between channels and windows: unfold and fold, pixel and channel shuffles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strategies.core.graph import Operator, TensorSpec
from strategies.rules.arguments import named
from strategies.rules.registry import rule
from strategies.rules.sharding import Dims, Sharding, sharding

WINDOWS = """
max_pool{n}d max_pool{n}d_with_indices avg_pool{n}d adaptive_avg_pool{n}d adaptive_max_pool{n}d max_unpool{n}d
fractional_max_pool{n}d
"""
SPATIAL = {name: n for n in (1, 2, 3) for name in WINDOWS.format(n=n).split()}
"""Operators -> the number of spatial dims at the end of x. Of the unpoolings and the fractional ones there are none in
one dimension."""
del SPATIAL["max_unpool1d"], SPATIAL["fractional_max_pool1d"]
TILING = frozenset(f"{kind}_pool{n}d" for n in (1, 2, 3) for kind in ("max", "avg"))
"""Operators whose windows have fixed strides."""


@rule(*SPATIAL)
def windows(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x [(n,) c, ...] -> [(n,) c, ...], and perhaps indices inside each image. Further operands: the indices for
    unpooling, and random samples [n, c, places] for fractional pooling."""
    lead = tuple(f"d{i}" for i in range(len(specs[0].shape) - SPATIAL[operator.op]))
    spatial = _tiled(operator, specs[0].shape[len(lead) :])
    operands: list[Dims] = [(*lead, *spatial) for _ in specs]
    if operator.op.startswith("fractional"):
        operands[1] = (*(None,) * (2 - len(lead)), *lead, None)
    results: list[Dims] = [(*lead, *spatial) for _ in operator.results]
    padded = lead if len(specs) == 1 else ()  # torch refuses indices and samples that padding may hold
    places = operator.results[0].shape[len(lead) :]  # a slice is cut between windows, so their number must divide
    sizes = {factor: size for factor, size in zip(spatial, places, strict=True) if factor is not None}
    return sharding(operands, results, specs, operator.results, sizes=sizes, padded=padded)


def _tiled(operator: Operator, shape: Sequence[int]) -> Dims:
    """The image dims that windows tile. Operators that return indices have none, because indices are global to the
    image, and nor do adaptive windows, which depend on its size."""
    if operator.op not in TILING:
        return (None,) * len(shape)
    given = named(operator.target, operator.args, operator.keywords)

    def each(value: Any) -> Sequence[int]:
        """One number per dim; one for all may stand alone."""
        numbers = [value] if isinstance(value, int) else list(value)
        return numbers * len(shape) if len(numbers) == 1 else numbers

    kernel, padding, dilation = each(given["kernel_size"]), each(given["padding"]), each(given.get("dilation", 1))
    stride = each(given["stride"]) if given["stride"] else kernel  # not given, or an empty list
    return tuple(
        f"w{i}" if (k - 1) * d < s and p == 0 and size % s == 0 else None
        for i, (size, k, s, p, d) in enumerate(zip(shape, kernel, stride, padding, dilation, strict=True))
    )


@rule("im2col", "col2im")
def columns(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """[(n,) c, h, w] and its windows as columns [(n,) c * window, places]: windows of a channel are neighbours."""
    both = specs[0], operator.results[0]
    lead = ("n",) if len(both[0].shape) + len(both[1].shape) == 7 else ()
    operand, result = [(*lead, "c", *(None,) * (len(spec.shape) - len(lead) - 1)) for spec in both]
    sizes = {"c": both[operator.op == "col2im"].shape[len(lead)]}
    return sharding([operand], [result], specs, operator.results, sizes=sizes, padded=lead)


@rule("pixel_shuffle", "pixel_unshuffle")
def pixels(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """[..., c * r * r, h, w] <-> [..., c, h * r, w * r]: slices hold complete squares of pixels and channels."""
    few, many = sorted((specs[0].shape, operator.results[0].shape), key=lambda shape: shape[-3])
    lead = tuple(f"d{i}" for i in range(len(few) - 3))
    dims: Dims = (*lead, "c", "h", "w")
    sizes = {"c": few[-3], "h": many[-2], "w": many[-1]}
    return sharding([dims], [dims], specs, operator.results, sizes=sizes, padded=lead)
