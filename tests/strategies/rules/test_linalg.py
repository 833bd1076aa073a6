"""Batches of matrices: inverses, determinants, factorizations, solutions."""

import pytest
import torch
from torch import linalg

from strategies.core.mesh import Mesh

torch.manual_seed(1)


def x(*shape):
    return torch.randn(shape, dtype=torch.float64)


def definite(a):
    return a @ a.mT + torch.eye(a.shape[-1], dtype=a.dtype)


CASES = [
    ("inv", linalg.inv, x(6, 3, 3)),
    ("inverse", lambda a: torch.ops.aten.inverse(a), x(2, 6, 3, 3)),
    ("det", linalg.det, x(6, 3, 3)),
    ("det of a batch", lambda a: torch.ops.aten.det(a), x(6, 3, 3)),
    ("logdet", lambda a: torch.logdet(definite(a)), x(6, 3, 3)),
    ("slogdet", linalg.slogdet, x(6, 3, 3)),
    ("cholesky", lambda a: linalg.cholesky(definite(a)), x(6, 3, 3)),
    ("cholesky_solve", lambda a, b: torch.cholesky_solve(b, linalg.cholesky(definite(a))), x(6, 3, 3), x(6, 3, 2)),
    ("eigh", lambda a: linalg.eigh(definite(a))[0], x(6, 3, 3)),
    ("eigvalsh", lambda a: linalg.eigvalsh(definite(a)), x(6, 3, 3)),
    ("matrix_exp", linalg.matrix_exp, x(6, 3, 3)),
    ("matrix_power", lambda a: linalg.matrix_power(a, 3), x(6, 3, 3)),
    ("pinv", linalg.pinv, x(6, 4, 3)),
    *((name, getattr(torch, name), x(6, 3, 3)) for name in ("matrix_exp", "pinverse", "slogdet")),
    ("torch.cholesky", lambda a: torch.ops.aten.cholesky(definite(a)), x(6, 3, 3)),
    ("torch.matrix_power", lambda a: torch.matrix_power(a, 2), x(6, 3, 3)),
    ("qr", linalg.qr, x(6, 4, 3)),
    ("svd", lambda a: linalg.svd(a, full_matrices=False)[1], x(6, 4, 3)),
    ("svdvals", linalg.svdvals, x(6, 4, 3)),
    ("solve", linalg.solve, x(6, 3, 3), x(6, 3, 2)),
    ("solve for vectors", linalg.solve, x(6, 3, 3), x(6, 3)),
    ("solve for one vector", linalg.solve, x(3, 3), x(3)),
    ("solve_triangular", lambda a, b: linalg.solve_triangular(a, b, upper=True), definite(x(6, 3, 3)), x(6, 3, 2)),
    ("solve that broadcasts", linalg.solve, x(6, 1, 3, 3), x(6, 2, 3, 2)),
]


def test_linalg(cases, check):
    check(cases, Mesh((("a", 2),)), samples=2)


@pytest.mark.slow
def test_linalg_on_every_mesh(cases, check, mesh):
    check(cases, mesh, samples=4)


def test_batches_that_broadcast_have_a_rule(cases, known):
    assert known(cases, "linalg_solve") == [True, True, True, True]
