"""Losses with every reduction, ignored targets, class weights, smoothed and probability targets."""

from __future__ import annotations

import torch

from strategies.core.graph import Ref
from tests.fuzz.generators.table import draws
from tests.fuzz.pool import Pool

NONE, MEAN, SUM = 0, 1, 2


def _reduction(pool: Pool) -> int:
    return pool.rng.choice((MEAN, MEAN, SUM, NONE))


def _signs(pool: Pool, shape: tuple[int, ...]) -> Ref:
    values = torch.where(torch.rand(shape, generator=pool.generator) < 0.5, 1.0, -1.0)
    return pool.source(values.double(), trainable=False)


@draws("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "kl_div")
def element(pool: Pool, op: str) -> None:
    x = pool.tensor()
    other = pool.like(pool.shape_of(x))
    if op == "soft_margin_loss":
        other = _signs(pool, pool.shape_of(x))
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
    values = torch.randint(0, classes, shape, generator=pool.generator)
    ignored = torch.rand(shape, generator=pool.generator) < 0.3
    ignored.view(-1)[0] = False
    return pool.source(torch.where(ignored, -100, values))


@draws("cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d")
def classes(pool: Pool, op: str) -> None:
    least, most = {"nll_loss": (2, 2), "nll_loss2d": (4, 4)}.get(op, (1, 4))
    scores = pool.tensor(least, most)
    shape = pool.shape_of(scores)
    if not pool.values[scores].is_contiguous():  # torch's backward of dims behind the classes wants it so
        scores = pool.emit("aten.contiguous.default", scores)
    count = shape[0] if len(shape) == 1 else shape[1]
    weight = pool.fixed((count,), 0.5, 2.0) if pool.rng.random() < 0.3 else None
    if op == "cross_entropy_loss" and pool.rng.random() < 0.2:
        target = pool.within(pool.like(shape), 0.0, 1.0)
    else:
        target = _targets(pool, shape[:1] + shape[2:] if len(shape) > 1 else (), count)
    more = (pool.rng.choice((0.0, 0.0, 0.1)),) if op == "cross_entropy_loss" else ()
    # and without a reduction it wants contiguous gradients
    reduction = _reduction(pool) if len(shape) < 3 else pool.rng.choice((MEAN, SUM))
    pool.emit(f"aten.{op}.default", scores, target, weight, reduction, -100, *more)


@draws("hinge_embedding_loss", "margin_ranking_loss", "cosine_embedding_loss", "triplet_margin_loss")
def margins(pool: Pool, op: str) -> None:
    """The margin is so wide that no element is at the kink."""
    least = 2 if op in ("cosine_embedding_loss", "triplet_margin_loss") else 1
    x = pool.within(pool.tensor(least, 2 if least == 2 else 3), -3.0, 3.0)
    shape, margin = pool.shape_of(x), 0.37
    if op == "hinge_embedding_loss":
        pool.away_from(x, margin)
        pool.emit("aten.hinge_embedding_loss.default", x, _signs(pool, shape), margin, _reduction(pool))
        return
    others = [pool.within(pool.like(shape), -3.0, 3.0) for _ in range(2 if op == "triplet_margin_loss" else 1)]
    pool.different(x, others[0])
    if op == "triplet_margin_loss":
        pool.different(x, others[1])
        pool.emit("aten.triplet_margin_loss.default", x, *others, 40.0, 2.0, 1e-6, False, _reduction(pool))
        return
    if op == "cosine_embedding_loss":
        pool.away_from(x, 0.0)
        pool.away_from(others[0], 0.0)
    signs = _signs(pool, shape[:1] if op == "cosine_embedding_loss" else shape)
    margin = -2.0 if op == "cosine_embedding_loss" else 40.0
    pool.emit(f"aten.{op}.default", x, *others, signs, margin, _reduction(pool))


@draws("multi_margin_loss", "multilabel_margin_loss")
def many_margins(pool: Pool, op: str) -> None:
    x = pool.within(pool.tensor(2, 2), -0.4, 0.4)
    n, count = pool.shape_of(x)
    if op == "multi_margin_loss":
        pool.emit("aten.multi_margin_loss.default", x, pool.integers((n,), count), 1, 1.0, None, _reduction(pool))
        return
    target = torch.full((n, count), -1)
    target[:, 0] = torch.randint(0, count, (n,), generator=pool.generator)
    pool.emit("aten.multilabel_margin_loss.default", x, pool.source(target), _reduction(pool))


@draws("poisson_nll_loss")
def poisson(pool: Pool, op: str) -> None:
    x = pool.within(pool.tensor(), -2.0, 2.0)
    target = pool.fixed(pool.shape_of(x), 0.5, 4.0)
    pool.emit("aten.poisson_nll_loss.default", x, target, True, False, 1e-8, _reduction(pool))
