"""The loss of micro-batches in one against what a step makes of theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from runner.planning import micro_batches
from runner.planning.counted import InitialTensors, counted, each_counted
from runner.planning.micro_batches import apart
from strategies.capture import Objective, capture

Loss = Callable[[Any, Tensor, Tensor], Tensor]


class Net(nn.Module):
    """x [8, 6], y [8] -> a loss of h [8, 4]."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layer, self.drop, self.loss = nn.Linear(6, 4), nn.Dropout(0.5), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self, self.layer(x), y)


def ignoring(net: Any, h: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(h, y, ignore_index=0)


def dropping(net: Any, h: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(net.drop(h), y, ignore_index=0) + h.square().mean()


def rounding(net: Any, h: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(h.float(), y, ignore_index=0)


@pytest.mark.parametrize("loss", [ignoring, dropping, rounding])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_micro_batches_that_count_by_their_labels_are_one_batch(loss: Loss, dtype: torch.dtype) -> None:
    assert found(loss, dtype) is None


def test_what_takes_rows_together_is_another_loss() -> None:
    losses = found(lambda net, h, y: (h * h[y]).mean(), torch.float64)
    assert losses is not None
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize(
    "loss",
    [
        lambda net, h, y: (h * h[y] * torch.rand(8, 1)).mean(),  # draws
        lambda net, h, y: (h.view(8, 4) * h[y]).mean(),  # runs on one size
    ],
)
def test_what_cannot_be_compared_says_nothing(loss: Loss) -> None:
    assert found(loss, torch.float64) is None


def test_large_models_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batches, "FLOPS", 10.0)
    assert found(lambda net, h, y: (h * h[y]).mean(), torch.float64) is None


def found(loss: Loss, dtype: torch.dtype) -> tuple[float, float] | None:
    torch.manual_seed(0)
    step = Objective(Net(loss).to(dtype), None, ("x", "y"), ())
    parts = [[torch.randn(8, 6, dtype=dtype), torch.randint(0, 4, (8,))] for _ in range(2)]
    captured = capture(step, parts[0], training=True)
    graph, initial = captured.graph, InitialTensors(captured.tensors, {})
    before = {name: tensor.clone() for name, tensor in step.state_dict().items()}
    result = apart(step, graph, lambda: parts, counted(graph, initial), each_counted(graph, initial), ())
    assert all(torch.equal(before[name], tensor) for name, tensor in step.state_dict().items())
    return result
