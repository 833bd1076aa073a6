"""Statements that decide by values, of a forward or of a function that it calls, are one operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional as F

from strategies.capture import Objective, capture
from strategies.core.errors import StrategyError
from tests.strategies.simulated_model import TOLERANCE, Model


def drawn_apart(h: Tensor, labels: Tensor) -> Tensor:
    """The mean squared distance of rows with one label."""
    total, count = 0 * h.sum(), 0
    for one in range(len(h)):
        for other in range(one + 1, len(h)):
            if labels[one] == labels[other]:
                total = total + (h[one] - h[other]).square().sum()
                count += 1
    return total / max(count, 1)


FACTOR = 0.1


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.dense(x).tanh()
        return F.cross_entropy(self.head(h), labels) + FACTOR * drawn_apart(h, labels)


class Prototypes(Pairs):
    """A list that a loop fills, behind statements that others follow."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.dense(x).tanh()
        means: list[Tensor] = []
        for label in torch.unique(labels):
            means.append(self.scaled(h[labels == label]).mean(0))
        nearest = torch.cdist(h, torch.stack(means)).min(1).values
        h = self.head(h)
        return F.cross_entropy(h, labels) + nearest.mean()

    def scaled(self, h: Tensor) -> Tensor:
        return h * self.dense.bias


class Assigned(Pairs):
    @torch.no_grad()
    def match(self, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        costs = torch.cdist(scores, F.one_hot(labels, 3).to(scores.dtype))
        rows, columns = linear_sum_assignment(costs.cpu().numpy())
        return torch.as_tensor(rows), torch.as_tensor(columns)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(self.dense(x).tanh())
        rows, columns = self.match(scores, labels)
        return F.cross_entropy(scores[rows], labels[columns])


class Inner(Pairs):
    """One step of an inner loop by torch.func."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h, weight = self.dense(x).tanh(), self.head.weight
        slope = torch.func.grad(lambda w: F.cross_entropy(F.linear(h, w), labels))(weight)
        return F.cross_entropy(F.linear(h, weight - slope), labels)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 4), torch.randint(0, 3, (8,))


@pytest.mark.parametrize(
    ("net", "outside"),
    [
        (Pairs, {"linear", "cross_entropy_loss"}),
        (Prototypes, {"linear", "mean"}),
        (Assigned, {"index"}),
        (Inner, set()),
    ],
)
def test_trains_like_the_model(net: type[nn.Module], outside: set[str], draw: Any) -> None:
    torch.manual_seed(0)
    model = Model(net(), None, batch())
    ops = [op.op for op in model.graph.operators]
    assert ops.count("called_module") == 1 and {*ops} >= outside
    assert model.worst(draw, 2) < TOLERANCE


class Dropping(Pairs):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.dropout(drawn_apart(self.dense(x), labels))


class Noting(Pairs):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.dense(x)
        if h.mean() > 0:
            self.seen = 1
        return self.head(h).square().mean() * self.seen


class Overwriting(Pairs):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = self.dense(x)
        for label in torch.unique(labels):
            h[labels == label] *= len(labels[labels == label])
        return self.head(h).square().mean()


SCALES = {"kept": 2.0, "changed": torch.ones(3)}


class Global(Pairs):
    """A rank would have what an import leaves behind, not what is there now."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        total = self.head(self.dense(x))
        for label in torch.unique(labels):
            total = total + total[labels == label].mean() * SCALES["changed"]
        return total.square().mean()


@pytest.mark.parametrize("net", [Noting, Global])
def test_statements_that_do_more_are_refused(net: type[nn.Module]) -> None:
    with pytest.raises(StrategyError) as error:
        capture(Objective(net(), None, ("0", "1"), ()), batch(), training=True)
    assert error.value.code == "MW901"


def test_what_follows_stays_outside(draw: Any) -> None:
    """Random numbers and writes before and behind statements are those of the model."""
    torch.manual_seed(0)
    ops = [op.op for op in Model(Dropping(), None, batch()).graph.operators]
    assert ops.count("called_module") == 1 and ops[-1] == "dropout"
    model = Model(Overwriting(), None, batch())
    assert model.worst(draw, 2) < TOLERANCE
