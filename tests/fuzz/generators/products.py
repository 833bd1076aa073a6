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


@draws("matmul", "linalg_matmul")
def matmul(pool: Pool, op: str) -> None:
    left = pool.tensor(least=1, most=4)
    *lead, k = pool.shape_of(left)
    if len(lead) == 0 or pool.rng.random() < 0.15:
        right = pool.like((k,) if pool.rng.random() < 0.5 else (k, pool.rng.choice(SIZES)))
    else:
        right = pool.like((*pool.broadcasting(lead[:-1]), k, pool.rng.choice(SIZES)))
    pool.emit(f"aten.{op}.default", left, right)


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


@draws("addbmm", "addmv", "addr")
def added(pool: Pool, op: str) -> None:
    rank = {"addbmm": 3, "addmv": 2, "addr": 1}[op]
    left = pool.tensor(rank, rank)
    *lead, k = pool.shape_of(left)
    n = pool.rng.choice(SIZES)
    right = {"addbmm": (*lead[:1], k, n), "addmv": (k,), "addr": (n,)}[op]
    out = {"addbmm": (*lead[1:], n), "addmv": tuple(lead), "addr": (k, n)}[op]
    bias = pool.like(pool.broadcasting(out) or (1,))
    more = {"beta": 0.5, "alpha": 2} if pool.rng.random() < 0.4 else {}
    pool.emit(f"aten.{op}.default", bias, left, pool.like(right), **more)


@draws("bilinear")
def bilinear(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1, most=3)
    *lead, first = pool.shape_of(x)
    second, out = pool.rng.choice((1, 2, 3, 4)), pool.rng.choice((1, 2, 4, 6))
    weight = pool.floats((out, first, second), -0.5, 0.5)
    bias = pool.floats((out,)) if pool.rng.random() < 0.5 else None
    pool.emit("aten.bilinear.default", x, pool.like((*lead, second)), weight, bias)


EQUATIONS = (
    ("ij,jk->ik", 2, 2),
    ("ij,kj->ik", 2, 2),
    ("...i,ij->...j", 3, 2),
    ("bij,bjk->bik", 3, 3),
    ("bhqd,bhkd->bhqk", 4, 4),
    ("gte,gtd->ged", 3, 3),
    ("ij,ij->", 2, 2),
    ("ij,ij->i", 2, 2),
    ("i,j->ji", 1, 1),
    ("ijk->kji", 3, 0),
    ("ijk->j", 3, 0),
    ("ii->i", 2, 0),
)


@draws("einsum")
def einsum(pool: Pool, op: str) -> None:
    equation, left, right = pool.rng.choice(EQUATIONS)
    indices = equation.partition("->")[0].split(",")
    x = pool.tensor(left, left, accept=lambda value: equation != "ii->i" or value.shape[0] == value.shape[1])
    if not right:
        pool.emit("aten.einsum.default", equation, (x,))
        return
    sizes = dict(zip(indices[0][::-1], pool.shape_of(x)[::-1], strict=False))
    shape = tuple(sizes.get(index, pool.rng.choice((1, 2, 3, 4, 6, 8))) for index in indices[1])
    pool.emit("aten.einsum.default", equation, (x, pool.like(shape)))


@draws("tensordot", "inner")
def tensordot(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1, most=3)
    shape = pool.shape_of(x)
    n = pool.rng.choice((1, 2, 3, 4, 6))
    if op == "inner":
        pool.emit("aten.inner.default", x, pool.like((n, shape[-1])))
    else:
        pool.emit("aten.tensordot.default", x, pool.like((shape[-1], n)), (len(shape) - 1,), (0,))


@draws("kron", "ger", "vdot")
def of_vectors(pool: Pool, op: str) -> None:
    rank = 2 if op == "kron" else 1
    x = pool.tensor(rank, rank, accept=lambda value: value.numel() <= 40)
    shape = pool.shape_of(x)
    other = {"kron": (pool.rng.choice((1, 2, 3)), 2), "ger": (pool.rng.choice(SIZES),), "vdot": shape}[op]
    pool.emit(f"aten.{op}.default", x, pool.like(other))


@draws("chain_matmul", "linalg_multi_dot")
def chained(pool: Pool, op: str) -> None:
    x = pool.tensor(2, 2)
    a, b = pool.rng.choice((1, 2, 3, 4, 6)), pool.rng.choice((1, 2, 3, 4, 6))
    pool.emit(f"aten.{op}.default", (x, pool.like((pool.shape_of(x)[1], a)), pool.like((a, b))))
