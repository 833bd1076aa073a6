"""Interpolation in every mode, by size and by factor; sampling at grid positions."""

import pytest
import torch
import torch.nn.functional as F

torch.manual_seed(1)


def x(*shape):
    return torch.randn(shape, dtype=torch.float64)


LINES, PICTURES, VOLUMES = x(6, 12, 3), x(6, 4, 3, 4), x(2, 6, 2, 3, 2)


def by(mode, **options):
    return lambda a: F.interpolate(a, mode=mode, **options)


aten = torch.ops.aten
COVERS = """
_upsample_bicubic2d_aa _upsample_bilinear2d_aa upsample_bicubic2d
_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d affine_grid_generator grid_sampler
grid_sampler_2d grid_sampler_3d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d
upsample_nearest3d upsample_trilinear3d
"""
CASES = [
    ("nearest 1", by("nearest", scale_factor=2), LINES),
    ("nearest 2", by("nearest", size=(5, 3)), PICTURES),
    ("nearest 3", by("nearest", scale_factor=(2, 1, 2)), VOLUMES),
    ("nearest 2 by size", lambda a: aten.upsample_nearest2d.default(a, [5, 7]), PICTURES),
    ("exact 1", by("nearest-exact", size=5), LINES),
    ("exact 2", by("nearest-exact", scale_factor=1.5), PICTURES),
    ("exact 3", by("nearest-exact", size=3), VOLUMES),
    ("linear", by("linear", scale_factor=2), LINES),
    ("bilinear", by("bilinear", size=(5, 3)), PICTURES),
    ("bilinear corners", by("bilinear", scale_factor=1.5, align_corners=True), PICTURES),
    ("bilinear by size", lambda a: aten.upsample_bilinear2d.default(a, [5, 7], True), PICTURES),
    ("bilinear smooth", by("bilinear", size=(2, 2), antialias=True), PICTURES),
    ("bicubic", by("bicubic", scale_factor=2), PICTURES),
    ("bicubic smooth", by("bicubic", size=(2, 3), antialias=True), PICTURES),
    ("bicubic corners", by("bicubic", size=(7, 2), align_corners=True), PICTURES),
    ("bicubic uneven", by("bicubic", scale_factor=1.4), x(2, 2, 7, 5)),
    ("smooth uneven", by("bilinear", size=(5, 3), antialias=True), x(2, 2, 13, 7)),
    ("smooth, one place wide", by("bilinear", size=(4, 1), antialias=True), x(2, 2, 12, 6)),
    ("smooth by size", lambda a: aten._upsample_bicubic2d_aa.default(a, [4, 6], False), x(2, 2, 12, 12)),
    ("trilinear", by("trilinear", scale_factor=2), VOLUMES),
    ("uneven", by("bilinear", scale_factor=2), x(5, 7, 2, 2)),
    ("grid", lambda a, g: F.grid_sample(a, g, align_corners=False), PICTURES, x(6, 12, 2, 2).tanh()),
    ("grid nearest", lambda a, g: F.grid_sample(a, g, "nearest", "border", True), PICTURES, x(6, 3, 6, 2)),
    ("grid in space", lambda a, g: F.grid_sample(a, g, align_corners=True), VOLUMES, x(2, 3, 2, 6, 3).tanh()),
    ("grid 2 itself", lambda a, g: aten.grid_sampler_2d(a, g, 0, 1, True), PICTURES, x(6, 12, 2, 2)),
    ("grid 3 itself", lambda a, g: aten.grid_sampler_3d(a, g, 0, 1, True), VOLUMES, x(2, 3, 2, 6, 3)),
    ("uneven grid", lambda a, g: F.grid_sample(a, g, align_corners=False), x(2, 7, 3, 4), x(2, 3, 3, 2).tanh()),
    ("affine", lambda t: F.affine_grid(t, (12, 3, 4, 6), align_corners=False), x(12, 2, 3)),
    ("affine in space", lambda t: F.affine_grid(t, (5, 3, 2, 3, 2), align_corners=True), x(5, 3, 4)),
]


@pytest.mark.slow
def test_resampling(cases, check, mesh):
    check(cases, mesh, samples=1)


def test_every_rule_has_a_case(cases, uncovered):
    assert not uncovered(cases)
