"""Lookup in whole and sliced tables, with padding_idx in any slice."""

import torch
import torch.nn.functional as F

torch.manual_seed(1)


def table():
    return torch.randn(12, 6, dtype=torch.float64)


def tokens(*shape):
    return torch.randint(0, 12, shape)


CASES = [
    ("embedding", lambda i, t: F.embedding(i, t), tokens(6, 4), table()),
    ("one dim", lambda i, t: F.embedding(i, t), tokens(6), table()),
    ("one index", lambda i, t: F.embedding(i, t), tokens(1).reshape(()), table()),
    *((f"padding {p}", lambda i, t, p=p: F.embedding(i, t, p), tokens(6, 4), table()) for p in (0, 3, 7, -1)),
    ("tied", lambda i, t: F.linear(F.embedding(i, t), t), tokens(6, 4), table()),
    ("by frequency", lambda i, t: F.embedding(i, t, scale_grad_by_freq=True), tokens(6, 4), table()),
]


def test_embedding(cases, check, mesh):
    check(cases, mesh, samples=8)


def test_every_rule_has_a_case(cases, uncovered):
    assert not uncovered(cases, "embedding")


def test_gradients_scaled_by_frequency_run_whole(cases, known):
    """The counts are of the whole batch."""
    assert known(cases, "embedding") == [True] * 8 + [False]
