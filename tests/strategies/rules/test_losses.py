"""Losses of elements and of rows with every reduction."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from strategies.core.mesh import Mesh

torch.manual_seed(1)
REDUCTIONS = ("none", "mean", "sum")


def x(*shape):
    return torch.randn(shape, dtype=torch.float64)


def inside(*shape):
    return torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1


def signs(*shape):
    return torch.randint(0, 2, shape) * 2 - 1


def loss(function, **options):
    """The loss as a function of tensors alone."""
    return lambda *tensors: function(*tensors, **options)


def weighted(function, **options):
    """The same with weights as the last tensor; they are not trained."""
    return lambda *tensors: function(*tensors[:-1], weight=tensors[-1].detach(), **options)


def kl(a, b, reduction, log_target=False):
    """F.kl_div without its warning about reduction="mean"."""
    return torch.ops.aten.kl_div(a, b, REDUCTIONS.index(reduction), log_target=log_target)


ELEMENT = [
    (F.mse_loss, {}, x),
    (F.l1_loss, {}, x),
    (F.smooth_l1_loss, {"beta": 0.5}, x),
    (F.huber_loss, {"delta": 0.7}, x),
    (F.binary_cross_entropy_with_logits, {}, inside),
    (F.soft_margin_loss, {}, signs),
    (F.hinge_embedding_loss, {"margin": 0.5}, signs),
    (F.poisson_nll_loss, {"full": True}, inside),
    (kl, {}, inside),
    (kl, {"log_target": True}, x),
]
LABELS = torch.tensor([[1, 2, -1, 0, 0]] * 4 + [[3, -1, 2, 0, 1]] * 8)

COVERS = """
binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss hinge_embedding_loss huber_loss kl_div
l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss poisson_nll_loss smooth_l1_loss
soft_margin_loss triplet_margin_loss
"""
CASES = [
    *(
        (f"{f.__name__} {r} {options}", loss(f, reduction=r, **options), x(6, 12), other(6, 12))
        for (f, options, other), r in product(ELEMENT, REDUCTIONS)
    ),
    *((f"bce {r}", loss(F.binary_cross_entropy, reduction=r), inside(6, 12), inside(6, 12)) for r in REDUCTIONS),
    *(
        (f"bce weight {r}", weighted(F.binary_cross_entropy, reduction=r), inside(6, 12), inside(6, 12), inside(12))
        for r in REDUCTIONS
    ),
    (
        "bce positive weight",
        lambda a, b, w: F.binary_cross_entropy_with_logits(a, b, pos_weight=w.detach()),
        x(6, 12),
        inside(6, 12),
        inside(12),
    ),
    ("kl_div batchmean", loss(F.kl_div, reduction="batchmean"), x(6, 12), inside(6, 12)),
    ("mse default", F.mse_loss, x(6, 12), x(6, 12)),
    ("mse scalar", F.mse_loss, x().reshape(()), x().reshape(())),
    *(
        (f"margin_ranking {r}", loss(F.margin_ranking_loss, margin=0.3, reduction=r), x(12), x(12), signs(12))
        for r in REDUCTIONS
    ),
    *(
        (f"cosine_embedding {r}", loss(F.cosine_embedding_loss, margin=0.3, reduction=r), x(6, 4), x(6, 4), signs(6))
        for r in REDUCTIONS
    ),
    ("cosine_embedding of one row", F.cosine_embedding_loss, x(4), x(4), torch.tensor(-1)),
    *((f"triplet {r}", loss(F.triplet_margin_loss, reduction=r), x(6, 4), x(6, 4), x(6, 4)) for r in REDUCTIONS),
    ("triplet of sequences", loss(F.triplet_margin_loss, swap=True), x(2, 6, 4), x(2, 6, 4), x(2, 6, 4)),
    ("triplet that broadcasts", F.triplet_margin_loss, x(6, 4), x(1, 4), x(6, 4)),
    *((f"multi_margin {r}", loss(F.multi_margin_loss, reduction=r), x(12, 5), signs(12) + 2) for r in REDUCTIONS),
    ("multi_margin weight", weighted(F.multi_margin_loss, p=2), x(6, 6), signs(6) + 2, inside(6)),
    *((f"multilabel_margin {r}", loss(F.multilabel_margin_loss, reduction=r), x(12, 5), LABELS) for r in REDUCTIONS),
    *(
        (f"multilabel_soft_margin {r}", loss(F.multilabel_soft_margin_loss, reduction=r), x(6, 4), inside(6, 4))
        for r in REDUCTIONS
    ),
]


def test_losses(cases, check):
    check(cases, Mesh((("a", 2),)), samples=2)


@pytest.mark.slow
def test_losses_on_every_mesh(cases, check, mesh):
    check(cases, mesh, samples=4)


def test_every_rule_has_a_case(cases, uncovered):
    assert not uncovered(cases)


def test_rows_that_broadcast_or_stand_alone_run_replicated(cases, known):
    assert known(cases, "cosine_embedding_loss") == [True] * 3 + [False]
    assert known(cases, "triplet_margin_loss") == [True] * 4 + [False]
