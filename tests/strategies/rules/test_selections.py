"""Operators that take parts of a tensor, with positive, negative and keyword dims, and dims that do not divide."""

import pytest
import torch

from strategies.core.mesh import Mesh
from strategies.rules import rule_of

torch.manual_seed(1)


def x(*shape):
    return torch.randn(shape, dtype=torch.float64)


COVERS = "diag_embed slice tril triu"
CASES = [
    ("slice", lambda a: a[:, 2:8], x(6, 12)),
    ("slice step", lambda a: a[::2], x(6, 7)),
    ("slice every second", lambda a: a[..., ::2] * a[..., 1::2].exp(), x(6, 12)),
    ("slice every third", lambda a: a[-5::3], x(6, 4)),
    ("slice negative", lambda a: a[..., -4:], x(6, 12)),
    ("slice everything", lambda a: torch.ops.aten.slice(a, 0, 0, 9223372036854775807), x(7, 12)),
    ("select", lambda a: a[:, 3], x(6, 12)),
    ("select negative", lambda a: a.select(-1, -2), x(6, 2, 12)),
    ("narrow", lambda a: a.narrow(1, 2, 4), x(7, 12)),
    ("unbind", lambda a: a.unbind(-2), x(6, 2, 7)),
    ("split", lambda a: a.split(4, dim=1), x(6, 12)),
    ("split sizes", lambda a: a.split((2, 4)), x(6, 12)),
    ("split_with_sizes", lambda a: torch.split_with_sizes(a, (2, 10), 1), x(6, 12)),
    ("chunk", lambda a: a.chunk(3, -1), x(7, 12)),
    ("tensor_split", lambda a: a.tensor_split(5, 1), x(6, 12)),
    ("unsafe_chunk", lambda a: torch.unsafe_chunk(a, 3, 1), x(6, 12)),
    ("unsafe_split", lambda a: torch.unsafe_split(a, 4, 1), x(6, 12)),
    ("unsafe_split_with_sizes", lambda a: torch.unsafe_split_with_sizes(a, (4, 8), 1), x(6, 12)),
    ("hsplit", lambda a: torch.hsplit(a, 2), x(6, 12)),
    ("hsplit of a vector", lambda a: torch.hsplit(a, (2, 5)), x(12)),
    ("vsplit", lambda a: torch.vsplit(a, (2, 3)), x(6, 7)),
    ("dsplit", lambda a: torch.dsplit(a, 2), x(6, 4, 2)),
    ("linalg_diagonal", torch.linalg.diagonal, x(7, 4, 4)),
    ("tril", torch.tril, x(2, 6, 12)),
    ("tril below", lambda a: a.tril(-2), x(7, 6)),
    ("triu", lambda a: a.triu(1), x(6, 12)),
    ("triu wide", lambda a: a.triu(diagonal=-3), x(12, 5)),
    ("flip", lambda a: a.flip(0), x(6, 12)),
    ("flip dims", lambda a: a.flip((0, -1)), x(6, 7, 12)),
    ("flip nothing", lambda a: a.flip(()), x(6, 7)),
    ("roll", lambda a: a.roll(2, 1), x(6, 12)),
    ("roll dims", lambda a: a.roll((1, 2), (0, -1)), x(6, 2, 12)),
    ("roll flat", lambda a: a.roll(5), x(6, 12)),
    ("fliplr", torch.fliplr, x(6, 12)),
    ("flipud", torch.flipud, x(6, 7)),
    ("rot90", lambda a: torch.rot90(a, 1, (0, 1)), x(6, 4, 7)),
    ("unfold", lambda a: a.unfold(1, 4, 2), x(6, 12, 2)),
    ("diagonal", lambda a: a.diagonal(), x(6, 12)),
    ("diagonal dims", lambda a: a.diagonal(1, -1, 0), x(4, 6, 7)),
    ("diag_embed", torch.diag_embed, x(6, 7)),
    ("diag_embed dims", lambda a: torch.diag_embed(a, 1, 0, 2), x(6, 4)),
]


def test_selections(cases, check):
    check(cases, Mesh((("a", 2),)), samples=2)


@pytest.mark.slow
def test_selections_on_every_mesh(cases, check, mesh):
    check(cases, mesh, samples=4)


def test_every_rule_has_a_case(cases, uncovered):
    assert not uncovered(cases)


def test_a_roll_over_everything_has_nothing_to_slice(cases):
    graph = cases.captured.graph
    factors = [rule_of(operator, graph).factors for operator in graph.operators if operator.op == "roll"]
    assert all(factors[:2]) and not factors[2]
