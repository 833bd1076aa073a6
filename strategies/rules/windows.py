"""Operators over windows of images.

Convolutions have the factors n (batch), o (channels out) and i (channels in, summed over), or g (groups of channels);
as in products, the first slice of a summed factor adds the bias. In pooling and sampling batch and channels pass. The
image's own dims have the factors s0, s1, ... in convolution and w0, w1, ... in pooling: a slice fetches the rows of its
neighbours that its windows need (see `halos`), and computes without padding. Adaptive pooling has such windows where
its places divide the rows, and one that averages a complete dim sums over it; otherwise its dims stay replicated, as
kernels do, and as in unpooling and fractional pooling. Also what moves elements between channels and windows: unfold
and fold, pixel and channel shuffles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.halos import Frames, PictureWindows, each, factors_of, fetched, zeros_behind
from strategies.rules.notation import notation
from strategies.rules.registry import arguments, local_function, rule
from strategies.rules.sharding import Dims, Local, Sharding, numbered, sharding
from strategies.rules.table import line


def _channels(local: Local) -> dict[str, Any]:
    """The arguments that change where channels are sliced."""
    given, changes = local.arguments, dict[str, Any]()
    if local.slices("g") > 1:
        changes["groups"] = given["groups"] // local.slices("g")
    if local.slices("i") > 1 and given["bias"] is not None:
        changes["bias"] = local.call("local.first_slice_only", given["bias"], local.position("i"))
    return changes


def _time_first(operator: Operator, local: Local) -> Ref:
    return local.itself(**_channels(local))


def _convolution(operator: Operator, local: Local, *, windows: Sequence[PictureWindows]) -> Ref:
    sliced = [one for one in windows if local.slices(one.factor) > 1]
    if not sliced:
        return local.itself(**_channels(local))
    given = local.arguments
    if isinstance(given["padding"], str):  # perhaps one more row at the end than at the beginning: all are framed
        sliced = [one for one in windows if one in sliced or one.padding or one.places > one.rows - one.extent + 1]
    first = windows[0].dim
    inside = {one.dim - first for one in sliced}
    paddings = [one.padding for one in windows] if isinstance(given["padding"], str) else given["padding"]
    padding = [0 if dim in inside else size for dim, size in enumerate(each(paddings, len(windows)))]
    changes = {"padding": padding, **_channels(local)}
    if "output_padding" in given:
        extra = enumerate(each(given["output_padding"], len(windows)))
        changes["output_padding"] = [0 if dim in inside else size for dim, size in extra]
    changes["input"] = fetched(local, given["input"], sliced, 0.0)
    if isinstance(given["padding"], str):
        names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
        return local.call(f"aten.{operator.op}.default", *({**given, **changes}[name] for name in names))
    result = local.itself(**changes)
    for one in sliced if sliced[0].transposed else ():
        slices = local.slices(one.factor)
        block, offsets = one.block(slices), one.offsets(slices)
        ends = [offset + block for offset in offsets]
        result = local.call("local.framed", result, one.dim, local.position(one.factor), offsets, ends, block, 0.0)
    return result


def _filters(
    operator: Operator, picture: Sequence[int], kernel: Sequence[int], lead: int, transposed: bool
) -> list[PictureWindows]:
    """The windows of a convolution of a picture of spatial shape `picture`, whose dims begin at `lead`."""
    given, count = arguments(operator), len(picture)
    stride, dilation = each(given["stride"], count), each(given["dilation"], count)
    extents = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    if isinstance(given["padding"], str):
        padding = [(extent - 1) // 2 if given["padding"] == "same" else 0 for extent in extents]
    else:
        padding = each(given["padding"], count)
    places = operator.results[0].shape[lead:]
    numbers = zip(picture, places, extents, stride, padding, strict=True)
    return [
        PictureWindows(f"s{i}", lead + i, rows, count, extent, step, before, transposed, 0 if transposed else step - 1)
        for i, (rows, count, extent, step, before) in enumerate(numbers)
    ]


@rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution")
def convolution(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x [(n,) i, ...], weight [o, i, ...] (transposed: [i, o, ...]), bias [o] -> [(n,) o, ...]. In groups, dim 0 of the
    weight and both channel dims have factor g."""
    given = arguments(operator)
    transposed = operator.op.startswith("conv_transpose") or given.get("transposed", False)
    weight, unnamed = specs[1].shape, (None,) * (len(specs[1].shape) - 2)
    lead = ("n",) if len(specs[0].shape) == len(weight) else ()
    windows = _filters(operator, specs[0].shape[len(lead) + 1 :], weight[2:], len(lead) + 1, transposed)
    spatial = tuple(one.factor for one in windows)
    into, out = ("g", "g") if given["groups"] > 1 else ("i", "o")
    kernel: Dims = ("g", None) if given["groups"] > 1 else ("i", "o") if transposed else ("o", "i")
    bias: list[Dims] = [(out,) for _ in specs[2:]]
    moved = specs[0] if transposed else operator.results[0]  # every element of it meets one filter
    return sharding(
        operator,
        specs,
        [(*lead, into, *spatial), (*kernel, *unnamed), *bias],
        [(*lead, out, *spatial)],
        sums=() if given["groups"] > 1 else ["i"],
        local=partial(_convolution, windows=windows),
        flops=2.0 * moved.elements * specs[1].elements / weight[0],
        sizes={"g": given["groups"], **factors_of(windows)},
        padded=("n", "o", *spatial),
    )


