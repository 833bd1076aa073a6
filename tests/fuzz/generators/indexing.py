"""Reading and writing at indices given by integer tensors.

Writes without accumulation go to distinct indices: the order of two writes to one index is undefined.
"""

from __future__ import annotations

import torch

from strategies.core.graph import Ref
from tests.fuzz.generators.table import draws
from tests.fuzz.pool import SIZES, Pool


def _permutation(pool: Pool, size: int, length: int) -> Ref:
    """A source with `length` different places among `size`."""
    return pool.source(torch.randperm(size, generator=pool.generator)[:length])


@draws("embedding")
def embedding(pool: Pool, op: str) -> None:
    table = pool.tensor(2, 2)
    rows = pool.shape_of(table)[0]
    indices = pool.integers(pool.shape(0, 3), rows)
    padding = (pool.rng.randrange(rows),) if pool.rng.random() < 0.4 else ()
    pool.emit("aten.embedding.default", table, indices, *padding)


@draws("one_hot")
def one_hot(pool: Pool, op: str) -> None:
    classes = pool.rng.choice(SIZES)
    hot = pool.emit("aten.one_hot.default", pool.integers(pool.shape(0, 3), classes), classes)
    pool.emit("aten.to.dtype", hot, torch.float64)


@draws("index_select")
def index_select(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1)
    dim = pool.dim(x)
    index = pool.integers((pool.rng.choice(SIZES),), pool.shape_of(x)[dim])
    pool.emit("aten.index_select.default", x, dim, index)


@draws("gather", "take_along_dim")
def gather(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1)
    dim = pool.dim(x)
    shape = list(pool.shape_of(x))
    high, shape[dim] = shape[dim], pool.rng.choice((shape[dim], 1, 3))
    if op == "gather":
        shape = [pool.rng.randint(1, size) if pool.rng.random() < 0.15 else size for size in shape]
        pool.emit("aten.gather.default", x, dim, pool.integers(shape, high))
    else:
        pool.emit("aten.take_along_dim.default", x, pool.integers(shape, high), dim)


@draws("index")
def index(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1, most=4)
    shape = pool.shape_of(x)
    places = sorted(pool.rng.sample(range(len(shape)), pool.rng.randint(1, min(2, len(shape)))))
    common = pool.shape(0, 2, (1, 2, 3, 4, 6))
    entries: list[Ref | None] = [None] * (places[-1] + 1)
    for place in places:
        entries[place] = pool.integers(common, shape[place], -shape[place] if pool.rng.random() < 0.3 else 0)
    pool.emit("aten.index.Tensor", x, tuple(entries))


@draws("index_put")
def index_put(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1, most=4)
    shape = pool.shape_of(x)
    count, accumulate = pool.rng.randint(1, shape[0]), pool.rng.random() < 0.5
    index = pool.integers((count,), shape[0]) if accumulate else _permutation(pool, shape[0], count)
    values = pool.like((count, *shape[1:]) if pool.rng.random() < 0.7 else ())
    pool.emit("aten.index_put.default", x, (index,), values, *((True,) if accumulate else ()))


@draws("index_add", "index_copy", "index_fill")
def indexed_write(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1)
    dim = pool.dim(x)
    size, shape = pool.shape_of(x)[dim], list(pool.shape_of(x))
    shape[dim] = pool.rng.randint(1, size)
    if op == "index_fill":
        pool.emit("aten.index_fill.int_Scalar", x, dim, _permutation(pool, size, shape[dim]), 0.5)
        return
    index = pool.integers((shape[dim],), size) if op == "index_add" else _permutation(pool, size, shape[dim])
    pool.emit(f"aten.{op}.default", x, dim, index, pool.like(shape))


@draws("scatter", "scatter_add", "scatter_reduce")
def scatter(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1)
    dim = pool.dim(x)
    size, shape = pool.shape_of(x)[dim], list(pool.shape_of(x))
    shape[dim] = pool.rng.randint(1, size)
    if op != "scatter":
        index = pool.integers(shape, size)
        if op == "scatter_add":
            pool.emit("aten.scatter_add.default", x, dim, index, pool.like(shape))
        else:
            pool.emit("aten.scatter_reduce.two", x, dim, index, pool.like(shape), pool.rng.choice(("sum", "mean")))
        return
    full = list(pool.shape_of(x))
    order = torch.rand(full, generator=pool.generator).argsort(dim)
    index = pool.source(order.narrow(dim, 0, shape[dim]).contiguous())
    if pool.rng.random() < 0.3:
        pool.emit("aten.scatter.value", x, dim, index, 0.5)
    else:
        pool.emit("aten.scatter.src", x, dim, index, pool.like(shape))


@draws("masked_scatter")
def masked_scatter(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1)
    shape = pool.shape_of(x)
    pool.emit("aten.masked_scatter.default", x, pool.booleans(shape), pool.like(shape))


@draws("searchsorted", "bucketize")
def sought(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1)
    edges = pool.source(torch.linspace(-2.2, 2.3, pool.rng.choice((3, 5, 8)), dtype=torch.float64), False)
    pool.away_from(x, *pool.values[edges].tolist())
    if op == "bucketize":
        pool.emit("aten.bucketize.Tensor", x, edges)
    else:
        pool.emit("aten.searchsorted.Tensor", edges, x)


@draws("histc", "bincount")
def counted(pool: Pool, op: str) -> None:
    x = pool.integers((pool.rng.choice(SIZES),), 6)
    if op == "bincount":
        pool.emit("aten.bincount.default", x, None, 6)
    else:
        pool.emit("aten.histc.default", pool.emit("aten.to.dtype", x, torch.float64), 6, 0, 5)


@draws("take")
def take(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1)
    pool.emit("aten.take.default", x, pool.integers(pool.shape(0, 2), pool.values[x].numel()))


@draws("isin")
def isin(pool: Pool, op: str) -> None:
    pool.emit("aten.isin.Tensor_Tensor", pool.integers(pool.shape(), 9), pool.integers((3,), 9))


@draws("embedding_bag")
def embedding_bag(pool: Pool, op: str) -> None:
    """The sum or mean of several rows; the other results are used by its backward."""
    table = pool.tensor(2, 2)
    rows, length = pool.shape_of(table)[0], pool.rng.choice((4, 6, 8))
    offsets = pool.source(torch.arange(0, length, 2))
    bags = pool.call(
        "aten.embedding_bag.padding_idx",
        table,
        pool.integers((length,), rows),
        offsets,
        False,
        pool.rng.choice((0, 1)),
        False,
        None,
        False,
        None,
    )
    for further in bags[1:]:
        pool.forget(further)
