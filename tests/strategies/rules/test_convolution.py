"""Convolutions with strides, paddings, dilations and groups; batch, channels in and out, and groups sliced."""

import pytest
import torch
import torch.nn.functional as F

from strategies.rules import rule_of

torch.manual_seed(1)


def x(*shape):
    return torch.randn(shape, dtype=torch.float64)


COVERS = "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution"
CASES = [
    ("conv1d", lambda a, w, b: F.conv1d(a, w, b, 2, 1), x(6, 4, 9), x(12, 4, 3), x(12)),
    ("conv1d plain", lambda a, w: F.conv1d(a, w, dilation=2), x(6, 12, 9), x(6, 12, 3)),
    ("conv1d same", lambda a, w, b: F.conv1d(a, w, b, padding="same"), x(6, 4, 9), x(6, 4, 3), x(6)),
    ("conv1d unbatched", lambda a, w, b: F.conv1d(a, w, b), x(12, 5), x(6, 12, 2), x(6)),
    ("conv2d", lambda a, w, b: F.conv2d(a, w, b, (2, 1), (1, 0), (1, 2)), x(6, 4, 7, 5), x(12, 4, 3, 2), x(12)),
    ("conv2d valid", lambda a, w: F.conv2d(a, w, padding="valid"), x(2, 6, 5, 5), x(6, 6, 3, 3)),
    ("conv2d same", lambda a, w, b: F.conv2d(a, w, b, padding="same"), x(2, 6, 5, 5), x(6, 6, 3, 3), x(6)),
    ("conv2d groups", lambda a, w, b: F.conv2d(a, w, b, 1, 1, 1, 6), x(2, 12, 5, 4), x(18, 2, 3, 3), x(18)),
    ("conv2d depthwise", lambda a, w, b: F.conv2d(a, w, b, groups=6), x(2, 6, 5, 4), x(6, 1, 3, 3), x(6)),
    ("conv2d depthwise, two each", lambda a, w: F.conv2d(a, w, groups=6), x(2, 6, 5, 4), x(12, 1, 3, 3)),
    ("conv2d groups same", lambda a, w: F.conv2d(a, w, padding="same", groups=2), x(3, 4, 5, 4), x(6, 2, 3, 3)),
    ("conv2d unbatched", lambda a, w, b: F.conv2d(a, w, b, groups=2), x(4, 5, 4), x(6, 2, 3, 3), x(6)),
    ("conv2d pointwise", lambda a, w, b: F.conv2d(a, w, b), x(2, 12, 3, 3), x(6, 12, 1, 1), x(6)),
    ("conv3d", lambda a, w, b: F.conv3d(a, w, b, 1, (1, 0, 1)), x(2, 6, 3, 3, 2), x(6, 6, 2, 3, 2), x(6)),
    ("transposed 1", lambda a, w, b: F.conv_transpose1d(a, w, b, 2, 1, 1), x(6, 4, 5), x(4, 12, 3), x(12)),
    ("transposed 2", lambda a, w, b: F.conv_transpose2d(a, w, b, (2, 1)), x(2, 6, 3, 3), x(6, 6, 3, 2), x(6)),
    (
        "transposed 2 groups",
        lambda a, w, b: F.conv_transpose2d(a, w, b, groups=6),
        x(2, 12, 3, 3),
        x(12, 2, 3, 2),
        x(12),
    ),
    ("transposed 2 unbatched", lambda a, w: F.conv_transpose2d(a, w), x(6, 3, 3), x(6, 4, 3, 2)),
    ("transposed 3", lambda a, w: F.conv_transpose3d(a, w, dilation=2), x(2, 6, 3, 3, 2), x(6, 4, 2, 2, 2)),
    ("any", lambda a, w, b: torch.convolution(a, w, b, [1], [1], [1], False, [0], 2), x(2, 4, 5), x(6, 2, 3), x(6)),
    (
        "any transposed",
        lambda a, w, b: torch.convolution(a, w, b, [1], [1], [1], True, [0], 1),
        x(2, 4, 5),
        x(4, 6, 3),
        x(6),
    ),
    ("time first", lambda a, w, b: torch.conv_tbc(a, w, b, 1), x(7, 6, 4), x(3, 4, 6), x(6)),
    ("uneven", lambda a, w, b: F.conv2d(a, w, b), x(5, 4, 3, 3), x(7, 4, 2, 2), x(7)),
    ("uneven transposed", lambda a, w, b: F.conv_transpose1d(a, w, b), x(5, 4, 3), x(4, 7, 2), x(7)),
]


@pytest.mark.few(1)
def test_convolution(cases, check, mesh):
    check(cases, mesh, samples=2)


def test_every_rule_has_a_case(cases, uncovered):
    assert not uncovered(cases)


@pytest.mark.parametrize(
    ("case", "flops"),
    [
        ("conv2d", 2 * (6 * 12 * 4 * 3) * (4 * 3 * 2)),
        ("conv2d groups", 2 * (2 * 18 * 5 * 4) * (2 * 3 * 3)),
        ("transposed 2", 2 * (2 * 6 * 3 * 3) * (6 * 3 * 2)),
    ],
)
def test_flops(cases, case, flops):
    """Two per multiplication, forward, where nothing is saved at the borders."""
    graph = cases.captured.graph
    (operator,) = (o for o in graph.operators if "conv" in o.op and cases.case_of(f"{o.module}.x") == case)
    assert rule_of(operator, graph).flops == flops
