"""Means whose weights are inputs of the captured step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from strategies.capture import Objective, capture
from strategies.core.errors import StrategyError
from strategies.core.graph import Ref


class Supervised(nn.Module):
    """A layer with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.layer(x))
        return x, functional.cross_entropy(x, labels)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Supervised() for _ in range(4))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        total = x.new_zeros(())
        for layer in self.layers:
            x, loss = layer(x, labels)
            total = total + loss
        counted = labels > 0
        losses = functional.cross_entropy(x, labels, reduction="none")
        return (
            total
            + (losses * counted).sum() / counted.sum()
            + losses[counted].mean()
            + functional.l1_loss(x[counted].exp(), x.square()[counted])
            + torch.cdist(x[counted], x.detach()[:2]).min(-1).values.mean()
            + x[counted].view(-1).square().mean()
            + functional.gaussian_nll_loss(x[counted], x.detach()[counted], x[counted].square() + 1)
        )


MEANS = 10


@pytest.fixture
def step() -> tuple[Objective, list[Tensor]]:
    torch.manual_seed(0)
    return Objective(Net(), None, ("x", "labels"), ()), [torch.randn(8, 4), torch.arange(8) % 4]


def test_layers_that_repeat_have_means_of_their_own(step: tuple[Objective, list[Tensor]]) -> None:
    objective, batch = step
    weights = [torch.tensor(float(number)) for number in range(MEANS)]
    graph = capture(objective.weighed(MEANS), [*batch, *weights], training=True).graph
    assert [one.name for one in graph.of_kind("input")][2:] == [f"mean_weight_{number}" for number in range(MEANS)]
    plain = capture(objective, batch, training=True).graph
    assert {name for name in graph.by_name if not name.startswith("mean_weights.")} == {*plain.by_name}


def test_the_weights_multiply_the_means(step: tuple[Objective, list[Tensor]]) -> None:
    objective, batch = step

    def loss(*weights: float) -> Any:
        return objective.weighed(MEANS)(*batch, *map(torch.tensor, weights)).item()

    ones = objective(*batch).item()
    assert loss(*[1.0] * MEANS) == ones
    each = [loss(*(float(number == kept) for number in range(MEANS))) for kept in range(MEANS)]
    assert sum(each) == pytest.approx(ones) and min(each) > 0


class Experts(nn.Module):
    """A loop over the experts that rows choose, before two means."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.inner):
            at = (x.argmax(-1) % 2 == number).nonzero()[:, 0]
            if len(at):
                out[at] = expert(x[at])
        return out


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h, counted = self.experts(x), labels > 1
        return functional.cross_entropy(h, labels) + functional.mse_loss(h[counted], x[counted])


def test_means_behind_a_loop_over_experts_are_weighed(step: tuple[Objective, list[Tensor]]) -> None:
    """Such a forward is called once more, without gradients."""
    weights = [torch.ones(()), torch.ones(())]
    graph = capture(
        Objective(Routed(), None, ("x", "labels"), ()).weighed(2), [*step[1], *weights], training=True
    ).graph
    assert "called_module" in {operator.op for operator in graph.operators}
    assert all(graph.users[Ref(one.id)] for one in graph.of_kind("input"))


def test_nothing_is_weighed_where_other_means_are_computed(step: tuple[Objective, list[Tensor]]) -> None:
    objective, batch = step
    with pytest.raises(StrategyError, match="10 means were seen in place of 5"):
        capture(objective.weighed(5), [*batch, *[torch.ones(())] * 5], training=True)
