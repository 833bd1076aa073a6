"""Batch entries that have the name of a parameter or buffer of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import meshwright
from strategies.core.layout import Layout
from strategies.core.program import LoweringOptions
from strategies.lowering.lowering import lower
from strategies.optimizer.updates import layout_of
from tests.strategies.simulated_model import TOLERANCE, Model


class Scaled(nn.Module):
    """x [8, 6], scale [8, 6], mask [8, 6] -> a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(6, 6), nn.Parameter(torch.randn(3, 6))
        self.register_buffer("mask", torch.ones(6))

    def forward(self, x: Tensor, scale: Tensor, mask: Tensor) -> Tensor:
        return (self.inner(x) * scale * self.scale.sum(0) * self.mask + mask).square().mean()


def batch() -> dict[str, Tensor]:
    return {name: torch.randn(8, 6, generator=torch.Generator().manual_seed(0)) for name in ("x", "scale", "mask")}


def test_a_model_trains(draw: Any) -> None:
    torch.manual_seed(0)
    model = Model(Scaled(), None, batch())
    assert model.worst(draw) < TOLERANCE
    plan = model.random_plan(draw, 1)
    program = lower(model.graph, plan, LoweringOptions())
    assert layout_of(program, "scale") == plan.tensors["scale"] and len(plan.inputs["scale"].dims) == 2
    assert program.tensors["scale"].spec.shape == (3, 6)


def test_a_plan_of_the_library_is_verified() -> None:
    plan = meshwright.plan(Scaled(), batch(), mesh=4, mode="data_parallel")
    assert plan.planned("test").prepared.plan.tensors["scale"] == Layout.replicated(2)
    assert meshwright.verify(Scaled(), batch(), plan).passed
