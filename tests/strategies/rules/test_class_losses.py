"""Cross-entropy and nll over replicated and sharded classes: ignored targets, class weights, smoothing, probabilities,
further dims, classes that do not divide, scores of -inf."""

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from strategies.core.mesh import Mesh
from strategies.rules.losses import class_slice_loss, divided, target_weight

torch.manual_seed(1)
REDUCTIONS = ("none", "mean", "sum")


def x(*shape):
    return torch.randn(shape, dtype=torch.float64)


def inside(*shape):
    return torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1


def classes(*shape, high=5):
    """Classes below `high`; the first half of the rows is ignored, so that some slices hold no target that counts."""
    target = torch.randint(0, high, shape)
    target[: shape[0] // 2] = -100
    return target


def probabilities(*shape):
    return x(*shape).softmax(1)


def loss(function, **options):
    """The loss as a function of tensors alone."""
    return lambda *tensors: function(*tensors, **options)


def weighted(function, **options):
    """The same with class weights as the last tensor; they are not trained."""
    return lambda *tensors: function(*tensors[:-1], weight=tensors[-1].detach(), **options)


def masked(scores, target):
    """Classes that a model rules out: with 12 classes a slice of them has nothing else."""
    return F.cross_entropy(scores.masked_fill(torch.arange(12) >= 6, -math.inf), target)


SHAPES = ((12, 6), (4, 5, 6), (4, 7, 2, 3))
COVERS = "cross_entropy_loss nll_loss nll_loss2d nll_loss_nd"
CASES = [
    *(
        (f"{f.__name__} {r} {shape}", loss(f, reduction=r), x(*shape), classes(shape[0], *shape[2:], high=shape[1]))
        for f, r, shape in product((F.cross_entropy, F.nll_loss), REDUCTIONS, SHAPES)
    ),
    *(
        (f"ce weight {r} {n}", weighted(F.cross_entropy, reduction=r), x(12, n), classes(12), inside(n))
        for r, n in product(REDUCTIONS, (5, 12))
    ),
    *(
        (f"nll weight {r} {n}", weighted(F.nll_loss, reduction=r), x(4, n, 6), classes(4, 6), inside(n))
        for r, n in product(REDUCTIONS, (6, 7))
    ),
    *(
        (f"ce smooth {r} {n}", loss(F.cross_entropy, reduction=r, label_smoothing=0.2), x(12, n), classes(12))
        for r, n in product(REDUCTIONS, (6, 7))
    ),
    *(
        (
            f"ce smooth weight {r} {n}",
            weighted(F.cross_entropy, reduction=r, label_smoothing=0.2),
            x(4, n, 3),
            classes(4, 3),
            inside(n),
        )
        for r, n in product(REDUCTIONS, (5, 12))
    ),
    *(
        (
            f"ce probabilities {r} {shape}",
            loss(F.cross_entropy, reduction=r, label_smoothing=0.1),
            x(*shape),
            probabilities(*shape),
        )
        for r, shape in product(REDUCTIONS, ((12, 5), (4, 6, 6)))
    ),
    ("ce probabilities weight", weighted(F.cross_entropy), x(12, 5), probabilities(12, 5), inside(5)),
    ("nll_loss", torch.ops.aten.nll_loss, x(12, 6), classes(12)),
    ("nll_loss2d", lambda a, t: torch.ops.aten.nll_loss2d(a, t, None, 1, 3), x(4, 5, 2, 3), classes(4, 2, 3) % 5),
    ("ce ignores 2", loss(F.cross_entropy, ignore_index=2), x(12, 5), torch.randint(0, 5, (12,))),
    ("ce of one row", F.cross_entropy, x(7), torch.tensor(3)),
    ("ce of one row of probabilities", F.cross_entropy, x(6), x(6).softmax(0)),
    ("ce counts nothing", loss(F.cross_entropy), x(12, 6), torch.full((12,), -100)),
    ("ce of ruled out classes", masked, x(4, 12), torch.tensor([0, 5, 3, 2])),
    ("ce of large scores", F.cross_entropy, x(4, 7) * 1e4, torch.tensor([0, 6, 3, 2])),
]


@pytest.mark.slow
def test_class_losses(cases, check):
    check(cases, Mesh((("a", 2), ("b", 3))), samples=1)


@pytest.mark.slow
def test_class_losses_on_every_mesh(cases, check, mesh):
    check(cases, mesh, samples=4)


def test_every_rule_has_a_case(cases, uncovered):
    assert not uncovered(cases)


def test_counts_of_targets_are_exact_in_half_precision():
    """bfloat16 cannot hold 301: the count must not pass through it."""
    scores, target = torch.zeros(301, 3, dtype=torch.bfloat16), torch.zeros(301, dtype=torch.int64)
    count = target_weight(scores, target, None, -100)
    assert count.item() == 301
    assert divided(torch.tensor(602.0, dtype=torch.bfloat16), count).dtype == torch.bfloat16


@pytest.mark.parametrize("target", [12, -1])
def test_a_target_outside_the_classes_is_an_error(target):
    """No slice owns it: it must not alias a target of another slice."""
    with pytest.raises(IndexError, match="outside the 12 classes"):
        class_slice_loss(x(2, 3), torch.tensor([0, target]), None, None, 3, 12, -100, 0.0, True)
