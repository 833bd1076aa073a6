"""No plan's step takes less time than its lower bound, with any overlap and fused calls; exact searches find the
cheapest plan that any search finds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product

import pytest
import torch
from torch import Tensor, nn

from strategies.core.graph import OperatorGraph, Ref
from strategies.core.mesh_refinement import merged
from strategies.core.plan import Plan
from strategies.core.program import LoweringOptions
from strategies.cost.cluster import Cluster, Level, Link
from strategies.cost.problem import Problem
from strategies.cost.resharding_matrix import ReshardingCosts
from strategies.cost.step import calling_seconds, need_of, norm_seconds, step_cost
from strategies.lowering.fusion import KINDS, LARGEST, fuse
from strategies.lowering.lowering import lower
from strategies.lowering.overlap import overlap
from strategies.optimizer.settings import OptimizerSettings
from strategies.planner.step_certificate import StepSavings, step_bounds
from strategies.search.strategy_space import StrategySpace
from tests.strategies.search.problems import prime_mesh, problem, shaped
from tests.strategies.search.test_dynamic_programming import MESHES, Solution, plan_of, problem_of

LINK = Link(1e8, 2e-5, 1e-5)
MACHINE = Cluster("small", (Level("device", 8, LINK),), {"float32": 1e9}, 2**30, 4e9, 1e-6, overlap=0.9)
"""A call takes as long as some thousand elements, and nine tenths of it can overlap."""
MACHINES = {share: replace(MACHINE, overlap=share) for share in (0.25, 0.9)}
NATIVE = OptimizerSettings(3, accumulate=2, engine="native")
JOINED = dict.fromkeys(KINDS, LARGEST)


class Branches(nn.Module):
    """Computation that overlaps with redistribution: branches, a skip connection, a product of two values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.first(x) @ torch.tanh(self.second(x)).T + x[:, :1]).square().mean()


class Chain(nn.Module):
    """A chain, in which no computation overlaps with redistribution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))).square().mean()


def graph_of(net: type[nn.Module], width: int) -> OperatorGraph:
    class Same(nn.Module):
        def forward(self, loss: Tensor, target: Tensor) -> Tensor:
            return loss + target.sum() * 0

    with torch.device("meta"):
        return shaped(net(), Same(), torch.zeros(8, width), torch.zeros(8))


def seconds_of(
    graph: OperatorGraph, plan: Plan, machine: Cluster, updating: OptimizerSettings, scalar: bool = True
) -> float:
    """Seconds of a step with default settings."""
    options = LoweringOptions(sharded_optimizer=updating.stage > 0, partial_loss=scalar)
    program = overlap(fuse(lower(graph, plan, options), JOINED))
    return step_cost(graph, plan, program, machine, updating).total


def savings(graph: OperatorGraph, machine: Cluster, updating: OptimizerSettings, ranks: int) -> StepSavings:
    learning = {ref for one in graph.operators if one.id in graph.returning for ref in one.operands}
    count = sum(source.trainable and Ref(source.id) in learning for source in graph.of_kind("parameter"))
    constant = calling_seconds(count, machine, updating)
    if updating.stage and not updating.native:
        constant += norm_seconds(prime_mesh(ranks), machine)
    return StepSavings(optimizer_bytes=need_of(updating).moved, constant=constant)


def plans(made: Problem) -> Iterator[Plan]:
    space = StrategySpace(made, ReshardingCosts(made.mesh, MACHINE))
    ids = [operator.id for operator in made.graph.operators]
    options = [space.of(operator).assignments for operator in made.graph.operators]
    total = math.prod(map(len, options))
    every = product(*options) if total <= 2000 else islice(product(*options), 0, None, total // 2000)
    for indices in islice(every, 2000):
        yield plan_of(made, Solution(dict(zip(ids, indices, strict=True)), 0.0, 0.0))


def check(made: Problem, machine: Cluster, updating: OptimizerSettings, scalar: bool) -> float:
    zero = {"stage": updating.stage, "engine": updating.engine}
    made = replace(made, micro_batches=updating.accumulate, overlaps=updating.overlap, **zero)
    known = savings(made.graph, machine, updating, made.mesh.size)
    bound = max(bound for bound, _ in step_bounds(made, machine, (), known))
    least = min(seconds_of(made.graph, merged(plan), machine, updating, scalar) for plan in plans(made))
    assert 0 < bound <= least * (1 + 1e-12)
    return bound / least


@pytest.mark.slow
@pytest.mark.parametrize("share", MACHINES)
@pytest.mark.parametrize(
    "updating",
    [
        OptimizerSettings(overlap=True),
        OptimizerSettings(1, accumulate=2),
        OptimizerSettings(3),
        NATIVE,
        replace(NATIVE, overlap=True),
        replace(NATIVE, stage=1, overlap=True),
    ],
    ids=str,
)
def test_no_plan_of_a_small_graph_is_below_a_bound(share: float, updating: OptimizerSettings) -> None:
    for net, width in ((Branches, 8), (Chain, 16)):
        made = problem(graph_of(net, width), MESHES[0])
        check(made, MACHINES[share], updating, True)


@pytest.mark.slow
@pytest.mark.parametrize("share", MACHINES)
def test_no_plan_of_a_random_graph_is_below_a_bound(share: float) -> None:
    for seed in range(40):
        check(problem_of(seed, MESHES[seed % len(MESHES)]), MACHINES[share], OptimizerSettings(overlap=True), False)
