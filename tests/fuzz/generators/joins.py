"""Joining tensors along a dim that they have, or a new one."""

from __future__ import annotations

from tests.fuzz.generators.table import draws
from tests.fuzz.pool import Pool, Rejected


@draws("cat", "concat", "concatenate")
def cat(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1, accept=lambda value: value.numel() < 300)
    dim, others = pool.dim(x), []
    for _ in range(pool.rng.randint(1, 2)):
        shape = list(pool.shape_of(x))
        shape[dim] = pool.rng.choice((shape[dim], 1, 2, 4))
        others.append(pool.like(shape))
    pool.emit(f"aten.{op}.default", (*others[1:], x, *others[:1]), dim)


@draws("stack")
def stack(pool: Pool, op: str) -> None:
    x = pool.tensor(most=4, accept=lambda value: value.numel() < 300)
    rank = len(pool.shape_of(x))
    others = [pool.like(pool.shape_of(x)) for _ in range(pool.rng.randint(1, 3))]
    pool.emit("aten.stack.default", (x, *others), *((pool.rng.randint(-rank - 1, rank),) if others[1:] else ()))


@draws("hstack", "vstack", "row_stack", "dstack", "column_stack")
def named_stack(pool: Pool, op: str) -> None:
    x = pool.tensor(most=3, accept=lambda value: value.numel() < 300)
    pool.emit(f"aten.{op}.default", (x, pool.like(pool.shape_of(x))))


@draws("meshgrid")
def meshgrid(pool: Pool, op: str) -> None:
    pool.call("aten.meshgrid.indexing", (pool.tensor(1, 1), pool.tensor(1, 1)), indexing=pool.rng.choice(("ij", "xy")))


@draws("slice_scatter")
def slice_scatter(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1)
    dim = pool.dim(x)
    size = pool.shape_of(x)[dim]
    start = pool.rng.randrange(size)
    end, shape = pool.rng.randint(start + 1, size), list(pool.shape_of(x))
    shape[dim] = end - start
    pool.emit("aten.slice_scatter.default", x, pool.like(shape), dim, start, end)


@draws("select_scatter")
def select_scatter(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1)
    dim = pool.dim(x) % len(pool.shape_of(x))
    shape = pool.shape_of(x)
    pool.emit(
        "aten.select_scatter.default",
        x,
        pool.like(shape[:dim] + shape[dim + 1 :]),
        dim,
        pool.rng.randrange(shape[dim]),
    )


@draws("diagonal_scatter")
def diagonal_scatter(pool: Pool, op: str) -> None:
    x = pool.tensor(least=2)
    rank = len(pool.shape_of(x))
    first, second = pool.rng.sample(range(rank), 2)
    shape = pool.values[x].diagonal(0, first, second).shape
    if not all(shape):
        raise Rejected
    pool.emit("aten.diagonal_scatter.default", x, pool.like(shape), 0, first, second)
