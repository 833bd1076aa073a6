"""Python numbers in a model: those read from a tensor stay tensors; control flow that depends on them is rejected."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from strategies.capture import LossFunction, Objective, capture
from strategies.core.errors import StrategyError
from tests.strategies.simulated_model import TOLERANCE, Model


class Net(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.body, self.dense = body, nn.Linear(8, 8)
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def arithmetic(net: Net, x: Tensor) -> Tensor:
    scale, steps = net.dense(x).sum().item(), net.steps.item()
    return net.dense(x) * (1.0 / (steps + 2)) + 2 * scale - steps


def converted(net: Net, x: Tensor) -> Tensor:
    """Asks for a dtype, and brings a weight to the one that it has."""
    net.dense.weight.data = net.dense.weight.data.to(x.dtype)
    return net.dense(x).to(torch.promote_types(x.dtype, torch.float32))


def warm_up(net: Net, x: Tensor) -> Tensor:
    net.steps += 1
    return net.dense(x) * (net.steps.item() / 10)


def capped(net: Net, x: Tensor) -> Tensor:
    """The smaller of two numbers is a branch."""
    net.steps += 6
    return net.dense(x) * min(1.0, net.steps.item() / 10)


def extremes(net: Net, x: Tensor) -> Tensor:
    """Of numbers, of which the first of equal ones counts, and tensors."""
    h, count = net.dense(x), int(net.steps)
    print(f"{h.max().item():.3f} of {count:d}")
    return h / max(1, count) + max(h.sum(), 0) + min(count, 2.5) + min([h.mean(), h.max(), h.min()])


def comprehensions(net: Net, x: Tensor) -> Tensor:
    """Each is a function that every call of this one makes anew."""
    h = net.dense(x)

    def largest(rows: Tensor) -> float:
        return max(float(row) for row in rows.abs().sum(1))

    means = {name: float(part) for name, part in (("all", h.mean()), ("first", h[0].mean()))}
    return h / largest(h) + sum([float(value) for value in h[0]]) - means["all"] * means["first"]


def functions(net: Net, x: Tensor) -> Tensor:
    """Of numbers, and arrays for a log alone."""
    net.steps += 1
    h = net.dense(x)
    net.last = h.detach().cpu().numpy()
    print(f"{np.abs(net.last).mean():.3f}, {round(net.last.max() * 2, 3)}")
    return h * math.exp(-net.steps.item() / 10) + np.sqrt(net.steps.item()) + math.log(float(h.square().sum()))


def as_an_argument(net: Net, x: Tensor) -> Tensor:
    power = net.steps.item()
    filled = torch.full((8, 8), x.mean().item(), dtype=x.dtype)
    return net.dense(x).clamp(max=x.max().item()) ** power + filled + (x > x.median().item())


def powers(net: Net, x: Tensor) -> Tensor:
    """Powers of tensors with and without dims; integer and fractional exponents."""
    high = net.dense(x).sigmoid() + 1
    return high.pow(x.max().item()) + torch.pow(high, net.steps.item()) + high.sum() ** x.mean().item()


def averaged(net: Net, x: Tensor) -> Tensor:
    """A moving average whose rate follows the number of steps."""
    net.steps += 1
    rate, h = min(0.9, net.steps.item() / 10), net.dense(x)
    mean = torch.full_like(x, rate).mul_(rate).add_(h.detach(), alpha=1 - rate)
    return torch.sub(h, mean, alpha=net.steps.item())


def whole_numbers(net: Net, x: Tensor) -> Tensor:
    """Counts of masks of floats, and what Python rounds."""
    chosen = (x > 0).to(x.dtype)
    count, half = max(1, int(chosen.sum())), chosen.sum().item() / 4
    return net.dense(x) * chosen / count + round(half) + math.floor(half) - 3 * math.ceil(half) + math.trunc(-half)


def sizes(net: Net, x: Tensor) -> Tensor:
    """Sizes are python numbers all along."""
    half = x.shape[0] // 2
    return net.dense(x)[:half].repeat(2, 1) / len(x) + x.numel()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "body",
    [
        arithmetic,
        converted,
        warm_up,
        capped,
        extremes,
        comprehensions,
        functions,
        as_an_argument,
        powers,
        averaged,
        whole_numbers,
        sizes,
    ],
    ids=lambda body: body.__name__,
)
def test_numbers_flow_on_as_tensors(body: Callable[[Any, Tensor], Tensor], draw: Any) -> None:
    torch.manual_seed(0)
    loss = LossFunction(lambda out, target: (out.square().sum() - target.sum()) / 100, {})
    assert Model(Net(body), loss, (torch.randn(8, 8), torch.randn(8, 8))).worst(draw, 4) < TOLERANCE


def rounded() -> Callable[[Tensor], int]:
    return lambda value: int(value)


def number(x: Tensor) -> int:
    return x.sum().long().item()  # type: ignore[return-value]


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "shape": (lambda net, x: net.dense(x) + torch.zeros(number(x), 8).sum(), "values of a tensor"),
    "slice": (lambda net, x: net.dense(x)[: number(x)].sort(0).values, "whose shape depends on values"),
    "mask": (lambda net, x: net.dense(x)[x > 0].sort().values, "whose shape depends on values"),
    "branch": (lambda net, x: net.dense(x) if number(x) > 2 else x, "branch or a shape from the values"),
    "made elsewhere": (lambda net, x: net.dense(x) * rounded()(x.sum()), "branch or a shape from the values"),
    "loop": (lambda net, x: sum((net.dense(x) for _ in range(number(x))), x), "branch or a shape from the"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_line(name: str) -> None:
    body, text = REFUSED[name]
    with pytest.raises(StrategyError, match=text) as caught:
        capture(Objective(Net(body), LossFunction(torch.sum, {}), ("x",), ()), (torch.randn(8, 8),), training=True)
    assert "capture/test_numbers.py:" in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
