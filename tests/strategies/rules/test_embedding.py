"""Lookup in replicated and sharded tables, with padding_idx in any slice."""

import pytest
import torch
import torch.nn.functional as F

from strategies.core.mesh import Mesh

torch.manual_seed(1)


def table(rows=12, width=6):
    return torch.randn(rows, width, dtype=torch.float64)


def tokens(*shape, high=12):
    return torch.randint(0, high, shape)


def bags(**options):
    return lambda i, t: F.embedding_bag(i, t, **options)


COVERS = "embedding embedding_bag one_hot"
CASES = [
    ("embedding", lambda i, t: F.embedding(i, t), tokens(6, 4), table()),
    ("one dim", lambda i, t: F.embedding(i, t), tokens(6), table()),
    ("one index", lambda i, t: F.embedding(i, t), tokens(1).reshape(()), table()),
    *((f"padding {p}", lambda i, t, p=p: F.embedding(i, t, p), tokens(6, 4), table()) for p in (0, 3, 7, -1)),
    ("tied", lambda i, t: F.linear(F.embedding(i, t), t), tokens(6, 4), table()),
    *((f"uneven {n}", lambda i, t: F.embedding(i, t), tokens(6, 4, high=n), table(n, 5)) for n in (7, 9, 11)),
    *((f"uneven padding {p}", lambda i, t, p=p: F.embedding(i, t, p), tokens(6, high=7), table(7)) for p in (0, 6, -3)),
    ("uneven tied", lambda i, t: F.linear(F.embedding(i, t), t), tokens(6, 4, high=7), table(7)),
    ("by frequency", lambda i, t: F.embedding(i, t, scale_grad_by_freq=True), tokens(6, 4), table()),
    *((f"bags {mode}", bags(mode=mode), tokens(6, 4), table(12, 7)) for mode in ("sum", "mean", "max")),
    ("bags padding", bags(mode="mean", padding_idx=3), tokens(6, 4), table()),
    ("bags by frequency", bags(mode="sum", scale_grad_by_freq=True), tokens(6, 4), table()),
    (
        "bags weighted",
        lambda i, o, t, w: F.embedding_bag(i, t, o, mode="sum", per_sample_weights=w, include_last_offset=True),
        tokens(12),
        torch.tensor([0, 3, 3, 9, 12]),
        table(),
        torch.randn(12, dtype=torch.float64),
    ),
    *((f"one_hot {n}", lambda i, n=n: F.one_hot(i, n), tokens(6, 2, high=n)) for n in (7, 12)),
]


def test_embedding(cases, check):
    check(cases, Mesh((("a", 2), ("b", 3))), samples=1)


@pytest.mark.slow
def test_embedding_on_every_mesh(cases, check, mesh):
    check(cases, mesh, samples=4)


def test_every_rule_has_a_case(cases, uncovered):
    assert not uncovered(cases)
