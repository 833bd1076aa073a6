"""Plans of the exact search through the planner: correct on simulated ranks, with configured strategies kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from models.gpt import GPT
from models.llama import Llama
from strategies.core.errors import StrategyError
from strategies.core.plan import Plan
from strategies.core.request import OperatorStrategy, Request
from strategies.cost.cluster import Cluster, Level, Link
from strategies.planner.planner import make_plan
from strategies.planner.step_certificate import StepEvaluation
from tests.strategies.simulated_model import TOLERANCE, Model

EXACT = Request("auto", 4, search="dynamic_programming", mesh=(("a", 2), ("b", 2)))


class Loss(nn.Module):
    def forward(self, scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten())


def cluster(links: float) -> Cluster:
    """A cluster with this link bandwidth: with fast links everything is sharded, with slow ones nothing."""
    levels = (Level("node", 2, Link(links / 4, 1e-9)), Level("device", 4, Link(links, 1e-9)))
    return Cluster("any", levels, {"float32": 1e9}, 2**30, 1e10, 1e-8)


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    torch.manual_seed(0)
    tokens, target = torch.randint(0, 32, (4, 8)), torch.randint(0, 32, (4, 8))
    nets = {"gpt": GPT(32, 8, 16, 3, 4), "llama": Llama(32, 8, 16, 3, 4, 2, 32)}
    return {name: Model(net, Loss(), (tokens, target)) for name, net in nets.items()}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("links", [1e7, 1e9, 1e12])
def test_found_plans_equal_one_device(models: dict[str, Model], name: str, links: float) -> None:
    plan = make_plan(models[name].graph, EXACT, cluster(links))
    assert plan.search["algorithm"] == "dynamic_programming"
    assert plan.search["gap"] <= 1e-9 and plan.search["lower_bound"] <= plan.search["cost"]
    assert {one.origin for one in plan.operators.values()} <= {"searched", "no rule"}
    assert models[name].difference(plan) < TOLERANCE


def test_slower_links_slice_less(models: dict[str, Model]) -> None:
    sliced = []
    for links in (1e5, 1e12):
        plan = make_plan(models["gpt"].graph, EXACT, cluster(links))
        sliced.append(sum(bool(one.assignment) for one in plan.operators.values()))
    assert sliced[0] < sliced[1]


def test_configured_strategies_are_kept_and_cost_no_less(models: dict[str, Model]) -> None:
    graph, name = models["llama"].graph, "layers.1.feed_forward.down_proj"
    free = make_plan(graph, EXACT, cluster(1e9))
    wanted = {name: OperatorStrategy(((1, 1, 4), (1, 4)), None)}
    plan = make_plan(graph, replace(EXACT, strategies=wanted), cluster(1e9))
    assert plan.operators[name].origin == "configured"
    assert plan.operators[name].assignment == {"k": ("a", "b")}
    assert plan.search["cost"] >= free.search["cost"] * (1 - 1e-12)
    assert models["llama"].difference(plan) < TOLERANCE


def test_every_stage_of_zero_and_a_limit_have_plans(models: dict[str, Model]) -> None:
    for stage in (1, 2, 3):
        plan = make_plan(models["gpt"].graph, replace(EXACT, zero_stage=stage), cluster(1e9))
        assert models["gpt"].difference(plan) < TOLERANCE
    plan = make_plan(models["gpt"].graph, replace(EXACT, memory_limit=165_000), cluster(1e7))
    assert models["gpt"].difference(plan) < TOLERANCE


def test_without_a_cluster_costs_assume_one_level_of_devices(models: dict[str, Model]) -> None:
    plan = make_plan(models["gpt"].graph, EXACT)
    assert 0 < plan.search["lower_bound"] <= plan.search["cost"]


@pytest.mark.parametrize("search", ["dynamic_programming", "sharding_propagation"])
def test_a_plan_whose_step_cannot_run_is_not_taken(models: dict[str, Model], search: str) -> None:
    product = models["llama"].graph.by_name["layers.1.feed_forward.down_proj"].name
    strategies = {"layers.0.feed_forward.down_proj": OperatorStrategy(((4, 1, 1), (1, 1)), None)}
    request = replace(EXACT, search=search, strategies=strategies)
    first = make_plan(models["llama"].graph, request, cluster(1e9)).operators[product].assignment

    def seconds(plan: Plan) -> float:
        if plan.operators[product].assignment == first:
            raise StrategyError("MW402", "its step cannot run")
        return 1.0

    other = make_plan(models["llama"].graph, request, cluster(1e9), StepEvaluation(seconds))
    assert other.operators[product].assignment != first

    def never(plan: Plan) -> float:
        raise StrategyError("MW402", "its step cannot run")

    if search == "dynamic_programming":
        with pytest.raises(StrategyError, match="its step cannot run"):
            make_plan(models["llama"].graph, request, cluster(1e9), StepEvaluation(never))
