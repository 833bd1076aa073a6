"""Random operators. Runs are compared with `random: exact`, in which slices repeat one device's numbers."""

from __future__ import annotations

from tests.fuzz.generators.table import draws
from tests.fuzz.pool import Pool


@draws("dropout")
def dropout(pool: Pool, op: str) -> None:
    x = pool.tensor()
    pool.emit("aten.dropout.default", x, pool.rng.choice((0.0, 0.3, 0.5)), pool.rng.random() < 0.8)


@draws("bernoulli")
def bernoulli(pool: Pool, op: str) -> None:
    pool.emit("aten.bernoulli.default", pool.fixed(pool.shape(), 0.1, 0.9))


@draws("rand_like", "randn_like")
def drawn_like(pool: Pool, op: str) -> None:
    pool.emit(f"aten.{op}.default", pool.tensor())


@draws("feature_dropout", "alpha_dropout")
def other_dropout(pool: Pool, op: str) -> None:
    x = pool.tensor(least=3)
    pool.emit(f"aten.{op}.default", x, 0.4, pool.rng.random() < 0.8)
