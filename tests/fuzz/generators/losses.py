"""Losses with every reduction, ignored targets, class weights, smoothed and probability targets."""

from __future__ import annotations

import torch

from strategies.graph import Ref
from tests.fuzz.generators.table import draws
from tests.fuzz.pool import Pool

NONE, MEAN, SUM = 0, 1, 2


def _reduction(pool: Pool) -> int:
    return pool.rng.choice((MEAN, MEAN, SUM, NONE))


@draws("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div")
def element(pool: Pool, op: str) -> None:
    x = pool.tensor()
    other = pool.like(pool.shape_of(x))
    if op == "soft_margin_loss":
        signs = torch.where(torch.rand(pool.shape_of(x), generator=pool.generator) < 0.5, 1.0, -1.0)
        other = pool.source(signs.double(), trainable=False)
    elif op == "kl_div":
        other = pool.within(other, 0.1, 2.0)
    else:
        pool.different(x, other)
    pool.emit(f"aten.{op}.default", x, other, *((_reduction(pool),) if pool.rng.random() < 0.7 else ()))


@draws("binary_cross_entropy", "binary_cross_entropy_with_logits")
def binary(pool: Pool, op: str) -> None:
    x = pool.tensor()
    if op == "binary_cross_entropy":
        x = pool.within(x, 0.05, 0.95)
    target = pool.within(pool.like(pool.shape_of(x)), 0.0, 1.0)
    weight = pool.fixed(pool.shape_of(x), 0.5, 2.0) if pool.rng.random() < 0.4 else None
    more = (pool.fixed(pool.shape_of(x)[-1:], 0.5, 2.0) if pool.rng.random() < 0.4 else None,)
    pool.emit(f"aten.{op}.default", x, target, weight, *(more if op.endswith("logits") else ()), _reduction(pool))


def _targets(pool: Pool, shape: tuple[int, ...], classes: int) -> Ref:
    """Classes, some of them ignored, at least one not: a mean over nothing is not a number."""
    drawn = torch.randint(0, classes, shape, generator=pool.generator)
    ignored = torch.rand(shape, generator=pool.generator) < 0.3
    ignored.view(-1)[0] = False
    return pool.source(torch.where(ignored, -100, drawn))


@draws("cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d")
def classes(pool: Pool, op: str) -> None:
    least, most = {"nll_loss": (2, 2), "nll_loss2d": (4, 4)}.get(op, (1, 4))
    scores = pool.tensor(least, most)
    shape = pool.shape_of(scores)
    count = shape[0] if len(shape) == 1 else shape[1]
    weight = pool.fixed((count,), 0.5, 2.0) if pool.rng.random() < 0.3 else None
    if op == "cross_entropy_loss" and pool.rng.random() < 0.2:
        target = pool.within(pool.like(shape), 0.0, 1.0)
    else:
        target = _targets(pool, shape[:1] + shape[2:] if len(shape) > 1 else (), count)
    more = (pool.rng.choice((0.0, 0.0, 0.1)),) if op == "cross_entropy_loss" else ()
    reduction = MEAN if op == "nll_loss2d" else _reduction(pool)  # without one its backward wants contiguous gradients
    pool.emit(f"aten.{op}.default", scores, target, weight, reduction, -100, *more)
