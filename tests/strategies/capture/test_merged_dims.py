"""A linear layer between two reshapes keeps the dims apart that they merge: exact under random plans, and slices of the
batch are not exchanged."""

from typing import Any

import pytest
import torch
from torch import nn

from strategies.core.program import LoweringOptions
from strategies.core.request import Request
from strategies.lowering.lowering import lower
from strategies.planner.planner import make_plan
from tests.strategies.simulated_model import TOLERANCE, Model


class Attention(nn.Module):
    def __init__(self, weights: bool, first: bool) -> None:
        super().__init__()
        self.layer, self.weights = nn.MultiheadAttention(8, 2, batch_first=first), weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x if self.layer.batch_first else x.transpose(0, 1)
        return self.layer(y, y, y, need_weights=self.weights)[0].square().sum()


class Encoder(nn.Module):
    def __init__(self, weights: bool, first: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=first, norm_first=weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x if first(self.layer) else x.transpose(0, 1)).square().sum()


def first(layer: Any) -> bool:
    return bool(layer.self_attn.batch_first)


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", [Attention, Encoder])
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_attention_of_torch(draw: Any, kind: Any, weights: bool, first: bool) -> None:
    torch.manual_seed(0)
    model = Model(kind(weights, first), None, {"x": torch.randn(8, 4, 8)})
    assert model.worst(draw, 4) < TOLERANCE
    plan = make_plan(model.graph, Request("data_parallel", 4))
    assert lower(model.graph, plan, LoweringOptions(partial_loss=True)).redistributions == ()


class Layers(nn.Module):
    """Merged dims that are used otherwise as well, or that are separated into others."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        merged = x.reshape(-1, 8)
        found = self.linear(merged)
        if self.kind == "operand":
            return (found.reshape(8, 4, 6).sum(-1) * merged.reshape(8, 4, 8).sum(-1)).square().sum()
        if self.kind == "result":
            return (found.reshape(8, 4, 6).sum((0, 1)) * found.sum(0)).sum()
        if self.kind == "other dims":
            return (found.reshape(2, 4, 4, 6).softmax(0) * found.detach().reshape(2, 4, 4, 6)).sum()
        return found.reshape(8, 4, 2, 3).square().softmax(-1)[..., 0].sum()


@pytest.mark.parametrize("kind", ["operand", "result", "other dims", "last dim"])
def test_other_uses(draw: Any, kind: str) -> None:
    torch.manual_seed(0)
    model = Model(Layers(kind), None, {"x": torch.randn(8, 4, 8)})
    assert [operator.op for operator in model.graph.operators].count("linear") == 1
    assert model.worst(draw, 4) < TOLERANCE
