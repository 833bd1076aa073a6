"""Tensors made from numbers: constants, series, identities, and the like of other tensors."""

import pytest
import torch

from strategies.core.mesh import Mesh
from strategies.rules import rule_of

torch.manual_seed(1)
DOUBLE = torch.float64


def x(*shape):
    return torch.randn(shape, dtype=DOUBLE)


COVERS = """
arange bartlett_window blackman_window empty eye fft_fftfreq fft_rfftfreq full hamming_window hann_window
kaiser_window linspace logspace new_empty new_full new_ones new_zeros ones scalar_tensor tril_indices triu_indices
zeros
"""
CASES = [
    ("zeros", lambda: torch.zeros(6, 7, dtype=DOUBLE)),
    ("ones", lambda: torch.ones(12)),
    ("full", lambda: torch.full((6, 12), 2.5, dtype=DOUBLE)),
    ("full of booleans", lambda: torch.full((7,), True)),
    ("empty", lambda: torch.full_like(torch.empty(6, 12), 3.0)),
    ("scalar_tensor", lambda: torch.scalar_tensor(2.5, dtype=DOUBLE)),
    ("zeros into", lambda a: a * torch.zeros(7, dtype=DOUBLE) + torch.ones(6, 1, dtype=DOUBLE), x(6, 7)),
    ("new_zeros", lambda a: a.new_zeros((6, 7)), x(6, 7)),
    ("new_ones", lambda a: a.new_ones(6, 5, dtype=torch.int64), x(6, 7)),
    ("new_full", lambda a: a.new_full((12,), 2.0), x(7, 4)),
    ("new_empty", lambda a: torch.zeros_like(a.new_empty((6, 4))), x(6, 12)),
    ("new of one number", lambda a: a.new_zeros(()), x(6, 12)),
    ("arange", lambda: torch.arange(12)),
    ("arange uneven", lambda: torch.arange(7, dtype=torch.int32)),
    ("arange from", lambda: torch.arange(-3, 8)),
    ("arange by", lambda: torch.arange(20, -3, -4)),
    ("arange as floats", lambda: torch.arange(2, 14, dtype=DOUBLE)),
    ("arange of floats", lambda: torch.arange(0.1, 1.3, 0.1, dtype=DOUBLE)),
    ("arange of floats to", lambda: torch.arange(6.5)),
    ("arange into", lambda a: a * torch.arange(7)[None] * torch.arange(6, dtype=DOUBLE)[:, None], x(6, 7)),
    ("linspace", lambda: torch.linspace(-1, 1, 7, dtype=DOUBLE)),
    ("logspace", lambda: torch.logspace(0, 2, 12)),
    ("fftfreq", lambda: torch.fft.fftfreq(7, 0.5)),
    ("rfftfreq", lambda: torch.fft.rfftfreq(12)),
    *(
        (f"{name}_window", lambda name=name: getattr(torch, f"{name}_window")(7, dtype=DOUBLE))
        for name in ("bartlett", "blackman", "hamming", "hann", "kaiser")
    ),
    ("eye", lambda: torch.eye(7, dtype=DOUBLE)),
    ("eye of rows", lambda: torch.eye(6, 11, dtype=torch.bool)),
    ("tril_indices", lambda: torch.tril_indices(3, 4)),
    ("triu_indices", lambda: torch.triu_indices(4, 4, 1)),
    ("linspace of tensors", lambda a: torch.linspace(a, a * 2, 6), torch.tensor(1)),
]


def test_factories(cases, check):
    check(cases, Mesh((("a", 2),)), samples=2)


@pytest.mark.slow
def test_factories_on_every_mesh(cases, check, mesh):
    check(cases, mesh, samples=4)


def test_every_rule_has_a_case(cases, uncovered):
    assert not uncovered(cases)


def test_a_tensor_that_gives_only_its_dtype_may_have_any_layout(cases):
    """It need not be gathered: the sharding of its dims does not affect the result."""
    graph = cases.captured.graph
    (operator,) = (o for o in graph.operators if o.op == "new_full")
    found = rule_of(operator, graph)
    assert found.operands == (("x0", "x1"),) and found.results == (("d0",),) and not found.sums
