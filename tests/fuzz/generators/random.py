"""Random operators. Runs are compared with `random: exact`, in which slices repeat one device's numbers."""

from __future__ import annotations

from tests.fuzz.generators.factories import DOUBLE
from tests.fuzz.generators.table import draws
from tests.fuzz.pool import Pool


@draws("dropout")
def dropout(pool: Pool, op: str) -> None:
    x = pool.tensor()
    pool.emit("aten.dropout.default", x, pool.rng.choice((0.0, 0.3, 0.5)), pool.rng.random() < 0.8)


@draws("native_dropout")
def native_dropout(pool: Pool, op: str) -> None:
    pool.call("aten.native_dropout.default", pool.tensor(), 0.4, True)


@draws("feature_dropout", "alpha_dropout", "feature_alpha_dropout")
def other_dropout(pool: Pool, op: str) -> None:
    x = pool.tensor(least=3)
    pool.emit(f"aten.{op}.default", x, 0.4, pool.rng.random() < 0.8)


@draws("rrelu")
def rrelu(pool: Pool, op: str) -> None:
    x = pool.tensor()
    pool.away_from(x, 0.0)
    pool.emit("aten.rrelu.default", x, 0.1, 0.3, pool.rng.random() < 0.8)


@draws("bernoulli")
def bernoulli(pool: Pool, op: str) -> None:
    if pool.rng.random() < 0.5:
        pool.emit("aten.bernoulli.default", pool.fixed(pool.shape(), 0.1, 0.9))
    else:
        pool.emit("aten.bernoulli.p", pool.fixed(pool.shape(), 0.1, 0.9), 0.3)


@draws("rand_like", "randn_like")
def random_like(pool: Pool, op: str) -> None:
    pool.emit(f"aten.{op}.default", pool.tensor())


@draws("randint_like")
def randint_like(pool: Pool, op: str) -> None:
    pool.emit("aten.randint_like.default", pool.integers(pool.shape(), 5), 7)


@draws("uniform", "exponential", "normal_functional", "log_normal")
def filled(pool: Pool, op: str) -> None:
    bounds = {"log_normal": (0.1, 0.3)}.get(op, ())
    pool.emit(f"aten.{op}.default", pool.fixed(pool.shape(), 0.0, 1.0), *bounds)


@draws("geometric")
def geometric(pool: Pool, op: str) -> None:
    pool.emit("aten.geometric.default", pool.fixed(pool.shape(), 0.0, 1.0), 0.5)


@draws("normal")
def normal(pool: Pool, op: str) -> None:
    pool.emit("aten.normal.Tensor_float", pool.fixed(pool.shape(), -1.0, 1.0), 0.5)


@draws("rand", "randn")
def made(pool: Pool, op: str) -> None:
    pool.emit(f"aten.{op}.default", pool.shape(), **DOUBLE)


@draws("randint")
def randint(pool: Pool, op: str) -> None:
    pool.emit("aten.randint.low", 2, 9, pool.shape())
