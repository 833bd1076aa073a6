"""Reshapes, permutations, expansions."""

from __future__ import annotations

import math

from tests.fuzz.generators.table import draws
from tests.fuzz.pool import Pool


def _regrouped(pool: Pool, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Another shape with as many elements: neighbours merged, sizes split, ones put in."""
    sizes: list[int] = []
    for size in shape:
        divisors = [d for d in range(2, size) if size % d == 0]
        if divisors and pool.rng.random() < 0.5:
            first = pool.rng.choice(divisors)
            sizes += [first, size // first]
        elif sizes and pool.rng.random() < 0.35:
            sizes[-1] *= size
        else:
            sizes.append(size)
        if pool.rng.random() < 0.1:
            sizes.append(1)
    if pool.rng.random() < 0.15:  # something that matches nowhere
        size = math.prod(shape)
        divisors = [d for d in range(1, size + 1) if size % d == 0]
        first = pool.rng.choice(divisors)
        sizes = [first, size // first]
    return tuple(sizes[:6]) if math.prod(sizes[:6]) == math.prod(shape) else (math.prod(shape),)


@draws("reshape", "view", "_unsafe_view", "reshape_as", "view_as")
def reshape(pool: Pool, op: str) -> None:
    x = pool.tensor(most=5)
    shape = list(_regrouped(pool, pool.shape_of(x)))
    if op.endswith("_as"):
        pool.emit(f"aten.{op}.default", x, pool.like(shape))
        return
    if shape and pool.rng.random() < 0.3:
        shape[pool.rng.randrange(len(shape))] = -1
    pool.emit(f"aten.{op}.default", x, tuple(shape))


@draws("ravel")
def ravel(pool: Pool, op: str) -> None:
    pool.emit("aten.ravel.default", pool.tensor())


@draws("flatten")
def flatten(pool: Pool, op: str) -> None:
    x = pool.tensor()
    rank = max(len(pool.shape_of(x)), 1)
    start = pool.rng.randrange(rank)
    pool.emit("aten.flatten.using_ints", x, start, pool.rng.choice((-1, pool.rng.randrange(start, rank))))


@draws("unflatten")
def unflatten(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1, most=4)
    dim = pool.dim(x)
    size = pool.shape_of(x)[dim]
    first = pool.rng.choice([d for d in range(1, size + 1) if size % d == 0])
    pool.emit("aten.unflatten.int", x, dim, (first, pool.rng.choice((size // first, -1))))


@draws("squeeze")
def squeeze(pool: Pool, op: str) -> None:
    x = pool.tensor()
    form = pool.rng.choice(("default", "dim", "dims") if pool.shape_of(x) else ("default",))
    dims = {"default": (), "dim": (pool.dim,), "dims": ()}[form]
    if form == "dims":
        rank = len(pool.shape_of(x))
        pool.emit("aten.squeeze.dims", x, tuple(sorted(pool.rng.sample(range(rank), min(2, rank)))))
    else:
        pool.emit(f"aten.squeeze.{form}", x, *(draw(x) for draw in dims))


@draws("unsqueeze")
def unsqueeze(pool: Pool, op: str) -> None:
    x = pool.tensor(most=4)
    rank = len(pool.shape_of(x))
    pool.emit("aten.unsqueeze.default", x, pool.rng.randrange(-rank - 1, rank + 1))


@draws("transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "permute", "t", "numpy_T", "mT", "mH", "adjoint")
def permutation(pool: Pool, op: str) -> None:
    x = pool.tensor(least=2 if op in ("mT", "mH", "adjoint") else 1, most=2 if op in ("t", "numpy_T") else 5)
    rank = len(pool.shape_of(x))
    if op in ("t", "numpy_T", "mT", "mH", "adjoint"):
        pool.emit(f"aten.{op}.default", x)
    elif op == "permute":
        order = pool.rng.sample(range(rank), rank)
        pool.emit("aten.permute.default", x, tuple(d - rank if pool.rng.random() < 0.3 else d for d in order))
    else:
        overload = {"transpose": "int", "movedim": "int", "moveaxis": "int"}.get(op, "default")
        pool.emit(f"aten.{op}.{overload}", x, pool.dim(x), pool.dim(x))


@draws("expand", "expand_as", "broadcast_to")
def expand(pool: Pool, op: str) -> None:
    x = pool.tensor(most=3, accept=lambda value: 1 in value.shape or value.numel() < 50)
    shape = tuple(pool.rng.choice((2, 3, 4, 6)) if size == 1 else size for size in pool.shape_of(x))
    if pool.rng.random() < 0.5:
        shape = (pool.rng.choice((1, 2, 3, 4)), *shape)
    if op == "expand_as":
        pool.emit("aten.expand_as.default", x, pool.like(shape))
        return
    kept = pool.shape_of(x)[::-1]
    requested = tuple(
        -1 if i < len(kept) and kept[i] == size and pool.rng.random() < 0.3 else size
        for i, size in enumerate(shape[::-1])
    )[::-1]
    pool.emit(f"aten.{op}.default", x, requested)


@draws("repeat")
def repeat(pool: Pool, op: str) -> None:
    x = pool.tensor(most=3, accept=lambda value: value.numel() < 150)
    counts = [pool.rng.choice((1, 1, 2, 3)) for _ in pool.shape_of(x)]
    lead = [pool.rng.choice((1, 2))] if pool.rng.random() < 0.3 or not counts else []
    pool.emit("aten.repeat.default", x, (*lead, *counts))
