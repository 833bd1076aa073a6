"""Running sums and products, sorting and differences."""

import pytest
import torch

from strategies.core.mesh import Mesh

torch.manual_seed(1)


def x(*shape):
    return torch.randn(shape, dtype=torch.float64)


COVERS = "cumsum"
CASES = [
    ("cumsum", lambda a: a.cumsum(dim=0), x(6, 7)),
    ("cumsum uneven", lambda a: torch.cumsum(a, -1), x(2, 7)),
    ("cumsum between", lambda a: a.cumsum(1), x(2, 12, 2)),
    ("cumsum of booleans", lambda a: (a > 0).cumsum(0), x(7, 4)),
    ("cumsum as", lambda a: a.cumsum(0, dtype=torch.float32), torch.randint(0, 9, (12,))),
    ("cumprod", lambda a: a.cumprod(-1), x(6, 12)),
    ("logcumsumexp", lambda a: a.logcumsumexp(0), x(6, 12)),
    ("cummax", lambda a: a.cummax(1), x(6, 12)),
    ("cummin", lambda a: a.cummin(-2), x(6, 7)),
    ("sort", torch.sort, x(6, 12)),
    ("sort stable", lambda a: torch.sort(a, dim=0, descending=True, stable=True), x(6, 7)),
    ("argsort", torch.argsort, x(7, 12)),
    ("argsort dim", lambda a: torch.argsort(a, 0, descending=True), x(6, 12)),
    ("argsort stable", lambda a: torch.argsort(a, dim=-1, stable=True), torch.randint(0, 3, (6, 12))),
    ("topk", lambda a: a.topk(3), x(7, 12)),
    ("topk dim", lambda a: a.topk(2, dim=0, largest=False), x(6, 12)),
    ("msort", torch.msort, x(6, 12)),
    ("diff", torch.diff, x(7, 12)),
    ("diff dim", lambda a: torch.diff(a, n=2, dim=0), x(6, 12)),
    ("diff prepend", lambda a, b: torch.diff(a, dim=1, prepend=b), x(6, 12), x(6, 1)),
    ("diff append", lambda a, b, c: torch.diff(a, dim=-2, prepend=b, append=c), x(6, 12), x(2, 12), x(1, 12)),
]


def test_scans(cases, check):
    check(cases, Mesh((("a", 2), ("b", 2))), samples=1)


@pytest.mark.slow
def test_scans_on_every_mesh(cases, check, mesh):
    check(cases, mesh, samples=4)


def test_every_rule_has_a_case(cases, uncovered):
    assert not uncovered(cases)
