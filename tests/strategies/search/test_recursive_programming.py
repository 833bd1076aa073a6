"""Recursive programming: its plans train and keep configured strategies, and its work hardly grows."""

from __future__ import annotations

import cProfile
import math
import pstats
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from models.ffn import FFN
from models.gpt import GPT
from models.llama import Llama
from models.losses import NextTokenLoss
from models.moe import MoE
from strategies.core.errors import StrategyError
from strategies.core.mesh import accumulate
from strategies.core.plan import Plan
from strategies.core.request import OperatorStrategy, Request
from strategies.cost.cluster import Cluster, Level, Link
from strategies.cost.plan_cost import PlanCost
from strategies.cost.problem import Problem
from strategies.planner.default_strategies import batch_factors
from strategies.planner.planner import make_plan
from strategies.rules import rule_of, sharding
from strategies.search.recursive_programming import recursive_search
from tests.strategies.search.problems import gpt, line, llama, nodes, prime_mesh, problem, shaped
from tests.strategies.simulated_model import TOLERANCE, Model

LINKED = Cluster("linked", (Level("rank", 24, Link(1e12, 0.0)),), {"float32": 1e8, "float64": 1e8}, 10**9, 1e8, 0.0)
"""Slow devices and fast links: the latency of collectives never favours replication."""


def text(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randint(0, 32, (4, 8)), torch.randint(0, 32, (4, 8))


def searched(model: Model, world_size: int, **options: Any) -> Plan:
    return make_plan(model.graph, Request("auto", world_size, "recursive_programming", **options), LINKED)


MODELS = {
    "gpt": lambda: Model(GPT(32, 8, 16, 2, 4), NextTokenLoss(), text()),
    "llama": lambda: Model(Llama(32, 8, 32, 2, 8, 4, 64), NextTokenLoss(), text()),
    "moe": lambda: Model(MoE(32, 8, 16, 1, 4, 32, 4, 2), NextTokenLoss(), text()),
    "ffn": lambda: Model(FFN([16, 32, 24, 8]), nn.CrossEntropyLoss(), (torch.randn(12, 16), torch.arange(12) % 8)),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        ("gpt", 8),
        pytest.param("llama", 16, marks=pytest.mark.slow),
        pytest.param("moe", 8, marks=pytest.mark.slow),
        ("ffn", 24),
        ("ffn", 1),
    ],
)
def test_its_plans_train(name: str, world_size: int) -> None:
    model = MODELS[name]()
    plan = searched(model, world_size)
    assert {operator.origin for operator in plan.operators.values()} <= {"searched", "no rule"}
    sliced = [operator for operator in plan.operators.values() if operator.assignment]
    assert (world_size == 1) == (not sliced)
    assert model.difference(plan) < TOLERANCE


def test_configured_strategies_are_kept() -> None:
    model = MODELS["llama"]()
    strategies = {
        "layers.0.feed_forward.down_proj": OperatorStrategy(((1, 1, 8), (1, 8)), None),
        "layers.1.attention.q_proj": OperatorStrategy(((2, 4, 1), (1, 1)), None),
        "layers.1@1": OperatorStrategy(((4, 1, 2), (4, 1, 2)), None),
    }
    plan = searched(model, 8, strategies=strategies)
    for name, wanted in strategies.items():
        sharding = rule_of(model.graph.by_name[name], model.graph)
        layouts = sharding.operand_layouts(plan.operators[name].assignment)
        assert tuple(layout.counts(plan.mesh) for layout in layouts) == wanted.inputs
        assert plan.operators[name].origin == "configured"
    assert model.difference(plan) < TOLERANCE


def test_handed_on_results_and_named_meshes_are_kept() -> None:
    model = MODELS["llama"]()
    wanted = OperatorStrategy(((2, 1, 4), (1, 4)), ((2, 4, 1),))
    plan = searched(model, 8, mesh=(("dp", 2), ("tp", 4)), strategies={"layers.0.feed_forward.down_proj": wanted})
    assert plan.mesh.axes == (("dp", 2), ("tp", 4))
    (result,) = plan.operators["layers.0.feed_forward.down_proj"].outputs or ()
    assert result.counts(plan.mesh) == (2, 4, 1)
    assert model.difference(plan) < TOLERANCE


