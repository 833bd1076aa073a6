"""The bound where a parameter has several uses: below every plan, and much nearer to it than work alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from models.gpt import GPT
from models.losses import NextTokenLoss
from strategies.core.errors import StrategyError
from strategies.core.graph import OperatorGraph
from strategies.core.request import Request
from strategies.cost.cluster import Cluster
from strategies.planner.planner import Planning
from strategies.rules.sharding import Assignment
from strategies.search.coarse import Coarse
from strategies.search.exact import Exact, proven
from strategies.search.halved import halved
from strategies.search.joining import joinings
from strategies.search.problem import Problem
from strategies.search.transfers import Transfers
from tests.strategies.search.problems import node, nodes, prime_mesh, problem, shaped, tokens


def tied(vocabulary: int, width: int, layers: int = 1, batch: int = 8, length: int = 16) -> OperatorGraph:
    with torch.device("meta"):
        net = GPT(vocabulary, length, width, layers, 4)
    return shaped(net, NextTokenLoss(), *tokens(batch, length))


class Thrice(nn.Module):
    """One matrix for three products, one of which hands on no gradient of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(nn.functional.linear(x, self.weight))
        x = torch.relu(nn.functional.linear(x, self.weight.detach()))
        return nn.functional.linear(x, self.weight)


def least(made: Problem, machine: Cluster) -> float:
    return Coarse(made, Transfers(made.mesh, machine), 1e-9).least(float("inf"))


@pytest.mark.parametrize(("stage", "turns"), [(0, 1), (0, 8), (1, 1), (2, 8), (3, 1)])
@pytest.mark.parametrize(("vocabulary", "width"), [(32, 16), (4096, 16), (64, 512), (50304, 768)])
def test_it_is_below_every_plan(vocabulary: int, width: int, stage: int, turns: int) -> None:
    """Where the exact search proves what the best plan is; within a factor, so that it is worth something."""
    graph = tied(vocabulary, width)
    for ranks, machine in ((4, node(4)), (8, nodes(2, 4)), (8, replace(nodes(4, 2), overlap=0.0))):
        made = replace(problem(graph, prime_mesh(ranks)), stage=stage, turns=turns, moved=80.0)
        best = Exact(made, machine, 1e-9).within(None)
        assert 0.6 * best.cost <= least(made, machine) <= best.cost * (1 + 1e-9)


@pytest.mark.parametrize("width", [16, 256, 4096])
def test_uses_without_a_gradient_take_nothing_for_sure(width: int) -> None:
    with torch.device("meta"):
        graph = shaped(Thrice(width), nn.MSELoss(), torch.zeros(64, width), torch.zeros(64, width))
    for machine in (node(8), nodes(2, 4)):
        made = problem(graph, prime_mesh(8))
        best = Exact(made, machine, 1e-9).within(None)
        assert 0.5 * best.cost <= least(made, machine) <= best.cost * (1 + 1e-9)


def test_on_many_axes_it_proves_what_joined_axes_gave() -> None:
    graph = tied(50304, 768, layers=2, batch=64, length=256)
    for ranks in (32, 64):
        made, machine = problem(graph, prime_mesh(ranks)), nodes(ranks // 8)
        found = Exact(made, machine).within(None)
        better = proven(made, machine, found)
        assert better.assignments == found.assignments and better.cost == found.cost
        assert better.gap < found.gap / 3 and better.gap < 0.15


def test_where_no_axes_can_be_joined_rounds_give_the_plan() -> None:
    """A configured layout has an axis between two that lie together."""
    graph = tied(256, 64, batch=64)
    names = [operator.name for operator in graph.operators if operator.name.endswith("q_proj")]
    apart: Assignment = {"batch0": ("d0", "d2")}
    made, machine = problem(graph, prime_mesh(48), dict.fromkeys(names, apart)), nodes(6)
    assert not list(joinings(made, machine))
    exact, other = Exact(made, machine), halved(made, machine)
    found = exact.within(None)
    assert found.assignments == other.assignments and found.cost == pytest.approx(other.cost)
    assert 0 < found.lower_bound < proven(made, machine, found).lower_bound <= found.cost
    with pytest.raises(StrategyError, match="the smallest"):
        exact.within(1000.0)


def test_a_plan_has_the_better_bound_and_a_joint_decision_does_not_wait_for_it() -> None:
    graph, machine = tied(256, 64, layers=2, batch=64), nodes(8)
    planning = Planning(graph, Request("auto", 64, search="dynamic_programming"), machine)
    plain, told = planning.plan(0, None).search, planning.plan(0, None, proven=True).search
    assert told["cost"] == plain["cost"] and told["lower_bound"] > plain["lower_bound"]
    assert told["gap"] == pytest.approx((told["cost"] - told["lower_bound"]) / told["lower_bound"])
