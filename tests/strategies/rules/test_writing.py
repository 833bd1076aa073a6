"""Writing by index: assigned or accumulated, with the written dim and the values replicated and sharded."""

import pytest
import torch

from strategies.core.mesh import Mesh

torch.manual_seed(1)
aten = torch.ops.aten


def x(*shape):
    return torch.randn(shape, dtype=torch.float64)


def indices(high, *shape):
    return torch.randint(0, high, shape)


def places(high, *shape):
    """Indices without duplicates along the first dim: writing twice to one index is undefined."""
    return torch.rand(high, *shape[1:]).argsort(0)[: shape[0]]


def put(where, accumulate=False):
    """index_put of the last operand, with `where` the operands between as a list of indices."""
    return lambda a, *rest: aten.index_put(a, where(*rest[:-1]), rest[-1], accumulate)


COVERS = """
diagonal_scatter index_add index_copy index_fill index_put scatter scatter_add scatter_reduce select_scatter
slice_scatter
"""
CASES = [
    ("index_put", put(lambda i: [i]), x(12, 7), places(12, 6), x(6, 7)),
    ("index_put add", put(lambda i: [i], True), x(7, 4), indices(7, 12), x(12, 4)),
    ("index_put negative", put(lambda i: [i], True), x(6, 4), indices(6, 12) - 6, x(12, 4)),
    ("index_put broadcast", put(lambda i: [i], True), x(12, 4), indices(12, 6), x(4)),
    ("index_put one number", put(lambda i: [i]), x(12), places(12, 6), x().reshape(())),
    ("index_put inner", put(lambda i: [None, i], True), x(6, 7, 2), indices(7, 4, 6), x(6, 4, 6, 2)),
    ("index_put inner one", put(lambda i: [None, i]), x(6, 12), places(12, 4), x(6, 1)),
    ("index_put pairs", put(lambda i, j: [i, j], True), x(4, 6, 2), indices(4, 12), indices(6, 12), x(12, 2)),
    ("index_put apart", put(lambda i, j: [i, None, j], True), x(4, 7, 6), indices(4, 6), indices(6, 6), x(6, 7)),
    ("index_put pairs written", put(lambda i, j: [i, j]), x(12, 12, 2), places(12, 4), places(12, 4), x(4, 2)),
    ("index_put booleans", lambda a, i: aten.index_put(a > 0, [i], torch.tensor(True)), x(12), indices(12, 6)),
    ("inverse permutation", put(lambda i: [i]), torch.zeros(12).long(), places(12, 12), torch.arange(12)),
    ("index_add", lambda a, i, b: a.index_add(0, i, b), x(7, 5), indices(7, 12), x(12, 5)),
    ("index_add scaled", lambda a, i, b: a.index_add(-1, i, b, alpha=0.5), x(6, 12), indices(12, 4), x(6, 4)),
    ("index_copy", lambda a, i, b: a.index_copy(1, i, b), x(6, 12), places(12, 4), x(6, 4)),
    ("index_fill", lambda a, i: a.index_fill(0, i, 2.0), x(7, 4), indices(7, 3)),
    ("index_fill tensor", lambda a, i, v: a.index_fill(1, i, v), x(6, 12), indices(12, 4), x().reshape(())),
    ("scatter", lambda a, i, b: a.scatter(0, i, b), x(12, 6), places(12, 4, 6), x(4, 6)),
    ("scatter value", lambda a, i: a.scatter(1, i, 1.5), x(6, 7), indices(7, 6, 2)),
    ("scatter from larger", lambda a, i, b: a.scatter(1, i, b.detach()), x(6, 12), places(12, 4, 6).T, x(6, 7)),
    ("scatter into larger", lambda a, i, b: a.scatter(0, i, b), x(12, 6, 2), places(12, 4, 2, 2), x(4, 2, 2)),
    ("scatter reduce", lambda a, i: a.scatter(1, i, 2.0, reduce="multiply"), indices(9, 6, 12), indices(12, 6, 4)),
    ("scatter_add", lambda a, i, b: a.scatter_add(1, i, b), x(6, 7), indices(7, 6, 12), x(6, 12)),
    ("scatter_add rows", lambda a, i, b: a.scatter_add(0, i, b), x(12, 4), indices(12, 6, 4), x(6, 4)),
    ("scatter_add from larger", lambda a, i, b: a.scatter_add(0, i, b.detach()), x(6, 4), indices(6, 2, 4), x(6, 4)),
    *(
        (f"scatter_reduce {r}", lambda a, i, b, r=r: a.scatter_reduce(1, i, b, r), x(6, 4), indices(4, 6, 12), x(6, 12))
        for r in ("sum", "mean", "amax", "prod")
    ),
    ("select_scatter", lambda a, b: a.select_scatter(b, 1, -2), x(6, 4, 7), x(6, 7)),
    ("slice_scatter", lambda a, b: a.slice_scatter(b, 1, 2, 8, 2), x(6, 12), x(6, 3)),
    ("slice_scatter everything", lambda a, b: a.slice_scatter(b), x(6, 7), x(6, 7)),
    ("diagonal_scatter", lambda a, b: a.diagonal_scatter(b, 1, 0, 2), x(4, 7, 4), x(7, 3)),
]


def test_writing(cases, check):
    check(cases, Mesh((("a", 2), ("b", 3))), samples=1)


@pytest.mark.slow
def test_writing_on_every_mesh(cases, check, mesh):
    check(cases, mesh, samples=4)


def test_every_rule_has_a_case(cases, uncovered):
    assert not uncovered(cases)
