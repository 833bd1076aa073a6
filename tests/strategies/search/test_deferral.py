"""Gradients of values that are computed from parameters alone are added with those of the parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.gpt import GPT
from models.losses import NextTokenLoss
from strategies.core.mesh import Mesh
from strategies.core.plan import Plan
from strategies.core.program import LoweringOptions, Program
from strategies.core.request import Request
from strategies.core.steps import ALL_GATHER, ALL_REDUCE
from strategies.cost.plan_cost import PlanCost
from strategies.lowering.lowering import lower
from strategies.planner.planner import make_plan
from strategies.rules import rule_of
from strategies.rules.sharding import DEFERRED
from strategies.search.dynamic_programming import search
from strategies.search.sharding_propagation import candidates
from tests.strategies.search.problems import node, problem
from tests.strategies.simulated_model import TOLERANCE, Model

DATA = Request("data_parallel", 4)
AUTO = Request("auto", 4, search="dynamic_programming")


class Biased(nn.Module):
    """Scores with a class token in front, and a bias that both layers look up in one small table, as T5's are."""

    def __init__(self, rows: int = 6) -> None:
        super().__init__()
        self.table, self.token = nn.Embedding(rows, 2), nn.Parameter(torch.randn(1, 1, 8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1)
        places = torch.arange(x.shape[1])
        bias = self.table((places[:, None] - places).abs()).permute(2, 0, 1).unsqueeze(0)
        for layer in self.layers:
            heads = layer(x).unflatten(2, (2, 4)).transpose(1, 2)
            x = torch.softmax(heads @ heads.transpose(2, 3) + bias, -1) @ heads
            x = x.transpose(1, 2).flatten(2)
        return x


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1e-3, 1e-3)


class Shifts(nn.Module):
    """A row that is added to the batch, made of its parameter in three manners."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.row, self.linear = kind, nn.Parameter(torch.randn(8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.kind == "clipped":
            return x + Clipped.apply(self.row.tanh())
        if self.kind == "used":
            return x * self.row + self.row.tanh()
        row = self.row.tanh()
        return x + row + row.square().sum()


class Slopes(nn.Module):
    """Scores with the squares of their slopes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        scores = self.net(x)
        (slopes,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        return scores + slopes.square()


@pytest.fixture(scope="module")
def biased() -> Model:
    torch.manual_seed(0)
    return Model(Biased(), nn.MSELoss(), (torch.randn(8, 5, 8), torch.randn(8, 6, 8)))


def shifts(kind: str) -> Model:
    torch.manual_seed(0)
    return Model(Shifts(kind), nn.MSELoss(), (torch.randn(8, 8), torch.randn(8, 8)))


def sent_back(program: Program) -> list[str]:
    """The collectives of backward."""
    every = (one for one in program.redistributions if one.differentiable)
    return [step.kind for one in every for step in one.backward if step.kind in (ALL_REDUCE, ALL_GATHER)]


def deferring(plan: Plan) -> set[str]:
    return {name for name, one in plan.operators.items() if one.assignment.get(DEFERRED)}


def test_positions_are_added_with_their_table() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 16, (2, 8, 8))
    model = Model(GPT(16, 8, 8, 1, 2), NextTokenLoss(), (*tokens,))
    plan = make_plan(model.graph, DATA)
    program = lower(model.graph, plan, LoweringOptions(partial_loss=True))
    assert deferring(plan) == {"positions"}
    assert sent_back(program) == []
    assert program.reductions["positions.weight"] == ("dp",)
    assert model.difference(plan) <= TOLERANCE


@pytest.mark.parametrize("request_", [DATA, AUTO], ids=["data_parallel", "searched"])
@pytest.mark.parametrize("sharded", [False, True])
def test_tables_of_biases_and_expanded_tokens(biased: Model, request_: Request, sharded: bool) -> None:
    plan = make_plan(biased.graph, request_, node(4))
    program = lower(biased.graph, plan, LoweringOptions(partial_loss=True))
    assert {"table", "permute", "unsqueeze@1"} <= deferring(plan)
    assert {*plan.operators["expand"].assignment} == {"d0"}  # every rank has the token of its rows
    assert sent_back(program) == []
    assert biased.difference(plan, LoweringOptions(sharded_optimizer=sharded)) <= TOLERANCE


def test_a_derivative_is_sliced_as_the_rows_that_it_belongs_to() -> None:
    """The gradient of a sum begins with ones for all rows, which depend on no batch entry: each rank makes its own."""
    torch.manual_seed(0)
    model = Model(Slopes(), nn.MSELoss(), (torch.randn(8, 8), torch.randn(8, 8)))
    plan = make_plan(model.graph, DATA)
    assert {len(plan.operators[name].assignment) for name in plan.operators if name.startswith(("expand", "mm"))} == {1}
    assert sent_back(lower(model.graph, plan, LoweringOptions(partial_loss=True))) == []
    assert model.difference(plan) <= TOLERANCE


def test_what_sends_more_is_not_deferred() -> None:
    """The looked up rows are few of a large table, whose gradient costs more than theirs."""
    torch.manual_seed(0)
    model = Model(Biased(200_000), nn.MSELoss(), (torch.randn(8, 5, 8), torch.randn(8, 6, 8)))
    plan = make_plan(model.graph, DATA)
    assert "table" not in deferring(plan)
    assert lower(model.graph, plan).reductions["table.weight"] == ()


def test_a_gradient_that_its_function_clips_is_not_deferred() -> None:
    model = shifts("clipped")
    (clipped,) = [one for one in model.graph.operators if "Clipped" in one.op]
    rule = rule_of(clipped, model.graph)
    assert not rule.defers and not rule.legal({DEFERRED: ("dp",)}, Mesh((("dp", 4),)))
    assert model.difference(make_plan(model.graph, DATA)) <= TOLERANCE


def test_a_parameter_with_another_use() -> None:
    model = shifts("used")
    plan = make_plan(model.graph, DATA)
    assert deferring(plan) == {"tanh"} and sent_back(lower(model.graph, plan)) == []
    assert model.difference(plan) <= TOLERANCE


def test_a_use_with_a_complete_gradient_stays_counted_once() -> None:
    """A plan may defer more than a use leaves partial; a search has no such candidate."""
    model = shifts("complete")
    plan = make_plan(model.graph, DATA)
    operators = dict(plan.operators)
    for name in ("square", "sum"):
        operators[name] = type(operators[name])({}, "configured")
    operators["tanh"] = type(operators["tanh"])({DEFERRED: ("dp",)}, "configured")
    forced = Plan(plan.mesh, operators, plan.inputs, plan.tensors)
    assert model.difference(forced) <= TOLERANCE
    assert model.difference(forced, LoweringOptions(sharded_optimizer=True)) <= TOLERANCE


def test_a_search_costs_what_it_defers(biased: Model) -> None:
    made = problem(biased.graph, Mesh((("a", 2), ("b", 2))))
    found = search(made, node(4))
    assert any(one.get(DEFERRED) for one in found.assignments.values())
    assert found.cost == pytest.approx(PlanCost(made, node(4)).total(found.assignments, found.tensors), rel=1e-9)
    without = {
        id: {factor: axes for factor, axes in one.items() if factor != DEFERRED}
        for id, one in found.assignments.items()
    }
    assert found.cost < PlanCost(made, node(4)).total(without, found.tensors)
    table = made.shardings[biased.graph.by_name["table"].id]
    assert all(DEFERRED not in one for one in candidates(table, made))  # propagation defers afterwards
