"""Masks: a purely causal mask becomes is_causal, one that masks nothing is removed, others stay; same loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strategies.core.graph import Operator
from tests.strategies.simulated_model import TOLERANCE, Model

S = 6


class Attention(nn.Module):
    """Attention with 4 heads of queries and 2 of keys and values, repeated as Hugging Face models do."""

    def __init__(self, mask: Callable[[Any, Tensor], Tensor | None], repeat: Any = None) -> None:
        super().__init__()
        self.mask, self.repeat = mask, repeat or repeated
        self.q, self.kv = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("table", torch.ones(S, S, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q(x).view(b, s, 4, 4).transpose(1, 2)
        k, v = (self.repeat(part.view(b, s, 2, 4).transpose(1, 2)) for part in self.kv(x).chunk(2, -1))
        out: Tensor = F.scaled_dot_product_attention(q, k, v, self.mask(self, x))
        return out.square().mean()


def repeated(x: Tensor) -> Tensor:
    b, h, s, d = x.shape
    return x[:, :, None, :, :].expand(b, h, 2, s, d).reshape(b, 2 * h, s, d)


def tiled(x: Tensor) -> Tensor:
    """Another order of the heads: not groups."""
    b, h, s, d = x.shape
    return x[:, None].expand(b, 2, h, s, d).reshape(b, 2 * h, s, d)


def from_positions(net: Any, x: Tensor) -> Tensor:
    """The mask of batch and positions that Hugging Face models build."""
    positions = torch.arange(S).unsqueeze(0).expand(x.shape[0], -1)
    packed = (positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(-1)
    index = torch.arange(S)
    causal = index[None, None, None, :] <= index[None, None, :, None]
    same = packed[:, None, :, None] == packed[:, None, None, :]
    return causal & same


def additive(net: Any, x: Tensor) -> Tensor:
    return torch.full((S, S), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)


def window(net: Any, x: Tensor) -> Tensor:
    index = torch.arange(S)
    return (index[None] <= index[:, None]) & (index[None] > index[:, None] - 3)


def hiding_padding(net: Any, x: Tensor) -> Tensor:
    return torch.ones(S, S, dtype=torch.bool).tril() & (x[:, None, None, :, 0] < 9)


MASKS: dict[str, tuple[Callable[[Any, Tensor], Tensor | None], bool, bool]] = {
    "positions": (from_positions, True, False),
    "additive": (additive, True, False),
    "infinite": (lambda net, x: torch.full((S, S), -torch.inf, dtype=x.dtype).triu(1), True, False),
    "all": (lambda net, x: torch.ones(1, 1, S, S, dtype=torch.bool), False, False),
    "none": (lambda net, x: None, False, False),
    "window": (window, False, True),
    "bias": (lambda net, x: torch.arange(36.0, dtype=x.dtype).view(S, S) / 36, False, True),
    "of the batch": (hiding_padding, False, True),
    "of a buffer": (lambda net, x: net.table, False, True),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, draw: Any) -> None:
    torch.manual_seed(0)
    mask, causal, stays = MASKS[name]
    model = Model(Attention(mask), None, {"x": torch.randn(4, S, 16)})
    attention = _attention(model)
    given, hint = (*attention.args[3:], *(None, 0.0, False)[len(attention.args) - 3 :])[::2]
    assert hint is causal
    assert (given is not None) == stays
    assert attention.keywords.get("enable_gqa", False) is not stays
    assert model.worst(draw, 3) < TOLERANCE
    if causal:
        assert not {operator.op for operator in model.graph.operators} & {"arange", "full", "__and__", "le"}


def test_heads_in_another_order_are_not_groups() -> None:
    model = Model(Attention(from_positions, tiled), None, {"x": torch.randn(4, S, 16)})
    attention = _attention(model)
    assert attention.args[5] is True and "enable_gqa" not in attention.keywords


def _attention(model: Model) -> Operator:
    (found,) = (o for o in model.graph.operators if o.op == "scaled_dot_product_attention")
    return found
