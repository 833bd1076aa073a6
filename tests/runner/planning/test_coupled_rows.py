"""Losses that take rows of a batch together, of which the mean over micro-batches is another number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from runner.planning.coupled_rows import coupled, row_sums
from strategies.capture import Objective, capture

Loss = Callable[[Any, Tensor, Tensor], Tensor]


class Net(nn.Module):
    """x [8, 6], y [8] -> a loss of h [8, 4]."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layer, self.norm, self.loss = nn.Linear(6, 4), nn.BatchNorm1d(4), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self, self.layer(x), y)


def contrastive(net: Any, h: Tensor, y: Tensor) -> Tensor:
    z = functional.normalize(h, dim=-1)
    return functional.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))


def hardest(net: Any, h: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(h, y, reduction="none").topk(3).values.mean()


def ordered(net: Any, h: Tensor, y: Tensor) -> Tensor:
    return h.sort(0).values[0].mean()


def covariance(net: Any, h: Tensor, y: Tensor) -> Tensor:
    return (h.T @ h / len(h)).square().sum()


COUPLED: dict[str, tuple[Loss, str]] = {
    "products of rows": (contrastive, "matmul"),
    "largest": (hardest, "topk"),
    "sorted": (ordered, "sort"),
    "squares of a mean": (covariance, "square"),
    "batch norm": (lambda net, h, y: net.norm(h).pow(3).mean(), "batch_norm_training"),
    "less the mean": (lambda net, h, y: (h - h.mean(0)).square().mean(), "sub"),
    "deviations": (lambda net, h, y: h.std(0).mean(), "std"),
    "means by class": (
        lambda net, h, y: (h.T @ functional.one_hot(y, 4).to(h) / y.bincount(minlength=4)).mean(),
        "div",
    ),
    "means of numbers": (lambda net, h, y: torch.where(y[:, None] > 0, h, torch.nan).nanmean(), "nanmean"),
    "pairs": (lambda net, h, y: (h[:, None] - h[None]).abs().mean(), "sub"),
    "running sums": (lambda net, h, y: h.cumsum(0).mean(), "cumsum"),
    "of all rows": (lambda net, h, y: h.softmax(0).square().mean(), "softmax"),
    "contrastive of two views": (
        lambda net, h, y: contrastive(net, torch.cat([h, h.sigmoid()]), y),
        "matmul",
    ),
    "contrastive of rows that were looked up": (
        lambda net, h, y: contrastive(net, h[:, None][torch.arange(len(h)), y * 0], y),
        "matmul",
    ),
    "two views": (lambda net, h, y: (h.chunk(2)[0] * h.chunk(2)[1]).mean(), "chunk"),
    "differences": (lambda net, h, y: (h[1:] - h[:-1]).square().mean(), "slice"),
    "an angle": (
        lambda net, h, y: functional.cosine_similarity(h.flatten(), h.exp().flatten(), dim=0),
        "cosine_similarity",
    ),
    "singular values": (lambda net, h, y: torch.linalg.matrix_norm(h, "nuc"), "linalg_matrix_norm"),
    "neighbours": (lambda net, h, y: (h * h.roll(1, 0)).mean(), "roll"),
}


def masked(net: Any, h: Tensor, y: Tensor) -> Tensor:
    losses, mask = functional.cross_entropy(h, y, reduction="none"), y > 1
    return (losses * mask).sum() / mask.sum() + losses[mask].mean() + h.sort(-1).values[:, 0].mean()


def of_each_row(net: Any, h: Tensor, y: Tensor) -> Tensor:
    centred = h - h.mean(-1, keepdim=True)
    attention = (centred[:, :, None] * h[:, None]).softmax(-1) @ h[:, :, None]
    last = h[torch.arange(len(h)), y]
    return (
        attention.square().mean()
        + last.exp().mean()
        + functional.cross_entropy(h.roll(1, -1).cumsum(-1), y)
        + h.abs().mean(0).sum()
        + torch.cat([h, h.exp()]).softmax(-1).square().mean()
        + torch.stack([functional.cross_entropy(row, label) for row, label in zip(h, y, strict=True)]).mean()
    )


@pytest.mark.parametrize("name", COUPLED)
def test_what_takes_rows_together_is_found(name: str) -> None:
    loss, op = COUPLED[name]
    found = coupled(captured(loss), ())
    assert found is not None
    assert found.op == op


def sorted_by_expert(net: Any, h: Tensor, y: Tensor) -> Tensor:
    order = y.argsort()
    return (h[order].tanh()[order.argsort()] * h).mean()


def penalty(net: Any, h: Tensor, y: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(h.square().sum(), h, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


@pytest.mark.parametrize("loss", [masked, of_each_row, penalty, sorted_by_expert])
def test_means_over_rows_are_no_coupling(loss: Loss) -> None:
    graph = captured(loss)
    assert coupled(graph, ()) is None
    assert row_sums(graph, ()) == ([], False)


def test_entries_without_rows_are_left_out() -> None:
    graph = captured(lambda net, h, y: (h * y.double().softmax(0).mean()).mean())
    assert coupled(graph, ()) is not None
    assert coupled(graph, ("y",)) is None


def bottleneck(net: Any, h: Tensor, y: Tensor) -> Tensor:
    reconstruction = functional.mse_loss(h, h.sigmoid().detach(), reduction="sum")
    return reconstruction - 0.5 * torch.sum(1 + h - h.square() - h.exp())


@pytest.mark.parametrize(
    ("loss", "factors", "alone"),
    [
        (lambda net, h, y: functional.cross_entropy(h, y, reduction="sum"), [()], True),
        (lambda net, h, y: h.square().sum(0).mean(), [()], True),
        (lambda net, h, y: h.flatten().dot(y.repeat_interleave(4).float()), [()], True),
        (lambda net, h, y: h.square().sum() * net.layer.bias[0].exp(), [()], True),
        (bottleneck, [(), (0.5,)], True),
        (lambda net, h, y: torch.sub(h.sum(), h.exp().sum(), alpha=2), [(2,), (2,)], True),
        (lambda net, h, y: h.square().sum() / len(h), [(8,)], True),
        (lambda net, h, y: functional.kl_div(h, h.sigmoid().detach(), reduction="batchmean"), [(8,)], True),
        (lambda net, h, y: h.square().sum() * torch.tensor(1 / len(h)), [()], False),
        (lambda net, h, y: h.abs().mean() - 3 * h.square().sum(), [(3,)], False),
        (lambda net, h, y: h.square().sum() + net.layer.weight.square().sum(), [()], False),
        (lambda net, h, y: h.square().sum() + 1, [()], False),
        (lambda net, h, y: h.sum().square(), [], False),
    ],
)
def test_sums_over_rows_are_found_with_their_factors(loss: Loss, factors: list[tuple[float, ...]], alone: bool) -> None:
    found, only = row_sums(captured(loss), ())
    assert [one.factors for one in found] == factors
    assert only == alone


def captured(loss: Loss) -> Any:
    batch = (torch.randn(8, 6), torch.randint(0, 4, (8,)))
    return capture(Objective(Net(loss), None, ("x", "y"), ()), batch, training=True).graph
