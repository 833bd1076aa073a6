"""Normalisations and softmax."""

from __future__ import annotations

import math

from tests.fuzz.generators.table import draws
from tests.fuzz.pool import Pool, Rejected


@draws("softmax", "log_softmax")
def softmax(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1)
    pool.emit(f"aten.{op}.int", x, pool.dim(x))


@draws("layer_norm", "rms_norm")
def layer_norm(pool: Pool, op: str) -> None:
    """Over dims of several elements: a single element is normalised to zero."""
    x = pool.tensor(least=1)
    shape = pool.shape_of(x)
    normalised = shape[len(shape) - pool.rng.randint(1, min(2, len(shape))) :]
    if math.prod(normalised) < 2:
        raise Rejected
    affine = [pool.floats(normalised) for _ in range(pool.rng.randint(0, 1 if op == "rms_norm" else 2))]
    more = (1e-3,) if op == "rms_norm" else (*[None] * (2 - len(affine)), 1e-3)
    if op == "rms_norm" and not affine:
        more = (None, 1e-3)
    pool.emit(f"aten.{op}.default", x, normalised, *affine, *more)


@draws("group_norm")
def group_norm(pool: Pool, op: str) -> None:
    x = pool.tensor(least=2)
    channels, *rest = pool.shape_of(x)[1:]
    groups = pool.rng.choice([d for d in range(1, channels + 1) if channels % d == 0])
    if channels // groups * math.prod(rest) < 2:
        raise Rejected
    affine = [pool.floats((channels,)) for _ in range(2)] if pool.rng.random() < 0.7 else [None, None]
    pool.emit("aten.group_norm.default", x, groups, *affine, 1e-3)


@draws("batch_norm", "instance_norm", "batch_norm_training", "instance_norm_training")
def batch_norm(pool: Pool, op: str) -> None:
    """One sample of instance_norm has several elements in every dim: torch's own backward is wrong for [n, c, h, 1] if
    the gradient arrives transposed."""
    single = op.startswith("instance")
    x = pool.tensor(least=3, accept=lambda value: min(value.shape[2:]) > 1) if single else pool.tensor(least=2)
    n, channels, *rest = pool.shape_of(x)
    if math.prod(rest) * (1 if single else n) < 2:
        raise Rejected
    affine = [pool.floats((channels,)) for _ in range(2)] if pool.rng.random() < 0.7 else [None, None]
    if op.endswith("_training"):
        statistics = pool.fixed((channels,), -1.0, 1.0), pool.fixed((channels,), 0.5, 2.0)
        pool.call(f"local.{op}", x, *affine, *statistics, 0.1, 1e-3)
    elif op == "batch_norm" and pool.rng.random() < 0.4:
        statistics = pool.fixed((channels,), -1.0, 1.0), pool.fixed((channels,), 0.5, 2.0)
        pool.emit("aten.batch_norm.default", x, *affine, *statistics, False, 0.1, 1e-3, False)
    else:
        pool.emit(f"aten.{op}.default", x, *affine, None, None, True, 0.1, 1e-3, False)


@draws("_weight_norm")
def weight_norm(pool: Pool, op: str) -> None:
    v = pool.tensor(least=2)
    dim = pool.rng.choice((0, len(pool.shape_of(v)) - 1))
    pool.away_from(v, 0.0)
    shape = [size if i == dim else 1 for i, size in enumerate(pool.shape_of(v))]
    pool.emit("aten._weight_norm.default", v, pool.like(shape), dim)
