"""Reductions over some dims or all."""

from __future__ import annotations

from typing import Any

from strategies.core.graph import Ref
from tests.fuzz.generators.table import draws
from tests.fuzz.pool import Pool


def _dims(pool: Pool, x: Ref) -> tuple[int, ...]:
    """Some dims, in any order, counted from either end."""
    rank = len(pool.shape_of(x))
    chosen = pool.rng.sample(range(rank), pool.rng.randint(1, rank))
    return tuple(dim - rank if pool.rng.random() < 0.3 else dim for dim in chosen)


def _keeps(pool: Pool) -> tuple[bool, ...]:
    return (True,) if pool.rng.random() < 0.4 else ()


@draws("sum", "mean")
def additive(pool: Pool, op: str) -> None:
    x = pool.tensor()
    if not pool.shape_of(x) or pool.rng.random() < 0.25:
        pool.emit(f"aten.{op}.default", x)
    else:
        overload = "dim_IntList" if op == "sum" else "dim"
        pool.emit(f"aten.{op}.{overload}", x, _dims(pool, x), *_keeps(pool))


@draws("count_nonzero")
def count_nonzero(pool: Pool, op: str) -> None:
    x = pool.booleans(pool.shape(1))
    if pool.rng.random() < 0.5:
        pool.emit("aten.count_nonzero.dim_IntList", x, _dims(pool, x))
    else:
        pool.emit("aten.count_nonzero.default", x)


@draws("amax", "amin", "logsumexp")
def over_dims(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1)
    if op != "logsumexp":
        pool.apart(x)
    pool.emit(f"aten.{op}.default", x, _dims(pool, x), *_keeps(pool))


@draws("argmax", "argmin", "max", "min", "median", "mode")
def extremum(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1)
    pool.apart(x)
    if op.startswith("arg"):
        pool.emit(f"aten.{op}.default", x, *((pool.dim(x), *_keeps(pool)) if pool.rng.random() < 0.7 else ()))
    elif op == "mode":
        pool.call("aten.mode.default", x, pool.dim(x))
    elif pool.rng.random() < 0.3:
        pool.emit(f"aten.{op}.default", x)
    elif op in ("max", "min") and pool.rng.random() < 0.4:
        other = pool.like(pool.broadcasting(pool.shape_of(x)))
        pool.different(x, other)
        pool.emit(f"aten.{op}.other", x, other)
    else:
        pool.call(f"aten.{op}.dim", x, pool.dim(x), *_keeps(pool))


@draws("all", "any")
def quantifier(pool: Pool, op: str) -> None:
    x = pool.booleans(pool.shape(1))
    if pool.rng.random() < 0.5:
        pool.emit(f"aten.{op}.dim", x, pool.dim(x))
    else:
        pool.emit(f"aten.{op}.default", x)


@draws("prod")
def prod(pool: Pool, op: str) -> None:
    x = pool.within(pool.tensor(least=1), 0.5, 1.5)
    pool.emit("aten.prod.dim_int", x, pool.dim(x), *_keeps(pool))


@draws("std", "var", "std_mean", "var_mean")
def spread(pool: Pool, op: str) -> None:
    """Over dims of several elements: the derivative of the root has a pole where all elements are equal."""
    x = pool.tensor(least=1)
    pool.apart(x)
    rank = len(pool.shape_of(x))
    dims = tuple(dim for dim in _dims(pool, x) if pool.shape_of(x)[dim] > 1) or tuple(range(rank))
    more: dict[str, Any] = {"correction": 0} if pool.values[x].numel() == 1 else {"correction": pool.rng.choice((0, 1))}
    if pool.values[x].numel() == 1:
        op = "var"
    if pool.rng.random() < 0.4:
        more["keepdim"] = True
    pool.call(f"aten.{op}.correction", x, dims, **more)


@draws("linalg_vector_norm")
def vector_norm(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1)
    pool.away_from(x, 0.0)
    order = pool.rng.choice((1, 2, 3))
    pool.emit("aten.linalg_vector_norm.default", x, order, _dims(pool, x), *_keeps(pool))


@draws("_is_all_true", "_is_any_true")
def truth(pool: Pool, op: str) -> None:
    pool.emit(f"aten.{op}.default", pool.booleans(pool.shape()))


@draws("nansum", "nanmean")
def nansum(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1)
    pool.emit(f"aten.{op}.default", x, _dims(pool, x), *_keeps(pool))


@draws("nanmedian", "aminmax")
def by_dim(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1)
    pool.apart(x)
    if op == "aminmax":
        pool.call("aten.aminmax.default", x, dim=pool.dim(x))
    else:
        pool.call("aten.nanmedian.dim", x, pool.dim(x), *_keeps(pool))


@draws("quantile", "nanquantile")
def quantile(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1)
    pool.apart(x)
    pool.emit(f"aten.{op}.scalar", x, 0.37, pool.dim(x), *_keeps(pool))


@draws("norm", "linalg_norm")
def norm(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1)
    pool.away_from(x, 0.0)
    if op == "norm":
        pool.emit("aten.norm.ScalarOpt_dim", x, pool.rng.choice((1, 2, 3)), _dims(pool, x), *_keeps(pool))
    else:
        pool.emit("aten.linalg_norm.default", x, 2, (pool.dim(x),), *_keeps(pool))


@draws("cosine_similarity", "pairwise_distance")
def between(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1)
    other = pool.like(pool.shape_of(x))
    pool.away_from(x, 0.0)
    pool.away_from(other, 0.0)
    pool.different(x, other)
    pool.emit(f"aten.{op}.default", x, other, *((pool.dim(x),) if op == "cosine_similarity" else ()))
