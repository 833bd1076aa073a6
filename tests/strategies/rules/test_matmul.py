"""Products, with every number of dims, broadcast batches, biases and sliced contractions."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from strategies.core.mesh import Mesh
from strategies.rules import rule_of
from strategies.rules.registry import LOCAL_FUNCTIONS, RULES

torch.manual_seed(1)


def x(*shape):
    return torch.randn(shape, dtype=torch.float64)


CASES = [
    ("linear", F.linear, x(6, 12), x(18, 12), x(18)),
    ("linear without bias", F.linear, x(6, 12), x(18, 12)),
    ("linear on one row", F.linear, x(12), x(6, 12), x(6)),
    ("linear on three dims", F.linear, x(2, 6, 12), x(6, 12), x(6)),
    ("linear on four dims", F.linear, x(2, 1, 6, 12), x(6, 12)),
    ("linear with a vector", F.linear, x(6, 12), x(12)),
    ("linear with one column", F.linear, x(6, 12), x(1, 12), x(1)),
    ("mm", torch.mm, x(6, 12), x(12, 4)),
    ("bmm", torch.bmm, x(6, 4, 12), x(6, 12, 2)),
    ("mv", torch.mv, x(6, 12), x(12)),
    ("dot", torch.dot, x(12), x(12)),
    ("outer", torch.outer, x(6), x(12)),
    ("matmul 1 1", torch.matmul, x(12), x(12)),
    ("matmul 1 2", torch.matmul, x(12), x(12, 6)),
    ("matmul 2 1", torch.matmul, x(6, 12), x(12)),
    ("matmul 2 2", torch.matmul, x(6, 12), x(12, 4)),
    ("matmul 1 3", torch.matmul, x(12), x(6, 12, 4)),
    ("matmul 3 1", torch.matmul, x(6, 4, 12), x(12)),
    ("matmul 3 2", torch.matmul, x(6, 4, 12), x(12, 2)),
    ("matmul 2 3", torch.matmul, x(4, 12), x(6, 12, 2)),
    ("matmul 4 4", torch.matmul, x(2, 6, 4, 12), x(2, 6, 12, 4)),
    ("matmul broadcast", torch.matmul, x(6, 1, 4, 12), x(2, 12, 4)),
    ("matmul of views", lambda a: a @ a.transpose(-1, -2), x(6, 4, 12)),
    ("addmm", torch.addmm, x(4), x(6, 12), x(12, 4)),
    ("addmm rows", torch.addmm, x(6, 1), x(6, 12), x(12, 4)),
    ("addmm scaled", lambda b, a, c: torch.addmm(b, a, c, beta=0.5, alpha=2), x(6, 4), x(6, 12), x(12, 4)),
    ("baddbmm", torch.baddbmm, x(6, 4, 2), x(6, 4, 12), x(6, 12, 2)),
    ("baddbmm rows", lambda b, a, c: torch.baddbmm(b, a, c, beta=0.5, alpha=2), x(2), x(6, 4, 12), x(6, 12, 2)),
]


@pytest.mark.few(1)
def test_products(cases, check, mesh):
    check(cases, mesh, samples=5)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda found: replace(found, sums=frozenset()),
        lambda found: replace(found, operands=(*found.operands[:2], (None,))),
    ],
    ids=["forgets the sum", "replicates the bias"],
)
def test_a_broken_rule_is_detected(capture_cases, check, monkeypatch, break_it):
    """The check can fail: a linear rule without its sum, or with a wrong operand, gives a wrong result or an error."""
    cases = capture_cases(CASES[:1])
    mesh = Mesh((("a", 2),))
    check(cases, mesh, samples=0)
    rule = RULES["linear"]
    monkeypatch.setitem(RULES, "linear", lambda operator, specs: break_it(rule(operator, specs)))
    with pytest.raises((AssertionError, RuntimeError)):
        check(capture_cases(CASES[:1]), mesh, samples=0)  # a rule is evaluated once per graph


def test_a_bias_that_every_slice_adds_is_detected(capture_cases, check, monkeypatch):
    cases = capture_cases(CASES[:1])
    monkeypatch.setitem(LOCAL_FUNCTIONS, "first_slice_only", lambda bias, position: bias)
    with pytest.raises(AssertionError, match="linear"):
        check(cases, Mesh((("a", 2),)), samples=0)


def test_factors_are_named_in_the_order_of_the_operands(cases):
    """The order decides how counts become axes: batch, rows, contraction, columns."""
    graph = cases.captured.graph
    factors = {o.op: rule_of(o, graph).factors for o in reversed(graph.operators)}
    assert factors["linear"] == ("batch0", "k", "n")
    assert factors["mm"] == ("m", "k", "n")
    assert factors["bmm"] == ("b", "m", "k", "n")
