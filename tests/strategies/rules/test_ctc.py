"""The loss of CTC on random slicings equals torch's, whose graph nobody can capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies.capture import LossFunction
from strategies.rules.ctc import ctc_loss
from tests.strategies.simulated_model import TOLERANCE, Model


class Speech(nn.Module):
    """Sounds [batch, time, 6] to logarithms of the probabilities of 5 classes [time, batch, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x).log_softmax(-1).transpose(0, 1)


@pytest.mark.few(2)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_trains_as_torch_does(reduction: str, zero_infinity: bool, draw: Any) -> None:
    def loss(output: Tensor, targets: Tensor) -> Tensor:
        times = torch.full((len(targets),), len(output), dtype=torch.long)
        lengths = targets[:, 0] % 4  # from 0 on
        if zero_infinity:
            times = torch.where(lengths == 3, 2, times)  # too short: their loss is infinite
        found = nn.functional.ctc_loss(output, targets, times, lengths, 0, reduction, zero_infinity)
        return (found * torch.arange(len(targets))).sum() if reduction == "none" else found

    torch.manual_seed(0)
    targets = torch.randint(1, 5, (8, 3))
    model = Model(Speech(), LossFunction(loss, {}), (torch.randn(8, 7, 6), targets))
    assert set((targets[:, 0] % 4).tolist()) >= {0, 3}
    (operator,) = (one for one in model.graph.operators if one.op == "meshwright::ctc")
    assert operator.lines
    assert model.worst(draw, 4) < TOLERANCE


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_targets_one_behind_the_other_and_lengths_in_lists(reduction: str, draw: Any) -> None:
    counts = [3, 1, 2, 0]

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.ctc_loss(output, targets.flatten()[:6], [7, 7, 5, 7], counts, reduction=reduction)

    torch.manual_seed(0)
    model = Model(Speech(), LossFunction(loss, {}), (torch.randn(4, 7, 6), torch.randint(1, 5, (4, 2))))
    assert model.worst(draw, 2) < TOLERANCE


def test_autocast_computes_in_fp32() -> None:
    torch.manual_seed(0)
    given = torch.randint(1, 5, (8, 3)), torch.full((8,), 7), torch.full((8,), 3)
    probabilities = torch.randn(7, 8, 5).log_softmax(-1).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ctc_loss(probabilities, *given), nn.functional.ctc_loss(probabilities, *given))
