"""Losses with every reduction, ignored targets, class weights, label smoothing, probabilities and further dims."""

from itertools import product

import torch
import torch.nn.functional as F

from strategies.rules.losses import divided, target_weight

torch.manual_seed(1)
REDUCTIONS = ("none", "mean", "sum")


def x(*shape):
    return torch.randn(shape, dtype=torch.float64)


def inside(*shape):
    return torch.rand(shape, dtype=torch.float64) * 0.8 + 0.1


def classes(*shape):
    """Classes of 0 to 4; the first half of the rows is ignored, so that some slices hold no target that counts."""
    target = torch.randint(0, 5, shape)
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


def kl(a, b, reduction, log_target=False):
    """F.kl_div without its warning about reduction="mean"."""
    return torch.ops.aten.kl_div(a, b, REDUCTIONS.index(reduction), log_target=log_target)


ELEMENT = [
    (F.mse_loss, {}, x),
    (F.l1_loss, {}, x),
    (F.smooth_l1_loss, {"beta": 0.5}, x),
    (F.huber_loss, {"delta": 0.7}, x),
    (F.binary_cross_entropy_with_logits, {}, inside),
    (kl, {}, inside),
    (kl, {"log_target": True}, x),
]

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
    *(
        (f"soft margin {r}", lambda a, b, r=r: F.soft_margin_loss(a, b.sign(), reduction=r), x(6, 12), classes(6, 12))
        for r in REDUCTIONS
    ),
    ("kl_div batchmean", loss(F.kl_div, reduction="batchmean"), x(6, 12), inside(6, 12)),
    ("mse default", F.mse_loss, x(6, 12), x(6, 12)),
    ("mse scalar", F.mse_loss, x().reshape(()), x().reshape(())),
    *(
        (f"{f.__name__} {r} {shape}", loss(f, reduction=r), x(*shape), classes(shape[0], *shape[2:]))
        for f, r, shape in product((F.cross_entropy, F.nll_loss), REDUCTIONS, ((12, 5), (4, 5, 6), (4, 5, 2, 3)))
    ),
    *((f"ce weight {r}", weighted(F.cross_entropy, reduction=r), x(12, 5), classes(12), inside(5)) for r in REDUCTIONS),
    *((f"nll weight {r}", weighted(F.nll_loss, reduction=r), x(4, 5, 6), classes(4, 6), inside(5)) for r in REDUCTIONS),
    *(
        (f"ce smooth {r}", loss(F.cross_entropy, reduction=r, label_smoothing=0.2), x(12, 5), classes(12))
        for r in REDUCTIONS
    ),
    *(
        (
            f"ce smooth weight {r}",
            weighted(F.cross_entropy, reduction=r, label_smoothing=0.2),
            x(12, 5),
            classes(12),
            inside(5),
        )
        for r in REDUCTIONS
    ),
    *(
        (
            f"ce probabilities {r} {shape}",
            loss(F.cross_entropy, reduction=r, label_smoothing=0.1),
            x(*shape),
            probabilities(*shape),
        )
        for r, shape in product(REDUCTIONS, ((12, 5), (4, 5, 6)))
    ),
    ("ce probabilities weight", weighted(F.cross_entropy), x(12, 5), probabilities(12, 5), inside(5)),
    ("nll_loss", torch.ops.aten.nll_loss, x(12, 5), classes(12)),
    ("nll_loss2d", lambda a, t: torch.ops.aten.nll_loss2d(a, t, None, 1, 3), x(4, 5, 2, 3), classes(4, 2, 3) % 5),
    ("ce ignores 2", loss(F.cross_entropy, ignore_index=2), x(12, 5), torch.randint(0, 5, (12,))),
    ("ce of one row", F.cross_entropy, x(5), torch.tensor(3)),
    ("ce of one row of probabilities", F.cross_entropy, x(5), x(5).softmax(0)),
    ("ce counts nothing", loss(F.cross_entropy), x(12, 5), torch.full((12,), -100)),
]


def test_losses(cases, check, mesh):
    check(cases, mesh, samples=4)


def test_every_rule_has_a_case(cases, uncovered):
    assert not uncovered(cases, "losses")


def test_counts_of_targets_are_exact_in_half_precision():
    """bfloat16 cannot hold 301: the count must not pass through it."""
    scores, target = torch.zeros(301, 3, dtype=torch.bfloat16), torch.zeros(301, dtype=torch.int64)
    count = target_weight(scores, target, None, -100)
    assert count.item() == 301
    assert divided(torch.tensor(602.0, dtype=torch.bfloat16), count).dtype == torch.bfloat16
