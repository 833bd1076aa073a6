"""The cost of the plan equals that of the engine's program, and no assignment costs less."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from models.losses import NextTokenLoss
from models.moe import MoE
from strategies.core.graph import Ref
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import OperatorPlan, Plan
from strategies.core.program import Redistribute
from strategies.cost.cluster import Cluster, Level, Link
from strategies.cost.collectives import path_seconds
from strategies.cost.node_cost import NodeCost
from strategies.cost.plan_cost import PlanCost
from strategies.cost.problem import Problem
from strategies.cost.resharding_matrix import ReshardingCosts
from strategies.cost.roofline import operator_seconds
from strategies.lowering.lowering import lower
from strategies.rules import rule_of
from strategies.search.cost_graph import CostGraph
from strategies.search.dual_bound import ReducedCostFixing
from strategies.search.dynamic_programming import search
from strategies.search.elimination import FactorGraph
from strategies.search.recursive_programming import recursive_search
from strategies.search.solution import Solution
from strategies.search.strategy_space import StrategySpace
from tests.fuzz.cases import random_case
from tests.strategies.search.problems import node, problem, shaped, tokens

CLUSTER = Cluster(
    "small",
    (Level("node", 4, Link(1e8, 2e-6)), Level("device", 4, Link(1e9, 5e-7))),
    {"float32": 1e9},
    2**30,
    4e9,
    1e-7,
)
"""A cluster on which sharding tensors of a few hundred elements is faster."""
MESHES = [Mesh((("a", 2),)), Mesh((("a", 3),)), Mesh((("a", 2), ("b", 2))), Mesh((("a", 4), ("b", 2)))]


def problem_of(seed: int, mesh: Mesh, operators: tuple[int, int] = (2, 4)) -> Problem:
    """The problem of a random graph, its inputs in random layouts."""
    graph, rng = random_case(seed, operators).graph, random.Random(seed)
    inputs = {}
    for source in graph.of_kind("input"):
        shape, axis = source.spec.shape, rng.choice(mesh.names)
        fits = [dim for dim, size in enumerate(shape) if size % mesh.sizes[axis] == 0]
        chosen = rng.choice([*fits, None])
        inputs[source.name] = Layout(tuple((axis,) if dim == chosen else () for dim in range(len(shape))))
    return Problem(graph, mesh, {o.id: rule_of(o, graph) for o in graph.operators}, inputs, {}, {})


def plan_of(problem: Problem, found: Solution) -> Plan:
    graph, tensors = problem.graph, {}
    operators = {
        o.name: OperatorPlan(found.assignments[o.id], "searched", problem.outputs.get(o.id)) for o in graph.operators
    }
    for source in graph.sources:
        if source.kind != "input":
            tensors[source.name] = Layout.replicated(len(source.spec.shape))
            uses = graph.users[Ref(source.id)]
            if source.kind == "parameter" and uses:
                user, position = uses[0]
                own = problem.shardings[user.id].operand_layouts(found.assignments[user.id])[position]
                tensors[source.name] = found.tensors.get(Ref(source.id), own)
    return Plan(problem.mesh, operators, problem.inputs, tensors)


def executed_seconds(problem: Problem, found: Solution, bucket: float) -> float:
    """The cost of the lowered program: its operators, all resharding paths, and the gradient reductions."""
    graph, mesh, plan = problem.graph, problem.mesh, plan_of(problem, found)
    program = lower(graph, plan)
    total = 0.0
    for operator in graph.operators:
        sharding, trained = problem.shardings[operator.id], operator.id in graph.returning
        total += operator_seconds(sharding, found.assignments[operator.id], operator, graph, mesh, CLUSTER, trained)
    for one in program.instructions:
        if isinstance(one, Redistribute):
            total += path_seconds(one.forward, one.spec.item_bytes, mesh, CLUSTER)
            total += path_seconds(one.backward, one.spec.item_bytes, mesh, CLUSTER) if one.differentiable else 0
    for source in graph.of_kind("parameter"):
        used = any(user.id in graph.returning for user, _ in graph.users[Ref(source.id)])
        if source.trainable and used:
            layout = Layout(plan.tensors[source.name].dims, frozenset(program.reductions[source.name]))
            total += NodeCost(problem, CLUSTER).parameter_seconds(layout, source.spec)
    return total


def combinations(problem: Problem) -> list[dict[str, object]]:
    space = StrategySpace(problem, ReshardingCosts(problem.mesh, CLUSTER))
    ids = [operator.id for operator in problem.graph.operators]
    options = [space.of(operator).assignments for operator in problem.graph.operators]
    if math.prod(map(len, options)) > 1500:
        return []
    return [dict(zip(ids, indices, strict=True)) for indices in product(*options)]


def cheapest(problem: Problem) -> float | None:
    """The least cost over all assignments and all layouts of parameters with several uses; None if too many."""
    graph = CostGraph(problem, StrategySpace(problem, ReshardingCosts(problem.mesh, CLUSTER)))
    layouts = [(ref, dict.fromkeys(shared.layouts)) for ref, (_, shared) in graph.parameters.items()]
    every = combinations(problem)
    if not every or len(every) * math.prod(len(found) for _, found in layouts) > 6000:
        return None
    cost = PlanCost(problem, CLUSTER)
    return min(
        cost.total(one, dict(zip([ref for ref, _ in layouts], chosen, strict=True)))
        for one in every
        for chosen in product(*(found for _, found in layouts))
    )


@pytest.mark.slow
def test_cost_is_that_of_the_program() -> None:
    for seed in range(60):
        problem = problem_of(seed, MESHES[seed % len(MESHES)], (3, 12))
        found = search(problem, CLUSTER)
        assert found.cost == pytest.approx(executed_seconds(problem, found, 0.0), rel=1e-9), seed
        assert found.cost == pytest.approx(PlanCost(problem, CLUSTER).total(found.assignments, found.tensors)), seed
        assert found.lower_bound <= found.cost * (1 + 1e-12)


def compare(seeds: range) -> int:
    compared = 0
    for seed in seeds:
        problem = problem_of(seed, MESHES[seed % len(MESHES)])
        least = cheapest(problem)
        if least is None:
            continue
        found = search(problem, CLUSTER)
        assert found.lower_bound <= least * (1 + 1e-12), seed
        assert found.cost == pytest.approx(least, rel=1e-9), seed
        compared += 1
    return compared


@pytest.mark.slow
def test_no_assignment_is_cheaper() -> None:
    assert compare(range(60)) >= 30


def test_uses_with_and_without_a_gradient_share_nothing() -> None:
    """Each pays all of its resharding, not a part."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(6, 9, 4))

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.weight
            return nn.functional.pad(y, (0, 2)) * y.argmax()

    with torch.device("meta"):
        graph = shaped(Shifted(), nn.L1Loss(), torch.zeros(6, 9, 4), torch.zeros(6, 9, 6))
    free = [one.name for one in graph.operators if one.op in ("mul", "argmax", "pad")][:3]
    fixed = {one.name: {} for one in graph.operators if one.name not in free}
    made = problem(graph, Mesh((("a", 2), ("b", 3))), fixed)
    found = search(made, CLUSTER)
    assert found.cost == pytest.approx(cheapest(made), rel=1e-9) and found.gap < 1e-9


