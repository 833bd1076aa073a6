"""Operators that make a larger tensor from one or several."""

import pytest
import torch
import torch.nn.functional as F

from strategies.core.mesh import Mesh

torch.manual_seed(1)


def x(*shape):
    return torch.randn(shape, dtype=torch.float64)


COVERS = "column_stack constant_pad_nd dstack hstack meshgrid pad repeat_interleave row_stack stack tile vstack"
CASES = [
    ("pad", lambda a: F.pad(a, (1, 2)), x(6, 12)),
    ("pad rows", lambda a: F.pad(a, (0, 0, 1, 0), value=2.0), x(2, 6, 7)),
    ("pad reflect", lambda a: F.pad(a, (2, 1), mode="reflect"), x(2, 6, 12)),
    ("pad replicate", lambda a: F.pad(a, (2, 1, 0, 3), mode="replicate"), x(2, 6, 3, 4)),
    ("pad circular", lambda a: F.pad(a, (2, 1), mode="circular"), x(2, 7, 12)),
    ("pad less", lambda a: F.pad(a, (-2, 1)), x(6, 12)),
    ("constant_pad_nd", lambda a: torch.constant_pad_nd(a, (1, 1), 3.0), x(6, 12)),
    ("cat", lambda a, b: torch.cat((a, b)), x(6, 12), x(2, 12)),
    ("cat negative", lambda a, b: torch.cat((a, b, a), dim=-1), x(7, 12), x(7, 1)),
    ("cat with nothing", lambda a, b: torch.cat((a, b)), x(6, 12), x(0)),
    ("concat", lambda a, b: torch.concat((a, b), 1), x(6, 12), x(6, 6)),
    ("concatenate", lambda a, b: torch.concatenate((a, b), 0), x(6, 12), x(6, 12)),
    ("stack", lambda a, b: torch.stack((a, b)), x(6, 7), x(6, 7)),
    ("stack last", lambda a, b: torch.stack((a, b), dim=-1), x(6, 12), x(6, 12)),
    ("hstack", lambda a, b: torch.hstack((a, b)), x(6, 12), x(6, 1)),
    ("hstack of vectors", lambda a, b: torch.hstack((a, b)), x(6), x(4)),
    ("vstack", lambda a, b: torch.vstack((a, b)), x(6, 7), x(2, 7)),
    ("row_stack of vectors", lambda a, b: torch.row_stack((a, b)), x(6), x(6)),
    ("dstack", lambda a, b: torch.dstack((a, b)), x(6, 4, 2), x(6, 4, 1)),
    ("dstack of matrices", lambda a, b: torch.dstack((a, b)), x(6, 7), x(6, 7)),
    ("dstack of vectors", lambda a, b: torch.dstack((a, b)), x(6), x(6)),
    ("column_stack", lambda a, b: torch.column_stack((a, b)), x(6, 4), x(6, 2)),
    ("column_stack of vectors", lambda a, b: torch.column_stack((a, b)), x(6), x(6)),
    ("column_stack of both", lambda a, b: torch.column_stack((a, b)), x(6), x(6, 2)),
    ("meshgrid", lambda *a: torch.meshgrid(*a, indexing="ij"), x(6), x(4), x(7)),
    ("meshgrid xy", lambda *a: torch.meshgrid(*a, indexing="xy"), x(6), x(12)),
    ("repeat_interleave", lambda a: a.repeat_interleave(2, dim=0), x(6, 7)),
    ("repeat_interleave last", lambda a: a.repeat_interleave(3, -1), x(6, 4)),
    ("repeat_interleave sized", lambda a: a.repeat_interleave(2, dim=0, output_size=12), x(6, 7)),
    ("repeat_interleave flat sized", lambda a: a.repeat_interleave(2, output_size=48), x(6, 4)),
    ("repeat_interleave flat", lambda a: a.repeat_interleave(2), x(6, 4)),
    (
        "repeat_interleave several",
        lambda a, n: a.repeat_interleave(n, 1, output_size=9),
        x(6, 4),
        torch.tensor([2, 0, 3, 4]),
    ),
    (
        "repeat_interleave several flat",
        lambda a, n: a.repeat_interleave(n, output_size=9),
        x(4),
        torch.tensor([2, 0, 3, 4]),
    ),
    ("places of repeated", lambda n: torch.repeat_interleave(n, output_size=9), torch.tensor([2, 0, 3, 4])),
    ("tile", lambda a: a.tile((6, 1)), x(3, 7)),
    ("tile last", lambda a: torch.tile(a, (4,)), x(6, 2)),
    ("tile new", lambda a: a.tile((2, 1, 6)), x(6, 2)),
]


def test_joins(cases, check):
    check(cases, Mesh((("a", 2), ("b", 2))), samples=1)


@pytest.mark.slow
def test_joins_on_every_mesh(cases, check, mesh):
    check(cases, mesh, samples=4)


def test_every_rule_has_a_case(cases, uncovered):
    assert not uncovered(cases)


def test_calls_that_need_everything_run_replicated(cases, known):
    assert known(cases, "cat") == [True, True, True]
    assert known(cases, "column_stack") == [True, True, False]
    assert known(cases, "repeat_interleave") == [True, True, True, True, True, True, False, False]
