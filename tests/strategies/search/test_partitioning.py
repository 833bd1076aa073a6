"""One round for all operators: its costs add up to those of the plan, and never increase them."""

from __future__ import annotations

import cProfile
import pstats
from itertools import pairwise, product

import pytest
import torch
from torch import nn

from models.losses import NextTokenLoss
from models.moe import MoE
from strategies.core.graph import OperatorGraph
from strategies.cost.plan_cost import PlanCost
from strategies.cost.resharding_estimate import estimated_seconds
from strategies.rules.sharding import Assignment
from strategies.search.equivalence_classes import equivalence_classes
from strategies.search.recursive_programming import Partitioning, partitioned
from tests.strategies.search.problems import gpt, llama, node, nodes, prime_mesh, problem, shaped, tokens


def moe() -> OperatorGraph:
    with torch.device("meta"):
        net = MoE(32000, 512, 1024, 2, 16, 4096, 8, 2).bfloat16()
    return shaped(net, NextTokenLoss(), *tokens(64, 512))


@pytest.mark.few(1)
@pytest.mark.parametrize("model", [lambda: gpt(3), lambda: llama(4), moe], ids=["gpt", "llama", "moe"])
def test_the_total_of_a_round_is_the_cost_of_its_plan(model: object) -> None:
    """Repeated layers are counted, values with several uses are resharded once, tied weights are reduced once."""
    assert callable(model)
    mesh = prime_mesh(16)
    made = problem(model(), mesh)
    cost = PlanCost(made, nodes(2), estimated_seconds)
    classes = equivalence_classes(made)
    partitioning = Partitioning(cost, classes)
    for axis in mesh.names:
        total = partitioning.decide((axis,), staying=False)
    chosen = {id: partitioning.chosen[number] for id, number in classes.of.items()}
    assert total == pytest.approx(cost.total(chosen), rel=1e-9)


def test_deciding_again_never_costs_more() -> None:
    made = problem(llama(3), prime_mesh(16))
    partitioning = Partitioning(PlanCost(made, nodes(2), estimated_seconds), equivalence_classes(made))
    totals = [partitioning.decide((axis,), staying=False) for axis in made.mesh.names][-1:]
    for run in [("d0",), ("d3",), ("d1", "d2"), made.mesh.names]:
        totals.append(partitioning.decide(run, staying=True))
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(totals))


def test_one_axis_is_decided_as_trying_everything_would() -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4096, 8192, bias=False), nn.Linear(8192, 512, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.down(torch.relu(self.up(x)))
            return out

    with torch.device("meta"):
        graph = shaped(Small(), nn.MSELoss(), torch.zeros(64, 4096), torch.zeros(64, 512))
    made = problem(graph, prime_mesh(2))
    cost = PlanCost(made, node(2, overlap=0.0), estimated_seconds)
    partitioning = Partitioning(cost, equivalence_classes(made))
    total = partitioning.decide(("d0",), staying=False)
    every: list[list[Assignment]] = [
        [{}, *({factor: ("d0",)} for factor, size in made.shardings[o.id].sizes.items() if size % 2 == 0)]
        for o in graph.operators
    ]
    ids = [operator.id for operator in graph.operators]
    best = min(cost.total(dict(zip(ids, chosen, strict=True))) for chosen in product(*every))
    assert total == pytest.approx(best)
    assert partitioning.chosen[0] == {"n": ("d0",)}  # up by columns and down by rows: only 64 x 512 is sent


def test_equal_subproblems_are_solved_once() -> None:
    """Other orders of axes, coarser meshes and other searches have the same candidates."""
    made = problem(gpt(2), prime_mesh(8))

    def calls() -> int:
        profile = cProfile.Profile()
        profile.runcall(partitioned, made, node(8))
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]

    first, again = calls(), calls()
    assert again < first / 10