@pytest.mark.parametrize("most", [256, 1])
def test_gradients_of_many_uses_are_added_over_axes_that_some_use_leaves(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An all-reduce over both axes costs less than one over the axis between nodes, which is all that 11 of 12 uses
    leave; with few candidates only the bound is lower."""

    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(12):
                x = torch.relu(x @ self.weight)
            return x

    monkeypatch.setattr("strategies.search.strategy_space.MOST_COMBINATIONS", most)
    with torch.device("meta"):
        graph = shaped(Repeated(), nn.MSELoss(), torch.zeros(8, 8), torch.zeros(8, 8))
    free = [one.name for one in graph.operators if one.op == "matmul"][-1:]
    fixed = {one.name: {rule_of(one, graph).factors[0]: ("a",)} for one in graph.operators if one.name not in free}
    made = problem(graph, Mesh((("a", 4), ("b", 4))), fixed)
    least, found = cheapest(made), search(made, CLUSTER)
    assert found.cost == pytest.approx(PlanCost(made, CLUSTER).total(found.assignments, found.tensors))
    assert least is not None and found.lower_bound <= least * (1 + 1e-12)
    assert found.cost == pytest.approx(least, rel=1e-9) or most == 1


@pytest.mark.parametrize("largest", [2**5, 2**4, 2**2])
def test_networks_that_are_too_wide_have_the_same_optimum(largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed: list[ReducedCostFixing] = []

    class Noted(ReducedCostFixing):
        def __init__(self, graph: FactorGraph, tolerance: float) -> None:
            super().__init__(graph, tolerance)
            fixed.append(self)

    monkeypatch.setattr("strategies.search.dynamic_programming.ReducedCostFixing", Noted)
    for seed in range(20):
        problem = problem_of(seed, MESHES[seed % len(MESHES)], (4, 8))
        best = search(problem, CLUSTER).cost
        with monkeypatch.context() as patched:
            patched.setattr("strategies.search.elimination.LARGEST", largest)
            found = search(problem, CLUSTER)
        assert found.gap <= 1e-9, seed
        assert found.cost == pytest.approx(best, rel=1e-9), seed
        assert found.cost == pytest.approx(executed_seconds(problem, found, 0.0), rel=1e-9), seed
    assert len(fixed) > 5


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 2), (2, 2, 2)])
def test_a_mixture_of_experts_has_a_certified_plan(sizes: tuple[int, ...]) -> None:
    """The treewidth of its router's graph is too large for elimination."""
    with torch.device("meta"):
        net = MoE(256, 32, 32, 2, 4, 64, 8, 2)
    made = problem(shaped(net, NextTokenLoss(), *tokens(16, 32)), Mesh(tuple(zip("abcd", sizes, strict=False))))
    machine = node(8)
    found = search(made, machine)
    assert found.cost == pytest.approx(PlanCost(made, machine).total(found.assignments, found.tensors))
    assert found.cost <= PlanCost(made, machine).total(recursive_search(made, machine).assignments) * (
        1 + max(found.gap, 1e-9)
    )
    assert found.gap <= (1e-9 if len(sizes) == 2 else 0.01)


@pytest.mark.slow
def test_no_assignment_is_cheaper_on_many_graphs() -> None:
    assert compare(range(1000, 1450)) >= 200