def test_a_machine_that_is_too_small_is_reported() -> None:
    with pytest.raises(StrategyError, match=r"has 24 devices .*, but the mesh .* needs 32"):
        searched(MODELS["ffn"](), 32)


@pytest.mark.slow
def test_the_mesh_has_the_boundaries_of_the_levels() -> None:
    """3 nodes of 8: an outer axis of 3, three inner ones of 2, whatever the dims divide by."""
    machine = Cluster(
        "three", (Level("node", 3, Link(1e9, 0.0)), Level("gpu", 8, Link(1e11, 0.0))), {"float32": 1e9}, 1, 1e9, 0.0
    )
    with torch.device("meta"):
        graph = shaped(FFN([48, 96, 96, 48]), nn.MSELoss(), torch.zeros(96, 48), torch.zeros(96, 48))
    plan = make_plan(graph, Request("auto", 24, "recursive_programming"), machine)
    assert set(accumulate(tuple(size for _, size in plan.mesh.axes))) <= {3, 6, 12, 24}
    assert machine.units(24) == (3,) and machine.units(8) == () and machine.units(12) == ()


def test_it_costs_no_more_than_data_parallelism() -> None:
    """On the cluster of the plan, despite the approximations of the closed form."""
    for graph in (gpt(3), llama(3)):
        mesh = prime_mesh(16)
        made, machine = problem(graph, mesh), nodes(2)
        found = recursive_search(made, machine)
        data_parallel = {
            o.id: {factor: mesh.names}
            if (factor := batch_factors(made).get(o.id)) and made.shardings[o.id].sizes[factor] % 16 == 0
            else {}
            for o in graph.operators
        }
        assert PlanCost(made, machine).total(found.assignments) <= PlanCost(made, machine).total(data_parallel)


def calls(made: Problem, machine: Cluster, first: bool = False) -> int:
    """Python calls of a search: work that no other process disturbs; of the `first` one, with the layouts that it
    makes, or of the second, which reuses the cached resharding paths and layouts."""
    if not first:
        recursive_search(made, machine)
    _ = made.graph.users, made.graph.specs, made.graph.trained
    profile = cProfile.Profile()
    profile.runcall(recursive_search, replace(made), machine)  # a copy without cached properties
    return pstats.Stats(profile).total_calls  # type: ignore[attr-defined]


def slope(points: list[tuple[float, float]]) -> float:
    """Of the straight line through the points, both on logarithmic scales."""
    (x0, y0), (x1, y1) = ((math.log(x), math.log(y)) for x, y in (points[0], points[-1]))
    return (y1 - y0) / (x1 - x0)


@pytest.mark.slow
def test_work_is_linear_in_operators_that_all_differ() -> None:
    points = [(n, calls(problem(line(n, repeating=False), prime_mesh(16)), nodes(2))) for n in (40, 160)]
    assert 0.7 < slope(points) < 1.1


def test_work_hardly_grows_with_layers_that_repeat() -> None:
    few, many = (calls(problem(line(n), prime_mesh(16)), nodes(2)) for n in (200, 1600))
    assert many < 8 * few * 0.7  # recognising them is linear, choosing strategies takes no more


def test_work_grows_with_the_square_of_the_logarithm_of_the_devices() -> None:
    """A round per axis, and layouts with as many axes: 128 times the devices are 4 times the work."""
    few, many = (calls(problem(line(40), prime_mesh(2**n)), nodes(2**n // 8)) for n in (7, 14))
    assert 2 < many / few < 4.5


@pytest.mark.slow
def test_a_slope_of_one_up_to_thousands_of_operators() -> None:
    points = [(n, calls(problem(line(n), prime_mesh(16384)), nodes(2048))) for n in (1000, 3000, 10000)]
    assert slope(points) < 1.05
    distinct = []
    for n in (50, 400):
        sharding.forget()
        distinct.append((n, calls(problem(line(n, repeating=False), prime_mesh(128)), nodes(16), first=True)))
    assert 0.8 < slope(distinct) < 1.05
