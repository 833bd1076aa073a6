"""Contractions by name: einsum in its forms, tensordot, inner, bilinear, products of several matrices."""

import pytest
import torch
import torch.nn.functional as F

from strategies.core.mesh import Mesh
from strategies.rules import rule_of

torch.manual_seed(1)


def x(*shape):
    return torch.randn(shape, dtype=torch.float64)


def einsum(equation):
    return lambda *operands: torch.einsum(equation, *operands)


EQUATIONS = [
    ("bsd,bde->bse", (2, 4, 6), (2, 6, 7)),
    ("ij,kj", (4, 6), (7, 6)),
    ("ij", (4, 6)),
    ("ij->", (4, 6)),
    ("ij->ji", (4, 7)),
    ("bhsd,bhtd->bhst", (2, 2, 3, 4), (2, 2, 5, 4)),
    ("...ij,...jk->...ik", (2, 1, 4, 6), (3, 6, 4)),
    ("...ij,jk", (2, 4, 6), (6, 3)),
    ("i...,i...->...", (4, 6, 3), (4, 1, 3)),
    ("...->...", (4, 6)),
    ("ii->i", (6, 6)),
    ("bii,ij->bj", (4, 6, 6), (6, 4)),
    ("gtec,gtd->gecd", (2, 4, 4, 3), (2, 4, 6)),
    ("gecd,edf->gecf", (2, 4, 3, 6), (4, 6, 5)),
    ("gtec,gecd->gtd", (2, 4, 4, 3), (2, 4, 3, 6)),
    ("a,b,c->abc", (4,), (6,), (3,)),
    ("ab,bc,cd->ad", (4, 6), (6, 2), (2, 4)),
    ("ab,ab->b", (1, 6), (4, 6)),
    (" i j , j k -> i k ", (4, 6), (6, 4)),
    ("i,->i", (6,), ()),
]

COVERS = "chain_matmul einsum kron linalg_multi_dot tensordot"
CASES = [
    *((equation, einsum(equation), *(x(*shape) for shape in shapes)) for equation, *shapes in EQUATIONS),
    ("tensordot", lambda a, b: torch.tensordot(a, b, 1), x(4, 6), x(6, 7)),
    ("tensordot dims", lambda a, b: torch.tensordot(a, b, dims=([2, -3], [1, 0])), x(4, 6, 2), x(4, 2, 6)),
    ("tensordot nothing", lambda a, b: torch.tensordot(a, b, 0), x(4), x(6)),
    ("inner", torch.inner, x(2, 4, 6), x(3, 6)),
    ("inner of a scalar", torch.inner, x(4, 6), x().reshape(())),
    ("vdot", torch.vdot, x(12), x(12)),
    ("linalg_matmul", torch.linalg.matmul, x(2, 4, 6), x(6, 7)),
    ("ger", torch.ger, x(4), x(7)),
    ("multi_dot", lambda *a: torch.linalg.multi_dot(a), x(4, 6), x(6, 2), x(2, 7)),
    ("multi_dot of vectors", lambda *a: torch.linalg.multi_dot(a), x(6), x(6, 4), x(4)),
    ("chain_matmul", lambda *a: torch.ops.aten.chain_matmul(a), x(4, 6), x(6, 2), x(2, 7)),
    ("bilinear", F.bilinear, x(4, 6), x(4, 3), x(7, 6, 3), x(7)),
    ("bilinear without bias", F.bilinear, x(2, 4, 6), x(2, 4, 3), x(7, 6, 3)),
    ("addmv", torch.addmv, x(4), x(4, 6), x(6)),
    ("addmv scaled", lambda a, b, c: torch.addmv(a, b, c, beta=0.5, alpha=2), x(1), x(4, 6), x(6)),
    ("addr", torch.addr, x(6), x(4), x(6)),
    ("addbmm", torch.addbmm, x(1, 7), x(2, 4, 6), x(2, 6, 7)),
    ("kron", torch.kron, x(4, 6), x(3, 2)),
    ("kron of a longer one", torch.kron, x(6), x(3, 2)),
]


def test_einsum(cases, check):
    check(cases, Mesh((("a", 2), ("b", 2))), samples=1)


@pytest.mark.slow
def test_einsum_on_every_mesh(cases, check, mesh):
    check(cases, mesh, samples=6)


def test_every_rule_has_a_case(cases, uncovered):
    assert not uncovered(cases)


def test_diagonals_scalars_and_shorter_operands_are_replicated(cases, known):
    assert known(cases, "inner") == [True, False]
    assert known(cases, "kron") == [True, False]


def test_experts_shard_the_dispatched_tokens(cases):
    """Groups and experts are factors both of dispatch and of the experts' products: between a plan that shards the one
    and a plan that shards the other stands an all_to_all."""
    graph = cases.captured.graph
    found = {o.args[0]: rule_of(o, graph) for o in graph.operators if o.op == "einsum"}
    dispatch, experts = found["gtec,gtd->gecd"], found["gecd,edf->gecf"]
    assert dispatch.results[0][:2] == experts.operands[0][:2] == ("g", "e")
    assert experts.operands[1] == ("e", "d", "f")
    assert dispatch.sums == {"t"} and experts.sums == {"d"}
