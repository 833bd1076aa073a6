"""What an LSTM keeps for backward is predicted as it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from strategies.runtime.live_tensors import Live


def kept(steps: int, rows: int, mode: FakeTensorMode | None) -> int:
    """Bytes that are alive after a forward."""
    given, net = torch.zeros(rows, steps, 24), nn.LSTM(24, 40, 2, batch_first=True, bidirectional=True)
    with Live("cpu", mode) as live:
        results = net(given)
    assert results[0].requires_grad
    return live.now


@pytest.mark.parametrize(("steps", "rows", "exact"), [(5, 3, True), (20, 32, True), (90, 8, False), (70, 45, False)])
def test_an_lstm_is_traced_with_the_workspace_of_a_real_one(steps: int, rows: int, exact: bool) -> None:
    real = kept(steps, rows, None)
    with FakeTensorMode() as mode:
        assert kept(steps, rows, mode) == (real if exact else pytest.approx(real, rel=0.01))