@rule("conv_tbc")
def time_first(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x [t, n, i], weight [k, i, o], bias [o] -> [t, n, o]."""
    flops = 2.0 * operator.results[0].elements * specs[1].elements / specs[1].shape[2]
    line = "!t n i, !k i o, +o -> !t n o"
    return notation(line, operator, specs, padded=True, local=_time_first, flops=flops)


WINDOWS = """
max_pool{n}d max_pool{n}d_with_indices avg_pool{n}d adaptive_avg_pool{n}d adaptive_max_pool{n}d max_unpool{n}d
fractional_max_pool{n}d
"""
SPATIAL = {name: n for n in (1, 2, 3) for name in WINDOWS.format(n=n).split()}
"""Operators -> the number of spatial dims at the end of x. Of the unpoolings and the fractional ones there are none in
one dimension."""
del SPATIAL["max_unpool1d"], SPATIAL["fractional_max_pool1d"]
POINTED = frozenset(name for name in SPATIAL if name.endswith("with_indices") or name.startswith("adaptive_max"))
"""Operators that return with each maximum its index in the image."""


@rule(*SPATIAL)
def windows(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x [(n,) c, ...] -> [(n,) c, ...], and perhaps indices inside each image. Further operands: the indices for
    unpooling, and random samples [n, c, places] for fractional pooling."""
    count = SPATIAL[operator.op]
    lead = numbered(len(specs[0].shape) - count)
    covers = _covers(operator, specs[0].shape, len(lead))
    spatial = tuple(None if one is None else one.factor for one in covers)
    sliced = [one for one in covers if one is not None]
    summed = [one.factor for one in sliced if one.places == 1] if operator.op.startswith("adaptive_avg") else []
    kept = tuple(None if factor in summed else factor for factor in spatial)
    operands: list[Dims] = [(*lead, *spatial) for _ in specs]
    if operator.op.startswith("fractional"):
        operands[1] = (*(None,) * (2 - len(lead)), *lead, None)
    # Torch refuses indices and samples that padding may hold.
    padded = (*lead, *filter(None, kept)) if len(specs) == 1 else ()
    return sharding(
        operator,
        specs,
        operands,
        [(*lead, *kept)] * len(operator.results),
        sums=summed,
        sizes={one.factor: one.rows if one.factor in summed else one.size for one in sliced},
        padded=padded,
        local=partial(_pooling, covers=sliced, count=count) if sliced else None,
    )


def _pooling(
    operator: Operator, local: Local, *, covers: Sequence[PictureWindows], count: int
) -> Ref | tuple[Ref, ...]:
    """The operator on the rows of its windows; of a mean over all rows, each slice's part of it."""
    sliced = [one for one in covers if local.slices(one.factor) > 1]
    if not sliced:
        return local.itself()
    given, places = local.arguments, operator.results[0].shape[-count:]
    name = next(iter(given))
    tiled = [one for one in sliced if one.places > 1]
    lead = len(operator.results[0].shape) - count
    inside = {one.dim - lead: one for one in sliced}
    fill = _lowest(operator.results[0].dtype) if "max" in operator.op else 0.0
    changes: dict[str, Any] = {name: fetched(local, given[name], tiled, fill)}
    if "output_size" in given:
        blocks = enumerate(places)
        size = [inside[dim].block(local.slices(inside[dim].factor)) if dim in inside else n for dim, n in blocks]
        changes["output_size"] = size
    else:
        padding = enumerate(each(given["padding"], count))
        changes["padding"] = [0 if dim in inside else size for dim, size in padding]
    result = local.itself(**changes)
    if operator.op in POINTED and tiled:
        return _pointed(operator, local, result, inside, count)
    if "max" in operator.op:
        return zeros_behind(local, result, tiled)
    for one in tiled if "output_size" not in given and given.get("divisor_override") is None else ():
        included = given["count_include_pad"]
        if _partly(one, included):
            first = local.position(one.factor, one.block(local.slices(one.factor)))
            numbers = one.extent, one.stride, one.padding, one.rows, included
            result = local.call("local.mean_of_inside", result, one.dim, first, *numbers)
    parts = local.slices(*(one.factor for one in sliced if one.places == 1))
    return result if parts == 1 else local.call("aten.div.Tensor", result, parts)


def _lowest(dtype: str) -> float:
    kind = getattr(torch, dtype)
    return -math.inf if kind.is_floating_point else torch.iinfo(kind).min


def _pointed(
    operator: Operator, local: Local, pooled: Ref, inside: Mapping[int, PictureWindows], count: int
) -> tuple[Ref, Ref]:
    """The maxima, and their indices in the complete image from those in the rows that the slice has."""
    shape, have = local.operand_shape()[-count:], list[int]()
    image, starts, positions = list[int](), list[Sequence[int]](), list[Any]()
    for dim, size in enumerate(shape):
        one = inside.get(dim)
        frames = one.frames(local.slices(one.factor)) if one else Frames((0,), size)
        have.append(frames.length)
        image.append(one.rows if one else size)
        starts.append(frames.starts)
        positions.append(local.position(one.factor) if one else 0)
    indices = local.call("local.indices_in_image", Ref(pooled.id, 1), have, image, starts, positions)
    return zeros_behind(local, Ref(pooled.id, 0), list(inside.values())), indices


@local_function
def indices_in_image(
    indices: Tensor,
    have: Sequence[int],
    image: Sequence[int],
    starts: Sequence[Sequence[int]],
    positions: Sequence[int],
) -> Tensor:
    """Flat indices in a part of an image of shape `have`, as those in the image of shape `image`: along dim d the part
    begins at row `starts[d][positions[d]]`."""
    result, size = torch.zeros_like(indices), 1
    for dim in reversed(range(len(have))):
        row = indices % have[dim] + starts[dim][positions[dim]]
        indices = indices // have[dim]
        result = result + row.clamp(0, image[dim] - 1) * size
        size *= image[dim]
    return result


@local_function
def mean_of_inside(
    x: Tensor, dim: int, first: int, extent: int, stride: int, padding: int, rows: int, included: bool
) -> Tensor:
    """Means over windows of `extent` rows along `dim`, whose first one is window `first` of the picture, as means over
    those of their rows that count: without those beyond the padding (`included`), or beyond the picture."""
    start = (torch.arange(x.shape[dim], device=x.device) + first) * stride - padding
    low, high = (start, rows + padding) if included else (start.clamp(min=0), rows)
    counts = ((start + extent).clamp(max=high) - low).clamp(min=1)
    return x * (extent / counts.double()).to(x.dtype).view(-1, *(1,) * (x.dim() - 1 - dim))


def _covers(operator: Operator, shape: Sequence[int], lead: int) -> list[PictureWindows | None]:
    """The windows over each of the image's dims that may be sliced."""
    rows, places, kind = shape[lead:], operator.results[0].shape[lead:], operator.op
    if kind.startswith(("max_unpool", "fractional")):
        return [None] * len(rows)
    given = arguments(operator)
    if kind.startswith("adaptive"):
        means = "avg" in kind
        return [
            PictureWindows(f"w{i}", lead + i, size, count, size // count, size // count, 0)
            if size % count == 0 and (means or count > 1)
            else None
            for i, (size, count) in enumerate(zip(rows, places, strict=True))
        ]
    kernel, padding, dilation = (
        each(value, len(rows)) for value in (given["kernel_size"], given["padding"], given.get("dilation", 1))
    )
    stride = each(given["stride"], len(rows)) if given["stride"] else kernel  # not given, or an empty list
    numbers = zip(rows, places, kernel, stride, padding, dilation, strict=True)
    exact = given["ceil_mode"] or kind in POINTED  # no row more, which would be a place, or shift indices
    return [
        PictureWindows(f"w{i}", lead + i, size, n, d * (k - 1) + 1, s, p, spare=0 if exact else s - 1)
        for i, (size, n, k, s, p, d) in enumerate(numbers)
    ]


def _partly(one: PictureWindows, included: bool) -> bool:
    """Whether windows have rows that do not count."""
    over = (one.places - 1) * one.stride + one.extent > one.rows + 2 * one.padding  # ceil_mode
    return over or (one.padding > 0 and not included)


@rule("im2col", "col2im")
def columns(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """[(n,) c, h, w] and its windows as columns [(n,) c * window, places]: windows of a channel are neighbours."""
    both = specs[0], operator.results[0]
    lead = ("n",) if len(both[0].shape) + len(both[1].shape) == 7 else ()
    operand, result = [(*lead, "c", *(None,) * (len(spec.shape) - len(lead) - 1)) for spec in both]
    sizes = {"c": both[operator.op == "col2im"].shape[len(lead)]}
    return sharding(operator, specs, [operand], [result], sizes=sizes, padded=lead)


@rule("pixel_shuffle", "pixel_unshuffle")
def pixels(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """[..., c * r * r, h, w] <-> [..., c, h * r, w * r]: slices hold complete squares of pixels and channels."""
    few, many = sorted((specs[0].shape, operator.results[0].shape), key=lambda shape: shape[-3])
    lead = numbered(len(few) - 3)
    dims = (*lead, "c", "h", "w")
    sizes = {"c": few[-3], "h": many[-2], "w": many[-1]}
    return sharding(operator, specs, [dims], [dims], sizes=sizes, padded=lead)


@rule("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x [n, c, ...], places [n, *out, coordinates] -> [n, c, *out]: the places can be sliced, the image cannot."""
    out = tuple(f"o{i}" for i in range(len(specs[0].shape) - 2))
    picture: Dims = ("n", "c", *(None,) * len(out))
    return sharding(operator, specs, [picture, ("n", *out, None)], [("n", "c", *out)], padded=("c",))


def _affine_grid(operator: Operator, local: Local) -> Ref:
    """theta [n, ...], size of the image (n, c, ...) -> places [n, ..., coordinates]."""
    return local.itself(size=(local.operand_shape()[0], *operator.args[1][1:]))


line("n !... -> n !...", "affine_grid_generator", padded=True, local=_affine_grid)
