"""Views: reshapes of every kind of run, permutations, expansions."""

import pytest
import torch

from strategies.rules.data_movement import matched

torch.manual_seed(1)


def x(*shape):
    return torch.randn(shape, dtype=torch.float64)


COVERS = """
_unsafe_view adjoint broadcast_to expand expand_as flatten mH mT moveaxis movedim numpy_T permute ravel repeat reshape
reshape_as squeeze swapaxes swapdims t transpose unflatten unsqueeze view view_as
"""
CASES = [
    ("view", lambda a: a.view(12, 6), x(12, 2, 3)),
    ("view split", lambda a: a.view(4, 3, 6), x(12, 6)),
    ("view uneven", lambda a: a.view(8, 9), x(12, 6)),
    ("view -1", lambda a: a.view(-1), x(12, 6)),
    ("view heads", lambda a: a.view(2, 6, 4, 3).transpose(1, 2), x(2, 6, 12)),
    ("view size one", lambda a: a.view(1, 6, 1, 12), x(6, 1, 12, 1)),
    ("view of a transpose", lambda a: a.t().reshape(-1), x(6, 12)),
    ("_unsafe_view", lambda a: torch.ops.aten._unsafe_view(a, [3, 24]), x(6, 12)),
    ("reshape", lambda a: a.reshape(6, 2, -1), x(12, 6)),
    ("flatten", lambda a: a.flatten(0, 1), x(2, 6, 4)),
    ("flatten all", torch.flatten, x(2, 6, 4)),
    ("flatten from", lambda a: a.flatten(start_dim=-2), x(6, 2, 4)),
    ("unflatten", lambda a: a.unflatten(1, (4, -1)), x(6, 12)),
    ("view_as", lambda a, b: a.view_as(b), x(6, 12), x(12, 6)),
    ("reshape_as", lambda a, b: a.reshape_as(b), x(6, 12), x(6, 2, 6)),
    ("view of bits", lambda a: a.view(torch.int64), torch.randint(0, 9, (6, 12))),
    ("squeeze", torch.squeeze, x(6, 1, 12, 1)),
    ("squeeze dim", lambda a: a.squeeze(-1), x(6, 12, 1)),
    ("squeeze dims", lambda a: a.squeeze((1, 3)), x(6, 1, 12, 1)),
    ("squeeze nothing", lambda a: a.squeeze(0), x(6, 12)),
    ("unsqueeze", lambda a: a.unsqueeze(dim=1), x(6, 12)),
    ("unsqueeze last", lambda a: a.unsqueeze(-1), x(6, 12)),
    ("transpose", lambda a: a.transpose(0, -1), x(6, 2, 12)),
    ("transpose keywords", lambda a: torch.transpose(a, dim0=1, dim1=0), x(6, 12)),
    ("t", torch.t, x(6, 12)),
    ("t of a vector", torch.t, x(6)),
    ("numpy_T", lambda a: a.T, x(6, 12)),
    ("mT", lambda a: a.mT, x(2, 6, 12)),
    ("permute", lambda a: a.permute(2, 0, -2), x(6, 2, 12)),
    ("movedim", lambda a: a.movedim(0, -1), x(6, 2, 12)),
    ("movedim several", lambda a: a.movedim((0, 1), (2, 0)), x(6, 2, 12)),
    ("moveaxis", lambda a: torch.moveaxis(a, -1, 0), x(6, 2, 12)),
    ("swapaxes", lambda a: torch.swapaxes(a, 0, 2), x(6, 2, 12)),
    ("swapdims", lambda a: torch.swapdims(a, 0, 1), x(6, 12)),
    ("expand", lambda a: a.expand(6, 12), x(6, 1)),
    ("expand new dims", lambda a: a.expand(4, 6, 12), x(12)),
    ("expand -1", lambda a: a.expand(6, -1, 4), x(6, 12, 1)),
    ("expand_as", lambda a, b: a.expand_as(b), x(6, 1), x(2, 6, 12)),
    ("broadcast_to", lambda a: torch.broadcast_to(a, (6, 12)), x(1, 12)),
    ("ravel", lambda a: a.ravel(), x(6, 12)),
    ("adjoint", lambda a: a.adjoint() + a.mH, x(2, 6, 4)),
    ("repeat both dims", lambda a: a.repeat(4, 2), x(6, 12)),
    ("repeat", lambda a: a.repeat(1, 2), x(6, 12)),
    ("repeat new dims", lambda a: a.repeat(3, 1, 1), x(6, 12)),
    ("contiguous after a view", lambda a: a.transpose(0, 1).contiguous().view(-1), x(6, 12)),
]


@pytest.mark.few(1)
def test_views(cases, check, mesh):
    check(cases, mesh, samples=4)


def test_every_rule_has_a_case(cases, uncovered):
    assert not uncovered(cases)


@pytest.mark.parametrize(
    ("before", "after", "left", "right", "sizes", "alone"),
    [
        ((6, 4, 5), (8, 3, 5), ("r0", None, "r1"), ("r0", None, "r1"), {"r0": 2, "r1": 5}, {"r1"}),
        ((8, 16, 32), (128, 32), ("r0", None, "r1"), ("r0", "r1"), {"r0": 8, "r1": 32}, {"r1"}),
        ((128, 32), (8, 16, 4, 8), ("r0", "r1"), ("r0", None, "r1", None), {"r0": 8, "r1": 4}, set()),
        ((1, 6, 1), (6,), (None, "r0", None), ("r0",), {"r0": 6}, {"r0"}),
        ((), (1, 1), (), (None, None), {}, set()),
    ],
)
def test_matched_runs(before, after, left, right, sizes, alone):
    assert matched(before, after) == (left, right, sizes, alone)
