"""Products, with and without bias, in every number of dims."""

from __future__ import annotations

from tests.fuzz.generators.table import draws
from tests.fuzz.pool import SIZES, Pool


@draws("linear")
def linear(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1)
    columns, rows = pool.shape_of(x)[-1], pool.rng.choice(SIZES)
    if pool.rng.random() < 0.1:
        pool.emit("aten.linear.default", x, pool.like((columns,)))
        return
    bias = (pool.floats((rows,)),) if pool.rng.random() < 0.6 else ()
    pool.emit("aten.linear.default", x, pool.floats((rows, columns), -0.5, 0.5), *bias)


@draws("matmul")
def matmul(pool: Pool, op: str) -> None:
    left = pool.tensor(least=1, most=4)
    *lead, k = pool.shape_of(left)
    if len(lead) == 0 or pool.rng.random() < 0.15:
        right = pool.like((k,) if pool.rng.random() < 0.5 else (k, pool.rng.choice(SIZES)))
    else:
        right = pool.like((*pool.broadcasting(lead[:-1]), k, pool.rng.choice(SIZES)))
    pool.emit("aten.matmul.default", left, right)


@draws("mm", "bmm", "mv", "dot", "outer")
def product(pool: Pool, op: str) -> None:
    rank = {"mm": 2, "bmm": 3, "mv": 2, "dot": 1, "outer": 1}[op]
    left = pool.tensor(rank, rank)
    *lead, k = pool.shape_of(left)
    n = pool.rng.choice(SIZES)
    right = {"mm": (k, n), "bmm": (*lead[:1], k, n), "mv": (k,), "dot": (k,), "outer": (n,)}[op]
    pool.emit(f"aten.{op}.default", left, pool.like(right))


@draws("addmm", "baddbmm")
def addmm(pool: Pool, op: str) -> None:
    rank = 3 if op == "baddbmm" else 2
    left = pool.tensor(rank, rank)
    *lead, rows, k = pool.shape_of(left)
    right = pool.like((*lead, k, pool.rng.choice(SIZES)))
    out = (*lead, rows, pool.shape_of(right)[-1])
    bias = pool.like(pool.broadcasting(out) or (1,))
    more = {"beta": 0.5, "alpha": 2} if pool.rng.random() < 0.4 else {}
    pool.emit(f"aten.{op}.default", bias, left, right, **more)
