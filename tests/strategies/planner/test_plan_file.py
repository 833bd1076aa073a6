"""Plans read back from plan.json: the same plan for the same model; for another the first difference is reported."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from strategies.capture import Objective, capture
from strategies.core.errors import StrategyError
from strategies.core.graph import FusedSections, OperatorGraph
from strategies.core.plan import Plan
from strategies.core.request import Request
from strategies.lowering.lowering import lower
from strategies.optimizer.settings import OptimizerSettings
from strategies.planner.description import describe
from strategies.planner.plan_file import packed_in, read_plan
from strategies.planner.planner import make_plan
from tests.strategies.machines import cluster


def graph_of(*layers: nn.Module, rows: int = 8) -> OperatorGraph:
    step = Objective(nn.Sequential(*layers), nn.CrossEntropyLoss(), ("0", "1"), ("1",))
    return capture(step, (torch.randn(rows, 8), torch.zeros(rows, dtype=torch.long)), training=True).graph


def ours(width: int = 16, rows: int = 8) -> OperatorGraph:
    return graph_of(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4), nn.Tanh(), rows=rows)


@pytest.fixture(scope="module")
def saved() -> tuple[Plan, Any]:
    graph = ours()
    plan = make_plan(graph, Request("semi_auto", 4))
    return plan, content_of(graph, plan)


def content_of(graph: OperatorGraph, plan: Plan | None = None) -> Any:
    """That of a plan.json; of this plan, or of the one that is made."""
    plan = plan or make_plan(graph, Request("semi_auto", 4))
    content = describe(
        graph, plan, lower(graph, plan), settings=OptimizerSettings(0, torch.optim.SGD), cluster=cluster(4)
    )
    return json.loads(json.dumps(content))


def test_the_plan_of_the_same_model(saved: tuple[Plan, Any]) -> None:
    plan, content = saved
    assert read_plan(content, ours(), 4, "plan") == plan


OTHERS: dict[str, tuple[Callable[[], OperatorGraph], str]] = {
    "widths": (lambda: ours(width=24), r"operator 0 \(linear.*\) works on shapes 8x8, 16x8, 16 there and 8x8, 24x8"),
    "batch": (lambda: ours(rows=16), r"operator 0 \(linear.*\) works on shapes 8x8, 16x8, 16 there and 16x8, 16x8"),
    "an operator": (
        lambda: graph_of(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4), nn.Tanh()),
        r"operator 1 is relu there and gelu here, so it belongs to another model",
    ),
    "more": (
        lambda: graph_of(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Tanh(), nn.ELU()),
        r"plan has no operator 4 \(elu",
    ),
    "fewer": (
        lambda: graph_of(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
        r"plan has an operator 3 that this model lacks",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_model_is_refused_by_its_first_difference(saved: tuple[Plan, Any], other: str) -> None:
    make, message = OTHERS[other]
    with pytest.raises(StrategyError, match=message):
        read_plan(saved[1], make(), 4, "plan")


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.proj(x).chunk(2, -1)
        return gate * up


def test_sections_are_those_of_the_file() -> None:
    """Without any, as in files of earlier versions, weights are sliced as one."""
    found = {}
    for packs, sections in ((True, None), (False, dict[str, FusedSections]())):
        step = Objective(Halves(), nn.MSELoss(), ("0", "1"), ("1",), sections=sections)
        graph = capture(step, (torch.randn(8, 8), torch.randn(8, 8)), training=True).graph
        found[packs] = graph, content_of(graph)
    for packs, (graph, content) in found.items():
        assert bool(packed_in(content, "plan")) == packs
        assert read_plan(content, graph, 4, "plan").operators
        with pytest.raises(
            StrategyError, match=r"is sliced (as one|in sections of \[8, 8\] along dim 0) there"
        ) as error:
            read_plan(content, found[not packs][0], 4, "plan")
        assert error.value.code == "MW421"


def test_another_number_of_ranks_is_refused(saved: tuple[Plan, Any]) -> None:
    with pytest.raises(
        StrategyError, match=r"plan is for a mesh of 4 ranks \(dp?\w* 4\), but this one has 8; set world"
    ):
        read_plan(saved[1], ours(), 8, "plan")


def changed(content: Any, change: Callable[[Any], Any]) -> Any:
    other = json.loads(json.dumps(content))
    change(other)
    return other


DAMAGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a number for an axis": (
        lambda content: content["inputs"]["0"].update(dims=[[7], []]),
        r"^plan is not a plan\.json \(inputs\.0\.dims\.0\.0: input should be a valid string, not 7\)",
    ),
    "an axis of no mesh": (
        lambda content: content["inputs"]["0"].update(dims=[["nowhere"], []]),
        r"^plan: the layout of input 0 has the axis 'nowhere'",
    ),
    "an axis twice": (
        lambda content: content["inputs"]["0"].update(dims=[list(content["mesh"]) * 2, []]),
        r"^plan is not a plan\.json \(Layout .* uses mesh axis .* more than once\)",
    ),
    "too few outputs": (
        lambda content: content["assignments"]["1"].update(outputs=[]),
        r"^plan has 0 outputs of 1 \(relu.*, which has 1",
    ),
    "another origin": (
        lambda content: content["assignments"]["1"].update(origin=["d0"]),
        r"^plan is not a plan\.json \(assignments\.1\.origin: input should be ",
    ),
    "shapes that are none": (
        lambda content: content["operators"][1].update(shapes=[None]),
        r"^plan is not a plan\.json \(operators\.1\.shapes\.0: input should be a valid list",
    ),
    "a search that is none": (
        lambda content: content.update(search=-1),
        r"^plan is not a plan\.json \(search: input should be ",
    ),
    "no mesh": (lambda content: content.pop("mesh"), r"plan is not a plan\.json \(mesh: field required\)"),
    "no shapes": (lambda content: content.pop("operators"), r"plan is not a plan\.json \(operators: field required\)"),
    "an unknown axis": (
        lambda content: content["assignments"]["1"].update(assignment={"d0": ["nowhere"]}),
        r"plan slices 1 \(relu.*which its rule does not allow",
    ),
    "a sum nobody knows": (
        lambda content: content["assignments"]["1"].update(assignment={"z": list(content["mesh"])}),
        r"plan slices 1 \(relu.*which its rule does not allow",
    ),
    "a lost parameter": (
        lambda content: content["tensors"].pop("2.weight"),
        r"plan does not say how parameter 2\.weight \(4, 16\) is laid out",
    ),
    "a parameter of another shape": (
        lambda content: content["parameters"]["2.weight"].update(shape=[4, 17]),
        r"parameter 2\.weight is \(4, 17\) there and \(4, 16\) here",
    ),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_changed_file_is_refused(saved: tuple[Plan, Any], damage: str) -> None:
    change, message = DAMAGES[damage]
    with pytest.raises(StrategyError, match=message):
        read_plan(changed(saved[1], change), ours(), 4, "plan")


@pytest.mark.parametrize("content", [None, [], 3, "text", {}])
def test_other_json_is_refused(content: Any) -> None:
    with pytest.raises(StrategyError, match=r"plan is not a plan\.json"):
        read_plan(content, ours(), 4, "plan")
