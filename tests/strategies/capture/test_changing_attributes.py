"""A forward that computes with what it changes, outside of buffers, is refused; what it sets once or only notes is
not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies.capture import Objective, capture
from strategies.core.errors import StrategyError


class Net(nn.Module):
    """Changes attributes in `change`, which returns a factor."""

    def __init__(self, change: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(4, 4), change
        self.calls, self.state, self.length = 0, {"step": 0.0}, 0
        self.center, self.table = torch.ones(4), torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.change(self, x)


def number(net: Any, x: Tensor) -> float:
    net.calls += 1
    return min(1.0, net.calls / 1000)


def late(net: Any, x: Tensor) -> float:
    net.calls += 1
    return 1.0 if net.calls < 100 else 2.0


def nested(net: Any, x: Tensor) -> float:
    net.state["step"] += 0.5
    return net.state["step"]


def average(net: Any, x: Tensor) -> Tensor:
    net.center = 0.9 * net.center + 0.1 * x.detach().mean(0)
    return net.center


def cached(net: Any, x: Tensor) -> Tensor:
    if net.length < x.shape[1]:
        net.length, net.table = x.shape[1], torch.arange(1.0, 1.0 + x.shape[1])
    return net.table[: x.shape[1]]


def noted(net: Any, x: Tensor) -> float:
    net.length, net.center = x.shape[0] + net.training, x.detach().mean(0)
    return 2.0


def moved(net: Any, x: Tensor) -> Tensor:
    net.center = net.center.to(x.device)
    return net.center


def captured(change: Callable[[Any, Tensor], Any], training: bool) -> None:
    capture(Objective(Net(change), None, ("x",), ()), (torch.randn(8, 4),), training=training)


@pytest.mark.parametrize(
    ("change", "name"),
    [(number, "calls"), (late, "calls"), (nested, "state['step']"), (average, "center")],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_refused(change: Callable[[Any, Tensor], Any], name: str) -> None:
    with pytest.raises(StrategyError) as found:
        captured(change, False)
    assert found.value.code == "MW906" and name in str(found.value)


@pytest.mark.parametrize("change", [cached, noted, moved], ids=lambda one: one.__name__)
def test_captured(change: Callable[[Any, Tensor], Any]) -> None:
    captured(change, False)
