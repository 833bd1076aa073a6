"""The plan as data: JSON and back, and the same plan from the same request."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn

from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import OperatorPlan, Plan, layout_from_json, layout_to_json
from strategies.core.request import NamedDims, NamedMatrix, OperatorStrategy, Request
from strategies.planner.planner import make_plan
from tests.strategies.simulated_model import TOLERANCE, Model


def through_json(plan: Plan) -> Plan:
    return Plan.from_json(json.loads(json.dumps(plan.to_json())))


def small_model() -> Model:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    return Model(net, nn.CrossEntropyLoss(), (torch.randn(8, 8), torch.randint(0, 8, (8,))))


def test_layout_round_trip() -> None:
    for layout in (Layout(()), Layout(((), ())), Layout((("sp", "dp"), ()), frozenset({"mp", "x"}))):
        assert layout_from_json(json.loads(json.dumps(layout_to_json(layout)))) == layout


def test_random_plans_survive_json(draw: Any) -> None:
    model = small_model()
    for seed in range(10):
        plan = model.random_plan(draw, seed)
        assert through_json(plan) == plan
        assert model.difference(through_json(plan)) < TOLERANCE


def test_planned_plans_survive_json() -> None:
    model = small_model()
    cube = NamedMatrix((2, 2, 2), ("dp", "sp", "mp"))
    strategies = {
        "0": OperatorStrategy(((2, 2), (2, 2)), ((8, 1),)),
        "2": OperatorStrategy(
            (NamedDims("cube", (("mp",), ("sp", "dp"))), NamedDims("cube", ((), ("sp", "dp")))), None
        ),
    }
    plan = make_plan(model.graph, Request("auto", 8, strategies=strategies, layouts={"cube": cube}))
    assert through_json(plan) == plan
    assert plan.operators["2"].assignment["k"] == ("sp", "dp")


def test_order_of_axes_and_operators_is_kept() -> None:
    mesh = Mesh((("z", 2), ("a", 3)))
    operators = {
        "b": OperatorPlan({"n": ("a", "z"), "m": ()}, "configured"),
        "a": OperatorPlan({}, "default", (Layout(()),)),
    }
    plan = Plan(mesh, operators, {"x": Layout((("a",),))}, {"w": Layout(((),))}, {"algorithm": "none", "cost": None})
    back = through_json(plan)
    assert back == plan
    assert list(back.operators) == ["b", "a"] and back.mesh.names == ("z", "a")
    assert list(back.operators["b"].assignment) == ["n", "m"]


def test_the_same_request_gives_the_same_plan() -> None:
    request = Request("auto", 8, strategies={"0": OperatorStrategy(((2, 4), (1, 4)), None)})
    first, second = (make_plan(small_model().graph, request) for _ in range(2))
    assert (first.mesh, first.operators, first.inputs, first.tensors) == (
        second.mesh,
        second.operators,
        second.inputs,
        second.tensors,
    )
    assert first.search["algorithm"] == "sharding_propagation"
    assert make_plan(small_model().graph, Request("semi_auto", 4)).search["algorithm"] == "semi_auto"
