"""Operators over windows of images.

Convolutions have the factors n (batch), o (channels out) and i (channels in, summed over), or g (groups of channels);
as in products, the first slice of a summed factor adds the bias. In pooling and resampling batch and channels pass. The
image's own dims have the factors s0, s1, ... in convolution, and w0, w1, ... in maximum and average pooling with fixed
strides: a slice fetches the rows of its neighbours that its windows need (see `halos`), and computes without padding.
They stay replicated, as kernels do, in other pooling, which returns or takes places in the image or depends on its
size, and in averages that count only what lies in the image. Also what moves elements between channels and windows:
unfold and fold, pixel and channel shuffles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.halos import Windows, each, factors_of, fetched
from strategies.rules.notation import notation
from strategies.rules.registry import arguments, rule
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


def _convolution(operator: Operator, local: Local, *, windows: Sequence[Windows]) -> Ref:
    sliced = [one for one in windows if local.slices(one.factor) > 1]
    if not sliced:
        return local.itself(**_channels(local))
    given = local.arguments
    if isinstance(given["padding"], str):  # perhaps one more row at the end than at the beginning: all are framed
        sliced = [one for one in windows if one in sliced or one.padding or one.places > one.rows - one.extent + 1]
    first = windows[0].dim
    inside = {one.dim - first for one in sliced}
    whole = [one.padding for one in windows] if isinstance(given["padding"], str) else given["padding"]
    padding = [0 if dim in inside else size for dim, size in enumerate(each(whole, len(windows)))]
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
        block, offsets = -(-one.places // slices), one.offsets(slices)
        ends = [offset + block for offset in offsets]
        result = local.call("local.framed", result, one.dim, local.position(one.factor), offsets, ends, block, 0.0)
    return result


def _filters(
    operator: Operator, picture: Sequence[int], kernel: Sequence[int], lead: int, transposed: bool
) -> list[Windows]:
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
    return [Windows(f"s{i}", lead + i, *each_dim, transposed) for i, each_dim in enumerate(numbers)]


@rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution")
def convolution(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x [(n,) i, ...], weight [o, i, ...] (transposed: [i, o, ...]), bias [o] -> [(n,) o, ...]. In groups, dim 0 of the
    weight and both channel dims have factor g."""
    given = arguments(operator)
    transposed = operator.op.startswith("conv_transpose") or given.get("transposed", False)
    weight, whole = specs[1].shape, (None,) * (len(specs[1].shape) - 2)
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
        [(*lead, into, *spatial), (*kernel, *whole), *bias],
        [(*lead, out, *spatial)],
        sums=() if given["groups"] > 1 else ["i"],
        local=partial(_convolution, windows=windows),
        flops=2.0 * moved.elements * specs[1].elements / weight[0],
        sizes={"g": given["groups"], **factors_of(windows)},
        padded=("n", "o", *(one.factor for one in windows if one.rows == one.places)),
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
TILING = frozenset(f"{kind}_pool{n}d" for n in (1, 2, 3) for kind in ("max", "avg"))
"""Operators whose windows have fixed strides."""


@rule(*SPATIAL)
def windows(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x [(n,) c, ...] -> [(n,) c, ...], and perhaps indices inside each image. Further operands: the indices for
    unpooling, and random samples [n, c, places] for fractional pooling."""
    lead = numbered(len(specs[0].shape) - SPATIAL[operator.op])
    covers = _covers(operator, specs[0].shape, len(lead))
    spatial = tuple(None if one is None else one.factor for one in covers)
    operands: list[Dims] = [(*lead, *spatial) for _ in specs]
    if operator.op.startswith("fractional"):
        operands[1] = (*(None,) * (2 - len(lead)), *lead, None)
    padded = lead if len(specs) == 1 else ()  # torch refuses indices and samples that padding may hold
    sliced = [one for one in covers if one is not None]
    return sharding(
        operator,
        specs,
        operands,
        [(*lead, *spatial)] * len(operator.results),
        sizes=factors_of(sliced),
        padded=padded,
        local=partial(_pooling, covers=sliced, lead=len(lead)) if sliced else None,
    )


def _pooling(operator: Operator, local: Local, *, covers: Sequence[Windows], lead: int) -> Ref:
    sliced = [one for one in covers if local.slices(one.factor) > 1]
    fill = -math.inf if operator.op.startswith("max") else 0.0
    given, inside = local.arguments, {one.dim - lead for one in sliced}
    name = next(iter(given))
    value = fetched(local, given[name], sliced, fill)
    padding = each(given["padding"], SPATIAL[operator.op])
    cut = [0 if dim in inside else size for dim, size in enumerate(padding)]
    if cut == padding and value == given[name]:
        return local.itself()
    return local.itself(padding=cut, **{name: value})


def _covers(operator: Operator, shape: Sequence[int], lead: int) -> list[Windows | None]:
    """The windows over each of the image's dims that may be sliced. Operators that return indices have none, because
    indices are global to the image, and nor do adaptive windows, which depend on its size."""
    rows, places = shape[lead:], operator.results[0].shape[lead:]
    if operator.op not in TILING:
        return [None] * len(rows)
    given = arguments(operator)
    kernel, padding, dilation = (
        each(value, len(rows)) for value in (given["kernel_size"], given["padding"], given.get("dilation", 1))
    )
    stride = each(given["stride"], len(rows)) if given["stride"] else kernel  # not given, or an empty list
    found: list[Windows | None] = []
    numbers = zip(rows, places, kernel, stride, padding, dilation, strict=True)
    for i, (size, count, k, s, p, d) in enumerate(numbers):
        one = Windows(f"w{i}", lead + i, size, count, d * (k - 1) + 1, s, p)
        over = (count - 1) * s + one.extent > size + 2 * p  # ceil_mode: the last window leaves the padding
        partly = (p > 0 and not given.get("count_include_pad")) or over
        counted = operator.op.startswith("avg") and given.get("divisor_override") is None and partly
        found.append(None if counted else one)
    return found


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
