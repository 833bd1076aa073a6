"""Operators over windows of a picture: its dims stay whole, batch and channels pass.

Also what moves elements between channels and windows: unfold and fold, pixel and channel shuffles.
"""

from __future__ import annotations

from collections.abc import Sequence

from strategies.graph import Operator, TensorSpec
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


@rule(*SPATIAL)
def windows(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x [(n,) c, ...] -> [(n,) c, ...], and perhaps indices inside each picture. Further operands: the indices for
    unpooling, and random samples [n, c, places] for fractional pooling."""
    lead = tuple(f"d{i}" for i in range(len(specs[0].shape) - SPATIAL[operator.op]))
    whole = (None,) * SPATIAL[operator.op]
    operands: list[Dims] = [(*lead, *whole) for _ in specs]
    if operator.op.startswith("fractional"):
        operands[1] = (*(None,) * (2 - len(lead)), *lead, None)
    results: list[Dims] = [(*lead, *whole) for _ in operator.results]
    uneven = lead if len(specs) == 1 else ()  # torch refuses indices and samples that padding may hold
    return sharding(operands, results, specs, operator.results, uneven=uneven)


@rule("im2col", "col2im")
def columns(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """[(n,) c, h, w] and its windows as columns [(n,) c * window, places]: windows of a channel are neighbours."""
    both = specs[0], operator.results[0]
    lead = ("n",) if len(both[0].shape) + len(both[1].shape) == 7 else ()
    operand, result = [(*lead, "c", *(None,) * (len(spec.shape) - len(lead) - 1)) for spec in both]
    sizes = {"c": both[operator.op == "col2im"].shape[len(lead)]}
    return sharding([operand], [result], specs, operator.results, sizes=sizes, uneven=lead)


@rule("pixel_shuffle", "pixel_unshuffle")
def pixels(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """[..., c * r * r, h, w] <-> [..., c, h * r, w * r]: slices hold whole squares of pixels and whole channels."""
    few, many = sorted((specs[0].shape, operator.results[0].shape), key=lambda shape: shape[-3])
    lead = tuple(f"d{i}" for i in range(len(few) - 3))
    dims: Dims = (*lead, "c", "h", "w")
    sizes = {"c": few[-3], "h": many[-2], "w": many[-1]}
    return sharding([dims], [dims], specs, operator.results, sizes=sizes, uneven=lead)


@rule("channel_shuffle")
def channels(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x [n, c, ...] with its channels in another order: they stay whole."""
    dims: Dims = tuple(None if i == 1 else f"d{i}" for i in range(len(specs[0].shape)))
    names = [name for name in dims if name is not None]
    return sharding([dims], [dims], specs, operator.results, uneven=names)
