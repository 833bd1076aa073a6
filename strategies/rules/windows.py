"""Operators over windows of images.

Convolutions have the factors n (batch), o (channels out) and i (channels in, summed over), or g (groups of channels);
as in products, the first slice of a summed factor adds the bias. In pooling and resampling batch and channels pass. The
image's own dims and the kernel stay replicated, unless the windows of a pooling tile the image (they do not overlap,
nothing is padded, and the last stride is full): then slices hold complete windows. Also what moves elements between
channels and windows: unfold and fold, pixel and channel shuffles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.notation import notation
from strategies.rules.registry import arguments, rule
from strategies.rules.sharding import Dims, Local, Sharding, numbered, sharding
from strategies.rules.table import line


def _convolution(operator: Operator, local: Local) -> Ref:
    given, changes = local.arguments, {}
    if local.slices("g") > 1:
        changes["groups"] = given["groups"] // local.slices("g")
    if local.slices("i") > 1 and given["bias"] is not None:
        changes["bias"] = local.call("local.first_slice_only", given["bias"], local.position("i"))
    return local.itself(**changes)


@rule("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution")
def convolution(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x [(n,) i, ...], weight [o, i, ...] (transposed: [i, o, ...]), bias [o] -> [(n,) o, ...]. In groups, dim 0 of the
    weight and both channel dims have factor g."""
    given = arguments(operator)
    transposed = operator.op.startswith("conv_transpose") or given.get("transposed", False)
    weight, spatial = specs[1].shape, (None,) * (len(specs[1].shape) - 2)
    lead = ("n",) if len(specs[0].shape) == len(weight) else ()
    into, out = ("g", "g") if given["groups"] > 1 else ("i", "o")
    kernel: Dims = ("g", None) if given["groups"] > 1 else ("i", "o") if transposed else ("o", "i")
    bias: list[Dims] = [(out,) for _ in specs[2:]]
    moved = specs[0] if transposed else operator.results[0]  # every element of it meets one filter
    return sharding(
        operator,
        specs,
        [(*lead, into, *spatial), (*kernel, *spatial), *bias],
        [(*lead, out, *spatial)],
        sums=() if given["groups"] > 1 else ["i"],
        local=_convolution,
        flops=2.0 * moved.elements * specs[1].elements / weight[0],
        sizes={"g": given["groups"]},
        padded=("n", "o"),
    )


@rule("conv_tbc")
def time_first(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x [t, n, i], weight [k, i, o], bias [o] -> [t, n, o]."""
    flops = 2.0 * operator.results[0].elements * specs[1].elements / specs[1].shape[2]
    line = "!t n i, !k i o, +o -> !t n o"
    return notation(line, operator, specs, padded=True, local=_convolution, flops=flops)


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
    spatial = _tiled(operator, specs[0].shape[len(lead) :])
    operands: list[Dims] = [(*lead, *spatial) for _ in specs]
    if operator.op.startswith("fractional"):
        operands[1] = (*(None,) * (2 - len(lead)), *lead, None)
    padded = lead if len(specs) == 1 else ()  # torch refuses indices and samples that padding may hold
    places = operator.results[0].shape[len(lead) :]  # a slice is cut between windows, so their number must divide
    sizes = {factor: size for factor, size in zip(spatial, places, strict=True) if factor is not None}
    return sharding(operator, specs, operands, [(*lead, *spatial)] * len(operator.results), sizes=sizes, padded=padded)


def _tiled(operator: Operator, shape: Sequence[int]) -> Dims:
    """The image dims that windows tile. Operators that return indices have none, because indices are global to the
    image, and nor do adaptive windows, which depend on its size."""
    if operator.op not in TILING:
        return (None,) * len(shape)
    given = arguments(operator)

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
