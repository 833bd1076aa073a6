"""Linear algebra on well-conditioned matrices with distinct eigenvalues."""

from __future__ import annotations

import torch

from strategies.core.graph import Ref
from tests.fuzz.generators.table import draws
from tests.fuzz.pool import Pool


def _square(pool: Pool, symmetric: bool = False) -> Ref:
    """Matrices [..., n, n] with 1, 2, 3 ... on the diagonal and small numbers off it."""
    n, batch = pool.rng.choice((2, 3, 4)), pool.shape(0, 2, (1, 2, 3, 4, 6))
    noise = 0.2 * torch.rand((*batch, n, n), dtype=torch.float64, generator=pool.generator)
    matrix = torch.diag_embed(torch.arange(1, n + 1, dtype=torch.float64)) + noise
    return pool.source((matrix + matrix.mT) / 2 if symmetric else matrix)


@draws("det", "inverse", "linalg_det", "linalg_inv", "linalg_matrix_exp", "logdet", "matrix_exp")
def of_a_matrix(pool: Pool, op: str) -> None:
    pool.emit(f"aten.{op}.default", _square(pool))


@draws("linalg_slogdet", "slogdet")
def slogdet(pool: Pool, op: str) -> None:
    pool.call(f"aten.{op}.default", _square(pool))


@draws("linalg_matrix_power", "matrix_power")
def matrix_power(pool: Pool, op: str) -> None:
    pool.emit(f"aten.{op}.default", _square(pool), pool.rng.choice((2, -1)))


@draws("cholesky", "linalg_cholesky", "linalg_eigvalsh")
def of_a_symmetric_matrix(pool: Pool, op: str) -> None:
    """The operator reads one triangle, so the other one has no gradient to agree on: both are made equal first."""
    x = _square(pool, symmetric=True)
    even = pool.emit("aten.mul.Tensor", pool.emit("aten.add.Tensor", x, pool.emit("aten.mT.default", x)), 0.5)
    pool.emit(f"aten.{op}.default", even)


@draws("linalg_svdvals", "linalg_pinv", "pinverse")
def of_any_matrix(pool: Pool, op: str) -> None:
    pool.emit(f"aten.{op}.default", _square(pool), *((1e-12,) if "pinv" in op else ()))


@draws("linalg_matrix_norm", "linalg_diagonal")
def of_the_last_dims(pool: Pool, op: str) -> None:
    """A matrix norm is the Frobenius norm, which is smooth away from zero."""
    x = pool.tensor(least=2)
    pool.away_from(x, 0.0)
    pool.emit(f"aten.{op}.{'str_ord' if op == 'linalg_matrix_norm' else 'default'}", x)


@draws("linalg_vecdot")
def vecdot(pool: Pool, op: str) -> None:
    x = pool.tensor(least=1)
    pool.emit("aten.linalg_vecdot.default", x, pool.like(pool.shape_of(x)), dim=pool.dim(x))


@draws("linalg_eigh", "linalg_svd", "linalg_qr")
def decomposition(pool: Pool, op: str) -> None:
    """The loss uses squares of the vectors, which do not depend on their signs (torch rejects other losses of them)."""
    for result in pool.call(f"aten.{op}.default", _square(pool, symmetric=op == "linalg_eigh")):
        pool.emit("aten.square.default", result)
        pool.forget(result)


@draws("linalg_solve", "linalg_solve_triangular", "cholesky_solve")
def solved(pool: Pool, op: str) -> None:
    matrix = _square(pool)
    *batch, n, _ = pool.shape_of(matrix)
    right = pool.like((*batch, n, pool.rng.choice((1, 2, 3))))
    if op == "linalg_solve":
        pool.emit("aten.linalg_solve.default", matrix, right)
    elif op == "cholesky_solve":
        pool.emit("aten.cholesky_solve.default", right, pool.emit("aten.tril.default", matrix))
    else:
        triangle = pool.emit("aten.triu.default", matrix)
        pool.emit("aten.linalg_solve_triangular.default", triangle, right, upper=True)


@draws("cross", "linalg_cross")
def cross(pool: Pool, op: str) -> None:
    x = pool.like((*pool.shape(0, 2), 3))
    other = pool.like(pool.shape_of(x))
    pool.emit(f"aten.{op}.default", x, other, *((-1,) if op == "cross" else ()))


@draws("cdist")
def cdist(pool: Pool, op: str) -> None:
    """Distances of points from other points."""
    batch, width = pool.shape(0, 2, (1, 2, 3)), pool.rng.choice((2, 3, 4))
    near = pool.floats((*batch, pool.rng.choice((2, 3, 4, 6)), width), 0.0, 1.0)
    far = pool.floats((*batch, pool.rng.choice((2, 3, 4, 6)), width), 2.0, 3.0)
    pool.emit("aten.cdist.default", near, far)
