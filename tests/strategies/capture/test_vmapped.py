"""Models that call torch.vmap train as eager torch does, on random plans; other calls are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from strategies.capture import Objective, capture
from strategies.core.errors import StrategyError
from tests.strategies.simulated_model import TOLERANCE, Model


class Net(nn.Module):
    """A linear layer, an ensemble of weights, and a body given as a function of (net, x [8, 4, 8])."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.dense = nn.Linear(8, 8)
        self.heads = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def masked(net: Net, x: Tensor) -> Tensor:
    """A mask from a function of two positions."""
    places, h = torch.arange(x.shape[1]), net.dense(x)[:, None]
    window = torch.vmap(torch.vmap(lambda i, j: (i - j).abs() < 2, (None, 0)), (0, None))(places, places)
    return F.scaled_dot_product_attention(h, h, h, attn_mask=window)


def looked_up(net: Net, x: Tensor) -> Tensor:
    """A mask from a table that positions index, as transformers' masks of packed documents are made."""
    table, places, h = x[:, :, 0] > 0, torch.arange(x.shape[1]), net.dense(x)[:, None]
    rows = torch.vmap(torch.vmap(lambda row, i: table[row, i], (None, 0)), (0, None))
    with TransformGetItemToIndex():
        kept = rows(torch.arange(x.shape[0]), places)
    return h.masked_fill(kept[:, None, :, None], 0.5)


def ensemble(net: Net, x: Tensor) -> Tensor:
    h = net.dense(x)
    return torch.vmap(lambda weight: torch.softmax(h @ weight.T, -1))(net.heads).square().mean(0)


def without_gradients(net: Net, x: Tensor) -> Tensor:
    """A region around keeps its meaning."""
    with torch.no_grad():
        fixed = net.dense(x).tanh()
    return torch.vmap(net.dense)(x) * fixed


def written(net: Net, x: Tensor) -> Tensor:
    def one(row: Tensor) -> Tensor:
        h = net.dense(row).clone()
        h[0] = 1.0
        return h.mul_(2)

    return torch.vmap(one)(x)


BODIES: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "rows": lambda net, x: torch.vmap(net.dense)(x).tanh(),
    "losses of samples": lambda net, x: torch.vmap(lambda row: F.mse_loss(net.dense(row), row))(x),
    "masked": masked,
    "looked up": looked_up,
    "ensemble": ensemble,
    "without gradients": without_gradients,
    "detached": lambda net, x: torch.vmap(lambda row: net.dense(row) * net.dense(row).detach())(x),
    "written in place": written,
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", BODIES)
def test_trains_like_the_model(name: str, draw: Any) -> None:
    torch.manual_seed(0)
    model = Model(Net(lambda net, x: BODIES[name](net, x).square().sum()), None, (torch.randn(8, 4, 8),))
    assert model.worst(draw) < TOLERANCE


REFUSED: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "random numbers": lambda net, x: torch.vmap(F.dropout, randomness="different")(net.dense(x)),
    "region": lambda net, x: torch.vmap(lambda row: torch.no_grad()(net.dense)(row) * row)(net.dense(x)),
    "forward-mode": lambda net, x: torch.func.jvp(net.dense, (x,), (x,))[1],
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    net = Net(lambda net, x: REFUSED[name](net, x).sum())
    with pytest.raises(StrategyError, match=r"capture/test_vmapped.py:\d+") as caught:
        capture(Objective(net, None, ("x",), ()), (torch.randn(8, 4, 8),), training=True)
    assert caught.value.code in ("MW901", "MW906")
