"""Pooling in one, two and three dimensions, with and without batch; unfold, fold and shuffles."""

import pytest
import torch
import torch.nn.functional as F

torch.manual_seed(1)


def x(*shape):
    return torch.randn(shape, dtype=torch.float64)


LINES, PICTURES, VOLUMES = x(6, 12, 7), x(6, 4, 5, 7), x(2, 6, 4, 5, 3)


def unpooled(a):
    return F.max_unpool2d(*F.max_pool2d(a, 2, return_indices=True), 2)


COVERS = """
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
adaptive_max_pool3d avg_pool1d avg_pool2d avg_pool3d col2im fractional_max_pool2d fractional_max_pool3d im2col
max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices max_unpool2d
max_unpool3d pixel_shuffle pixel_unshuffle
"""
CASES = [
    ("max 1", lambda a: F.max_pool1d(a, 3, 2, 1), LINES),
    ("max 1 tiled", lambda a: F.max_pool1d(a, 2, 4), x(2, 3, 16)),
    ("max 2 tiled", lambda a: F.max_pool2d(a, 2), x(2, 2, 8, 12)),
    ("max 2 dilated between strides", lambda a: F.max_pool2d(a, 2, (3, 2), dilation=(2, 1)), x(2, 12, 8)),
    ("average 2 tiled", lambda a: F.avg_pool2d(a, 2, (2, 4), ceil_mode=True), x(2, 2, 8, 16)),
    ("average 3 tiled", lambda a: F.avg_pool3d(a, (1, 2, 2), (1, 2, 3), divisor_override=3), x(2, 1, 4, 8, 9)),
    ("max 1 unbatched", lambda a: F.max_pool1d(a, 3), x(6, 7)),
    ("max 1 indices", lambda a: F.max_pool1d(a, 3, return_indices=True), LINES),
    ("max 2", lambda a: F.max_pool2d(a, 2, dilation=2), PICTURES),
    ("max 2 unbatched", lambda a: F.max_pool2d(a, (2, 3), padding=1, ceil_mode=True), x(12, 5, 7)),
    ("max 2 indices", lambda a: F.max_pool2d(a, 2, return_indices=True), PICTURES),
    ("max 3", lambda a: F.max_pool3d(a, 2), VOLUMES),
    ("max 3 indices", lambda a: F.max_pool3d(a, 2, 1, return_indices=True), VOLUMES),
    ("average 1", lambda a: F.avg_pool1d(a, 3, 2, 1), LINES),
    ("average 2", lambda a: F.avg_pool2d(a, 2, padding=1, count_include_pad=False), PICTURES),
    ("average 3", lambda a: F.avg_pool3d(a, 2, divisor_override=3), VOLUMES),
    ("lp 1", lambda a: F.lp_pool1d(a.abs(), 2, 3), LINES),
    ("lp 2", lambda a: F.lp_pool2d(a.abs(), 3, 2), PICTURES),
    ("adaptive average 1", lambda a: F.adaptive_avg_pool1d(a, 3), LINES),
    ("adaptive average 2", lambda a: F.adaptive_avg_pool2d(a, (None, 2)), PICTURES),
    ("global average", lambda a: F.adaptive_avg_pool2d(a, 1), x(12, 4, 3)),
    ("adaptive average 3", lambda a: F.adaptive_avg_pool3d(a, (2, 3, 2)), VOLUMES),
    ("adaptive max 1", lambda a: F.adaptive_max_pool1d(a, 3), LINES),
    ("adaptive max 2", lambda a: F.adaptive_max_pool2d(a, 3, return_indices=True), PICTURES),
    ("adaptive max 3", lambda a: F.adaptive_max_pool3d(a, 2), VOLUMES),
    ("unpooled 2", unpooled, x(6, 4, 4, 6)),
    ("unpooled 3", lambda a: F.max_unpool3d(*F.max_pool3d(a, 2, return_indices=True), 2), x(2, 6, 2, 4, 2)),
    (
        "fractional 2",
        lambda a, s: F.fractional_max_pool2d(a, 2, (3, 3), None, True, s.detach()),
        PICTURES,
        torch.rand(6, 4, 2).double(),
    ),
    (
        "fractional 2 unbatched",
        lambda a, s: F.fractional_max_pool2d(a, 2, (3, 3), _random_samples=s.detach()),
        x(6, 5, 7),
        torch.rand(1, 6, 2).double(),
    ),
    (
        "fractional 3",
        lambda a, s: F.fractional_max_pool3d(a, 1, 2, _random_samples=s.detach()),
        VOLUMES,
        torch.rand(2, 6, 3).double(),
    ),
    ("unfold", lambda a: F.unfold(a, (2, 3), 2, 1, 1), PICTURES),
    ("unfold unbatched", lambda a: F.unfold(a, 2), x(6, 4, 5)),
    ("fold", lambda a: F.fold(a, (4, 5), (2, 1)), x(6, 8, 15)),
    ("fold unbatched", lambda a: F.fold(a, (4, 5), (2, 1)), x(12, 15)),
    ("pixel shuffle", lambda a: F.pixel_shuffle(a, 2), x(2, 24, 6, 4)),
    ("pixel shuffle unbatched", lambda a: F.pixel_shuffle(a, 2), x(12, 4, 6)),
    ("pixel unshuffle", lambda a: F.pixel_unshuffle(a, 2), x(2, 6, 8, 12)),
    ("channel shuffle", lambda a: F.channel_shuffle(a, 2), x(6, 4, 12, 2)),
    ("uneven", lambda a: F.max_pool2d(a, 2), x(5, 7, 4, 4)),
    ("uneven average", lambda a: F.adaptive_avg_pool2d(a, 2), x(5, 7, 3, 4)),
    ("uneven unfold", lambda a: F.unfold(a, 2), x(5, 4, 3, 4)),
]


@pytest.mark.few(1)
def test_pooling(cases, check, mesh):
    check(cases, mesh, samples=1)


def test_every_rule_has_a_case(cases, uncovered):
    assert not uncovered(cases)
