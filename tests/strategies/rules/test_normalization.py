"""Softmax and norms over positive and negative dims, with and without weight and bias."""

import torch
import torch.nn.functional as F

torch.manual_seed(1)


def x(*shape):
    return torch.randn(shape, dtype=torch.float64)


COVERS = "_weight_norm group_norm layer_norm rms_norm"
CASES = [
    ("softmax", lambda a: a.softmax(-1), x(6, 4, 12)),
    ("softmax first", lambda a: F.softmax(a, dim=0), x(6, 12)),
    ("softmax as", lambda a: F.softmax(a, 1, dtype=torch.float64), x(6, 12)),
    ("softmax of a scalar", lambda a: a.softmax(0), x().reshape(())),
    ("log_softmax", lambda a: a.log_softmax(1), x(6, 4, 12)),
    ("layer_norm", lambda a, w, b: F.layer_norm(a, (12,), w, b), x(6, 2, 12), x(12), x(12)),
    ("layer_norm plain", lambda a: F.layer_norm(a, (12,)), x(6, 12)),
    ("layer_norm two dims", lambda a, w: F.layer_norm(a, (4, 12), w), x(6, 4, 12), x(4, 12)),
    ("rms_norm", lambda a, w: F.rms_norm(a, (12,), w, 1e-6), x(6, 2, 12), x(12)),
    ("group_norm", lambda a, w, b: F.group_norm(a, 2, w, b), x(6, 4, 3), x(4), x(4)),
    ("group_norm plain", lambda a: F.group_norm(a, 2), x(6, 4)),
    ("group_norm of many groups", lambda a, w, b: F.group_norm(a, 12, w, b, 0.1), x(2, 24, 3, 2), x(24), x(24)),
    ("group_norm of single channels", lambda a, w: F.group_norm(a, 6, w), x(6, 6, 3), x(6)),
    ("glu", lambda a: F.glu(a, 1), x(6, 4, 12)),
    ("glu last", lambda a: F.glu(a), x(6, 4)),
    ("weight norm", lambda v, g: torch._weight_norm(v, g, 0), x(6, 12), x(6, 1)),
    ("weight norm of filters", lambda v, g: torch._weight_norm(v, g, 1), x(6, 12, 3), x(1, 12, 1)),
    ("cosine", lambda a, b: F.cosine_similarity(a, b), x(6, 12, 4), x(6, 12, 4)),
    ("cosine broadcast", lambda a, b: F.cosine_similarity(a, b, -1), x(6, 1, 4), x(12, 4)),
    ("distance", lambda a, b: F.pairwise_distance(a, b), x(6, 12), x(6, 12)),
    ("distance kept", lambda a, b: F.pairwise_distance(a, b, 1, keepdim=True), x(12, 6, 4), x(6, 4)),
    ("uneven softmax", lambda a: a.softmax(1), x(7, 4, 5)),
    ("uneven layer_norm", lambda a, w, b: F.layer_norm(a, (4,), w, b), x(7, 5, 4), x(4), x(4)),
    ("uneven rms_norm", lambda a, w: F.rms_norm(a, (4,), w), x(7, 5, 4), x(4)),
    ("layer_norm without eps", lambda a, w: F.layer_norm(a, (4,), w, eps=0), x(7, 5, 4), x(4)),
]


def test_normalization(cases, check, mesh):
    check(cases, mesh, samples=2)


def test_every_rule_has_a_case(cases, uncovered):
    assert not uncovered(cases)
