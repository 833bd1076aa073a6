"""Cross products and distances."""

import pytest
import torch

from strategies.core.mesh import Mesh

torch.manual_seed(1)


def x(*shape):
    return torch.randn(shape, dtype=torch.float64)


COVERS = "cdist"
CASES = [
    ("linalg_cross", torch.linalg.cross, x(6, 3), x(6, 3)),
    ("linalg_cross of rows", lambda a, b: torch.linalg.cross(a, b, dim=0), x(3, 6), x(3, 1)),
    ("cross", lambda a, b: torch.cross(a, b, dim=1), x(6, 3, 4), x(6, 3, 4)),
    ("vecdot", torch.linalg.vecdot, x(7, 4), x(7, 4)),
    ("vecdot of rows", lambda a, b: torch.linalg.vecdot(a, b, dim=0), x(4, 6), x(4, 1)),
    ("cdist", torch.cdist, x(6, 3), x(4, 3)),
    ("cdist of batches", lambda a, b: torch.cdist(a, b, p=1.0), x(2, 6, 3), x(1, 4, 3)),
    ("cdist of many", torch.cdist, x(2, 36, 3), x(2, 6, 3)),
    ("cdist by products", lambda a, b: torch.cdist(a, b, compute_mode="use_mm_for_euclid_dist"), x(6, 3), x(4, 3)),
]


def test_vectors(cases, check):
    check(cases, Mesh((("a", 2),)), samples=2)


@pytest.mark.slow
def test_vectors_on_every_mesh(cases, check, mesh):
    check(cases, mesh, samples=4)


def test_every_rule_has_a_case(cases, uncovered):
    assert not uncovered(cases)
