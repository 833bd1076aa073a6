"""Default strategies of operators that are not configured, and names of axes that shard nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from strategies.core.plan import Plan
from strategies.core.request import NamedDims, NamedMatrix, OperatorStrategy, Request
from strategies.core.steps import LOCAL
from strategies.lowering.lowering import lower
from strategies.planner.planner import make_plan
from strategies.rules import rule_of
from tests.strategies.simulated_model import TOLERANCE, Model


class Heads(nn.Module):
    """A product whose columns are heads, seen head by head."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu((x @ self.w).view(16, 16, 4).transpose(0, 1))


@pytest.fixture(scope="module")
def heads() -> Model:
    torch.manual_seed(0)
    return Model(Heads(), nn.MSELoss(), (torch.randn(16, 8), torch.randn(16, 16, 4)))


def plan_of(model: Model, strategies: dict[str, tuple[Any, ...]], **options: Any) -> Plan:
    wanted = {path: OperatorStrategy(inputs, None) for path, inputs in strategies.items()}
    return make_plan(model.graph, Request("semi_auto", 8, strategies=wanted, **options))


def counts(model: Model, plan: Plan, name: str) -> tuple[int, ...]:
    """The slices of the first operand."""
    sharding = rule_of(model.graph.by_name[name], model.graph)
    return sharding.operand_layouts(plan.operators[name].assignment)[0].counts(plan.mesh)


def sent_for(model: Model, plan: Plan, name: str) -> list[str]:
    found = [r for r in lower(model.graph, plan).redistributions if r.operator == name]
    return [step.kind for r in found for step in r.forward if step.kind not in LOCAL]


def test_a_view_takes_the_layout_of_its_base(heads: Model) -> None:
    plan = plan_of(heads, {"matmul": ((1, 1), (1, 8))})
    assert counts(heads, plan, "view") == (1, 8)
    assert counts(heads, plan, "transpose") == (1, 8, 1)
    assert sent_for(heads, plan, "view") == sent_for(heads, plan, "transpose") == []
    assert counts(heads, plan, "relu") == (1, 8, 1)  # the batch, which is its second dim now
    assert heads.difference(plan) < TOLERANCE


def test_a_gate_takes_the_layout_of_its_sections() -> None:
    torch.manual_seed(0)
    layers = nn.Linear(8, 64), nn.GLU(), nn.Linear(32, 16)
    model = Model(nn.Sequential(*layers), nn.MSELoss(), (torch.randn(16, 8), torch.randn(16, 16)))
    plan = plan_of(model, {"0.matmul": ((1, 1), (1, 8))})
    assert counts(model, plan, "1") == (1, 8) and sent_for(model, plan, "1") == []
    assert model.difference(plan) < TOLERANCE


def test_a_view_whose_default_sends_less_keeps_it(heads: Model) -> None:
    assert counts(heads, plan_of(heads, {}), "view") == (8, 1)
    summed = plan_of(heads, {"matmul": ((1, 8), (8, 1))})  # replicated after the sum: an all-reduce
    assert counts(heads, summed, "view") == (8, 1)
    assert sent_for(heads, summed, "view") == ["reduce_scatter"]
    assert heads.difference(summed) < TOLERANCE


def test_a_view_that_cannot_take_the_layout_of_its_base_keeps_its_default() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 16), nn.Unflatten(0, (4, 4)), nn.Flatten(1))
    model = Model(net, nn.MSELoss(), (torch.randn(16, 16), torch.randn(4, 64)))
    plan = plan_of(model, {"0": ((1, 1), (8, 1))})
    assert counts(model, plan, "1") == (1, 8)
    assert counts(model, plan, "2") == (4, 1, 1)  # the last of the joined dims cannot be sliced
    assert model.difference(plan) < TOLERANCE


class Broadcast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x[:1] + self.w


def test_an_axis_of_one_device_slices_nothing() -> None:
    torch.manual_seed(0)
    model = Model(Broadcast(), nn.MSELoss(), (torch.randn(8, 16), torch.randn(8, 16)))
    matrix = NamedMatrix((4, 1, 2), ("dp", "sp", "mp"))
    operands = (NamedDims("m", (("sp",), ("mp",))), NamedDims("m", (("dp", "sp"), ("mp",))))
    plan = plan_of(model, {"add": operands}, layouts={"m": matrix})
    assert counts(model, plan, "add") == (1, 2)
    assert plan.tensors["w"].counts(plan.mesh) == (4, 2)
    assert model.difference(plan) < TOLERANCE
    plan_of_inputs = plan_of(
        model, {}, layouts={"m": matrix}, dataset_strategy=(operands[0], NamedDims("m", (("sp",), ())))
    )
    assert [layout.counts(plan_of_inputs.mesh) for layout in plan_of_inputs.inputs.values()] == [(1, 2), (1, 1)]


class Joined(nn.Module):
    """Joins the rows of the batch with something before the layer `net`."""

    def __init__(self, join: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.join = nn.Linear(6, 4), join

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.join(x)).square().mean(-1).view(-1, 16).transpose(0, 1)


@pytest.mark.parametrize(
    "join",
    [
        lambda x: torch.cat([x[:, 0], -x[:, 1]]),
        lambda x: torch.stack([x[:, 0], x[:, 1]]).flatten(0, 1),
        lambda x: x.transpose(0, 1).reshape(-1, 6),
        lambda x: torch.cat(x.split(1, 1)).flatten(0, 1),
    ],
    ids=["concatenated", "stacked", "transposed", "split"],
)
def test_a_batch_that_is_joined_with_others_is_sliced_again(join: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Model(Joined(join), nn.MSELoss(), (torch.randn(16, 2, 6), torch.randn(16, 2)))
    plan = plan_of(model, {})
    assert counts(model, plan, "net") == (8, 1)
    assert model.difference(plan) < TOLERANCE
