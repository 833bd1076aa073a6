"""One decision for all operators: it adds up to what the plan costs, and never makes it dearer."""

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
from strategies.rules.sharding import Assignment
from strategies.search.classes import classes
from strategies.search.direct import direct_seconds
from strategies.search.prices import Pricing
from strategies.search.recursive import in_rounds, prices
from strategies.search.rounds import Rounds
from tests.strategies.search.problems import gpt, llama, node, nodes, prime_mesh, problem, shaped, tokens


def moe() -> OperatorGraph:
    with torch.device("meta"):
        net = MoE(32000, 512, 1024, 2, 16, 4096, 8, 2).bfloat16()
    return shaped(net, NextTokenLoss(), *tokens(64, 512))


@pytest.mark.parametrize("model", [lambda: gpt(3), lambda: llama(4), moe], ids=["gpt", "llama", "moe"])
def test_the_total_of_a_decision_is_the_price_of_its_plan(model: object) -> None:
    """Repeated layers are counted, values with several uses are carried once, tied weights are summed once."""
    assert callable(model)
    mesh = prime_mesh(16)
    made = problem(model(), mesh)
    pricing = Pricing(made, nodes(2), direct_seconds)
    alike = classes(made)
    rounds = Rounds(pricing, alike)
    for axis in mesh.names:
        told = rounds.decide((axis,), staying=False)
    chosen = {id: rounds.chosen[number] for id, number in alike.of.items()}
    assert told == pytest.approx(pricing.total(chosen), rel=1e-9)


def test_deciding_again_never_costs_more() -> None:
    made = problem(llama(3), prime_mesh(16))
    rounds = Rounds(Pricing(made, nodes(2), direct_seconds), classes(made))
    totals = [rounds.decide((axis,), staying=False) for axis in made.mesh.names][-1:]
    for run in [("d0",), ("d3",), ("d1", "d2"), made.mesh.names]:
        totals.append(rounds.decide(run, staying=True))
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
    pricing = Pricing(made, node(2, overlap=0.0), direct_seconds)
    rounds = Rounds(pricing, classes(made))
    told = rounds.decide(("d0",), staying=False)
    every: list[list[Assignment]] = [
        [{}, *({factor: ("d0",)} for factor, size in made.shardings[o.id].sizes.items() if size % 2 == 0)]
        for o in graph.operators
    ]
    ids = [operator.id for operator in graph.operators]
    best = min(pricing.total(dict(zip(ids, chosen, strict=True))) for chosen in product(*every))
    assert told == pytest.approx(best)
    assert rounds.chosen[0] == {"n": ("d0",)}  # up by columns and down by rows: 64 x 512 is all that is sent


def test_what_was_decided_once_is_not_decided_again() -> None:
    """Other orders of axes, coarser meshes and other searches meet the same choices."""
    made = problem(gpt(2), prime_mesh(8))

    def calls() -> int:
        profile = cProfile.Profile()
        profile.runcall(in_rounds, prices(made, node(8)), classes(made))
        return int(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]

    first, again = calls(), calls()
    assert again < first / 10
