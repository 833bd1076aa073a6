"""Convolutions, pooling, attention, recurrent layers, resampling: the operators of network layers."""

from __future__ import annotations

import torch

from strategies.core.graph import Ref
from tests.fuzz.generators.table import draws
from tests.fuzz.pool import Pool, Rejected


def _image(pool: Pool, dims: int, least: int = 1) -> Ref:
    """A value [n, channels, ...] with `dims` further dims of at least `least`."""
    accept = lambda v: v.dim() == dims + 2 and min(v.shape[2:]) >= least and v.numel() <= 400  # noqa: E731
    fitting = [ref for ref, value in pool.values.items() if value.is_floating_point() and accept(value)]
    if fitting and pool.rng.random() < 0.7:
        return pool.rng.choice(fitting)
    n, channels = pool.rng.choice((1, 2, 3, 4, 6, 8)), pool.rng.choice((1, 2, 3, 4, 6))
    room = {1: (4, 5, 6, 8, 12), 2: (3, 4, 5, 6, 8), 3: (2, 3, 4)}[dims]
    return pool.floats((n, channels, *(max(pool.rng.choice(room), least) for _ in range(dims))))


@draws("conv1d", "conv2d", "conv3d")
def convolution(pool: Pool, op: str) -> None:
    dims = int(op[4])
    x = _image(pool, dims, 2)
    channels = pool.shape_of(x)[1]
    groups = pool.rng.choice([d for d in range(1, channels + 1) if channels % d == 0]) if pool.rng.random() < 0.4 else 1
    out = groups * pool.rng.choice((1, 2, 3, 4))
    width = pool.rng.randint(1, min(3, *pool.shape_of(x)[2:]))
    weight = pool.floats((out, channels // groups, *(width,) * dims), -0.5, 0.5)
    bias = pool.floats((out,)) if pool.rng.random() < 0.6 else None
    stride, dilation = pool.rng.choice((1, 1, 2)), pool.rng.choice((1, 1, 2))
    if groups == 1 and pool.rng.random() < 0.15:
        pool.emit(f"aten.{op}.padding", x, weight, bias, (1,) * dims, pool.rng.choice(("same", "valid")), (1,) * dims)
        return
    if groups > 1 or dilation > 1 or pool.rng.random() < 0.5:
        more: tuple[object, ...] = ((stride,) * dims, (2,) * dims, (dilation,) * dims, groups)
    else:
        more = ((stride,) * dims, (1,) * dims)
    pool.emit(f"aten.{op}.default", x, weight, bias, *more)


@draws("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed(pool: Pool, op: str) -> None:
    dims = int(op[-2])
    x = _image(pool, dims)
    channels, groups = pool.shape_of(x)[1], 1
    if pool.rng.random() < 0.4:
        groups = pool.rng.choice([d for d in range(1, channels + 1) if channels % d == 0])
    out = pool.rng.choice((1, 2, 3))
    weight = pool.floats((channels, out, *(pool.rng.choice((2, 3)),) * dims), -0.5, 0.5)
    bias = pool.floats((out * groups,)) if pool.rng.random() < 0.6 else None
    overload = {1: "default", 2: "input", 3: "input"}[dims]
    pool.emit(f"aten.{op}.{overload}", x, weight, bias, (2,) * dims, (0,) * dims, (0,) * dims, groups)


@draws(*(f"{kind}_pool{dims}d" for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for dims in (1, 2, 3)))
def pooling(pool: Pool, op: str) -> None:
    dims = int(op[-2])
    x = _image(pool, dims, 2)
    if "max" in op:
        pool.apart(x)
    if op.startswith("adaptive"):
        places = (pool.rng.choice((1, 2, size // 2 or 1, size)) for size in pool.shape_of(x)[2:])
        pool.call(f"aten.{op}.default", x, tuple(places))
        return
    stride, padding = ([pool.rng.choice(some) for _ in range(dims)] for some in ((1, 2), (0, 1)))
    ceil_mode, included = pool.rng.random() < 0.3, pool.rng.random() < 0.5
    more = ((1,) * dims, ceil_mode) if "max" in op else (ceil_mode, included)
    pool.call(f"aten.{op}.default", x, (pool.rng.choice((2, 3)),) * dims, stride, padding, *more)


@draws(*(f"max_pool{dims}d_with_indices" for dims in (1, 2, 3)))
def pooling_with_indices(pool: Pool, op: str) -> None:
    dims = int(op[8])
    x = _image(pool, dims, 2)
    pool.apart(x)
    pool.call(f"aten.{op}.default", x, (2,) * dims, (1,) * dims)


@draws("scaled_dot_product_attention")
def attention(pool: Pool, op: str) -> None:
    rng = pool.rng
    if rng.random() < 0.3:  # a projection split into heads
        q = pool.tensor(4, 4, accept=lambda value: min(value.shape[-2:]) > 1)
    else:
        q = pool.floats([rng.choice(sizes) for sizes in ((1, 2, 3, 4), (2, 3, 4, 8), (3, 4, 6, 8), (2, 4))])
    *lead, heads, s, d = pool.shape_of(q)
    grouped = rng.random() < 0.35
    kv_heads = rng.choice([h for h in range(1, heads + 1) if heads % h == 0]) if grouped else heads
    causal = rng.random() < 0.35
    t, e = (s if rng.random() < 0.5 else rng.choice((2, 3, 5, 8))), rng.choice((2, 3, 4))
    k, v = pool.like((*lead, kv_heads, t, d)), pool.like((*lead, kv_heads, t, e))
    mask = None
    if not causal and rng.random() < 0.5:
        shape = (*(size if rng.random() < 0.6 else 1 for size in (*lead, heads, s)), t)
        shape = shape[rng.choice((0, 0, len(shape) - 2)) :]
        if rng.random() < 0.5:
            seen = torch.rand(shape, generator=pool.generator) < 0.6
            seen[..., 0] = True  # the softmax of a fully masked row is undefined
            mask = pool.source(seen)
        else:
            mask = pool.fixed(shape, -1.0, 1.0)
    more: dict[str, object] = {"scale": 0.4} if rng.random() < 0.3 else {}
    if kv_heads != heads:
        more["enable_gqa"] = True
    pool.emit("aten.scaled_dot_product_attention.default", q, k, v, mask, 0.0, causal, **more)


@draws("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(pool: Pool, op: str) -> None:
    rng = pool.rng
    x = pool.tensor(3, 3, accept=lambda value: value.numel() <= 200)
    first = rng.random() < 0.5
    a, b, width = pool.shape_of(x)
    if (b if first else a) > 8:
        raise Rejected
    batch, hidden, layers, both = (a if first else b), rng.choice((2, 3, 4)), rng.choice((1, 2)), rng.random() < 0.3
    gates, directions = {"lstm": 4, "gru": 3}.get(op, 1), 2 if both else 1
    weights = []
    for layer in range(layers):
        into = width if layer == 0 else hidden * directions
        for _ in range(directions):
            rows = gates * hidden
            weights += [pool.floats(shape, -0.5, 0.5) for shape in ((rows, into), (rows, hidden), (rows,), (rows,))]
    state = pool.floats((layers * directions, batch, hidden), -0.5, 0.5)
    states = (state, pool.floats((layers * directions, batch, hidden), -0.5, 0.5)) if op == "lstm" else state
    pool.call(f"aten.{op}.input", x, states, tuple(weights), True, layers, 0.0, True, both, first)


UPSAMPLING = {
    "_upsample_bicubic2d_aa": 2,
    "_upsample_bilinear2d_aa": 2,
    "_upsample_nearest_exact1d": 1,
    "_upsample_nearest_exact2d": 2,
    "_upsample_nearest_exact3d": 3,
    "upsample_nearest1d": 1,
    "upsample_nearest2d": 2,
    "upsample_linear1d": 1,
    "upsample_bilinear2d": 2,
    "upsample_bicubic2d": 2,
    "upsample_nearest3d": 3,
    "upsample_trilinear3d": 3,
}


@draws(*UPSAMPLING)
def upsampled(pool: Pool, op: str) -> None:
    dims = UPSAMPLING[op]
    x = _image(pool, dims, 2)
    corners = () if "nearest" in op else (pool.rng.random() < 0.4 and not op.endswith("aa"),)
    if pool.rng.random() < 0.5:
        pool.emit(f"aten.{op}.vec", x, None, *corners, tuple(pool.rng.choice((0.5, 1.5, 2.0)) for _ in range(dims)))
    else:
        sizes = tuple(max(1, size + pool.rng.randint(-1, 2)) for size in pool.shape_of(x)[2:])
        pool.emit(f"aten.{op}.vec", x, sizes, *corners, None)


@draws("pixel_shuffle", "pixel_unshuffle", "channel_shuffle")
def shuffled(pool: Pool, op: str) -> None:
    n, h, w = pool.rng.choice((1, 2, 4)), 2, 4
    if op == "pixel_unshuffle":
        x = pool.like((n, pool.rng.choice((1, 2, 3)), h, w))
    else:
        x = pool.like((n, pool.rng.choice((4, 8, 12)), h, w))
    pool.emit(f"aten.{op}.default", x, 2)


@draws("im2col")
def im2col(pool: Pool, op: str) -> None:
    pool.emit("aten.im2col.default", _image(pool, 2, 2), (2, 2), (1, 1), (0, 0), (1, 1))


@draws("col2im")
def col2im(pool: Pool, op: str) -> None:
    columns = pool.like((pool.rng.choice((1, 2, 4)), 4 * pool.rng.choice((1, 2, 3)), 6))
    pool.emit("aten.col2im.default", columns, (3, 4), (2, 2), (1, 1), (0, 0), (1, 1))


@draws("grid_sampler", "grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(pool: Pool, op: str) -> None:
    """Sampled inside the image and between its pixels."""
    dims = 3 if op.endswith("3d") else 2
    x = _image(pool, dims, 3)
    n = pool.shape_of(x)[0]
    grid = pool.floats((n, pool.rng.choice((2, 3)), *(2, 4)[: dims - 1], dims), -0.8, 0.8)
    pool.emit(f"aten.{op}.default", x, grid, 0, 0, True)


@draws("affine_grid_generator")
def affine_grid(pool: Pool, op: str) -> None:
    n = pool.rng.choice((1, 2, 3, 4))
    pool.emit("aten.affine_grid_generator.default", pool.like((n, 2, 3)), (n, 2, 3, 4), False)


@draws("convolution")
def any_convolution(pool: Pool, op: str) -> None:
    x = _image(pool, 2, 2)
    channels = pool.shape_of(x)[1]
    weight = pool.floats((pool.rng.choice((1, 2, 4)), channels, 2, 2), -0.5, 0.5)
    pool.emit("aten.convolution.default", x, weight, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1)


@draws("conv_tbc")
def conv_tbc(pool: Pool, op: str) -> None:
    x = pool.floats((pool.rng.choice((4, 6)), pool.rng.choice((1, 2, 4)), pool.rng.choice((1, 2, 3))))
    out = pool.rng.choice((1, 2, 4))
    pool.emit("aten.conv_tbc.default", x, pool.floats((2, pool.shape_of(x)[2], out), -0.5, 0.5), pool.floats((out,)), 0)


@draws("max_unpool2d", "max_unpool3d")
def unpooled(pool: Pool, op: str) -> None:
    """Values of a pooling without overlap return to their indices."""
    dims = int(op[-2])
    x = pool.floats((pool.rng.choice((1, 2, 4)), pool.rng.choice((1, 2, 3)), *(4,) * dims))
    kept, places = pool.call(f"aten.max_pool{dims}d_with_indices.default", x, (2,) * dims, (2,) * dims)
    more = ((2,) * dims, (0,) * dims) if dims == 3 else ()
    pool.emit(f"aten.{op}.default", kept, places, (4,) * dims, *more)


@draws("fractional_max_pool2d", "fractional_max_pool3d")
def fractional(pool: Pool, op: str) -> None:
    dims = int(op[-2])
    x = pool.floats((pool.rng.choice((1, 2, 4)), pool.rng.choice((1, 2, 3)), *(5,) * dims))
    samples = pool.fixed((*pool.shape_of(x)[:2], dims), 0.1, 0.9)
    pool.call(f"aten.{op}.default", x, (2,) * dims, (3,) * dims, samples)


@draws("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def cell(pool: Pool, op: str) -> None:
    x = pool.tensor(2, 2)
    batch, width = pool.shape_of(x)
    hidden = pool.rng.choice((2, 3, 4))
    rows = {"lstm_cell": 4, "gru_cell": 3}.get(op, 1) * hidden
    weights = [pool.floats(shape, -0.5, 0.5) for shape in ((rows, width), (rows, hidden), (rows,), (rows,))]
    state = pool.floats((batch, hidden), -0.5, 0.5)
    if op == "lstm_cell":
        pool.call("aten.lstm_cell.default", x, (state, pool.floats((batch, hidden), -0.5, 0.5)), *weights)
    else:
        pool.emit(f"aten.{op}.default", x, state, *weights)
