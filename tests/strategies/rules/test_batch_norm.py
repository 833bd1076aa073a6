"""Batch and instance norm: statistics over sharded batches and images, running statistics, eval mode."""

import pytest
import torch
import torch.nn.functional as F

from strategies.rules.normalization import batch_norm_training, instance_norm_training
from strategies.rules.registry import RULES

# operators that capture makes are reached here under a name of their own
LIBRARY = torch.library.Library("norm_tests", "FRAGMENT")
for made in (batch_norm_training, instance_norm_training):
    arguments = "Tensor x, Tensor? w, Tensor? b, Tensor mean, Tensor variance, float momentum, float eps"
    LIBRARY.define(f"{made.__name__}({arguments}) -> (Tensor, Tensor, Tensor)")
    LIBRARY.impl(made.__name__, made, "CompositeImplicitAutograd")
    RULES[f"norm_tests::{made.__name__}"] = RULES[made.__name__]
OPS = torch.ops.norm_tests

torch.manual_seed(1)


def x(*shape):
    return torch.randn(shape, dtype=torch.float64)


def far(*shape):
    """Data far from zero, where a variance by squares minus square of the mean would lose its digits."""
    return x(*shape) + 1000


C = 6
AFFINE = (x(C), x(C))
STATISTICS = (x(C), x(C).abs() + 0.1)
COVERS = "batch_norm batch_norm_training instance_norm instance_norm_training"
CASES = [
    ("training", lambda a, w, b, *s: OPS.batch_norm_training(a, w, b, *s, 0.1, 1e-5), x(12, C), *AFFINE, *STATISTICS),
    ("plain", lambda a, *s: OPS.batch_norm_training(a, None, None, *s, 0.3, 1e-3), far(6, C, 12), *STATISTICS),
    ("weight", lambda a, w, *s: OPS.batch_norm_training(a, w, None, *s, 0.1, 0.5), x(6, C, 4, 12), x(C), *STATISTICS),
    (
        "volumes",
        lambda a, w, b, *s: OPS.batch_norm_training(a, w, b, *s, 1.0, 1e-5),
        x(2, C, 2, 3, 4),
        *AFFINE,
        *STATISTICS,
    ),
    ("no history", lambda a, w, b: F.batch_norm(a, None, None, w, b, True), x(6, C, 2, 12), *AFFINE),
    ("no history, plain", lambda a: F.batch_norm(a, None, None, training=True, eps=0.1), far(12, C)),
    (
        "evaluation",
        lambda a, m, v, w, b: F.batch_norm(a, m.detach(), v.detach(), w, b),
        x(6, C, 2, 12),
        *STATISTICS,
        *AFFINE,
    ),
    ("instances", lambda a, w, b: F.instance_norm(a, None, None, w, b), x(6, C, 4, 2), *AFFINE),
    ("instances plain", lambda a: F.instance_norm(a), x(6, C, 12)),
    (
        "instances evaluated",
        lambda a, m, v: F.instance_norm(a, m.detach(), v.detach(), use_input_stats=False),
        x(6, C, 12),
        *STATISTICS,
    ),
    (
        "instances counted",
        lambda a, w, b, *s: OPS.instance_norm_training(a, w, b, *s, 0.1, 1e-5),
        x(6, C, 12),
        *AFFINE,
        *STATISTICS,
    ),
]


@pytest.mark.few(1)
def test_batch_norm(cases, check, mesh):
    check(cases, mesh, samples=3)


def test_every_rule_has_a_case(cases, uncovered):
    assert not uncovered(cases)


@pytest.mark.parametrize("function", [batch_norm_training, instance_norm_training])
def test_one_device_equals_torch(function):
    """Output and gradient bit by bit, and the statistics that torch writes into its operands."""
    torchs = F.batch_norm if function is batch_norm_training else F.instance_norm
    a, w, b, (mean, variance) = torch.randn(4, C, 5, requires_grad=True), torch.rand(C), torch.rand(C), STATISTICS
    written = mean.float(), variance.float()
    given = mean.float(), variance.float()
    found = function(a, w, b, *given, 0.2, 1e-5)
    want = torchs(a, *written, w, b, True, 0.2, 1e-5)
    assert torch.equal(found[0], want)
    assert torch.equal(found[1], written[0])
    assert torch.equal(found[2], written[1])
    assert torch.equal(given[0], mean.float())
    assert not found[1].requires_grad
    probe = torch.randn_like(want)
    assert torch.equal(*(torch.autograd.grad((y * probe).sum(), a)[0] for y in (found[0], want)))
