"""Alternatives of an operator: every cost is that of the complete plan with this operator changed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from models.gpt import GPT
from models.losses import NextTokenLoss
from models.quickstart import Net as Quickstart
from strategies.capture import Objective, capture
from strategies.core.graph import OperatorGraph, Ref
from strategies.core.mesh import Mesh
from strategies.core.plan import OperatorPlan, Plan
from strategies.core.program import LoweringOptions, Program
from strategies.core.request import OperatorStrategy, Request
from strategies.cost.collectives import path_seconds
from strategies.cost.step import step_cost
from strategies.lowering.lowering import lower
from strategies.optimizer.settings import OptimizerSettings
from strategies.planner.alternatives import Alternative, Neighbourhood, legal_assignments
from strategies.planner.planner import make_plan
from strategies.rules import rule_of
from tests.strategies.machines import cluster

MACHINE = cluster(2, 4)


def gpt() -> tuple[OperatorGraph, Plan]:
    tokens = torch.zeros(8, 16, dtype=torch.long)
    model = GPT(vocabulary=64, length=16, width=32, layers=1, heads=4, dropout=0.1)
    step = Objective(model, NextTokenLoss(), ("0", "1"), ("1",))
    graph = capture(step, (tokens, tokens), training=True).graph
    strategies = {"layers.*.feed_forward.up_proj": OperatorStrategy(((2, 1, 1), (4, 1), (4,)), None)}
    return graph, make_plan(graph, Request("auto", 8, strategies=strategies))


def quickstart() -> tuple[OperatorGraph, Plan]:
    batch = torch.zeros(16, 32), torch.zeros(16, 16)
    graph = capture(Objective(Quickstart(), torch.nn.MSELoss(), ("0", "1"), ("1",)), batch, training=True).graph
    strategies = {"matmul": OperatorStrategy(((2, 4), (4, 1)), ((8, 1),))}
    return graph, make_plan(graph, Request("auto", 8, strategies=strategies))


def complete_costs(graph: OperatorGraph, plan: Plan) -> tuple[float, float, Program]:
    """Seconds of computation and of redistribution of a plan."""
    program = lower(graph, plan, LoweringOptions(partial_loss=True))
    sent = sum(
        path_seconds(chain, one.spec.item_bytes, plan.mesh, MACHINE)
        for one in program.redistributions
        for chain in ((one.forward, one.backward) if one.differentiable else (one.forward,))
    )
    step = step_cost(graph, plan, program, MACHINE, OptimizerSettings())
    return step.compute, sent, program


def changed(graph: OperatorGraph, plan: Plan, name: str, other: Alternative) -> Plan:
    """The plan with one operator changed, and the parameters that it is the first to use."""
    operator, tensors = graph.by_name[name], dict(plan.tensors)
    for source in graph.of_kind("parameter"):
        users = graph.users[Ref(source.id)]
        if users and users[0][0] is operator:
            tensors[source.name] = other.operands[users[0][1]]
    mine = plan.operators[name]
    operators = {**plan.operators, name: OperatorPlan(other.assignment, mine.origin, mine.outputs)}
    return replace(plan, operators=operators, tensors=tensors)


@pytest.mark.parametrize("make", [quickstart, gpt])
def test_a_difference_is_that_of_the_full_plans(make) -> None:
    graph, plan = make()
    compute, sent, _ = complete_costs(graph, plan)
    tried = 0
    for operator in graph.operators:
        around = Neighbourhood(graph, plan, operator, MACHINE)
        for other in around.others()[::11]:
            now = complete_costs(graph, changed(graph, plan, operator.name, other))
            assert other.compute - around.planned.compute == pytest.approx(now[0] - compute, abs=1e-12)
            assert other.communication - around.planned.communication == pytest.approx(now[1] - sent, abs=1e-12)
            tried += 1
    assert tried > 5


@pytest.mark.parametrize("make", [quickstart, gpt])
def test_the_planned_cost_includes_all_executed_steps(make) -> None:
    graph, plan = make()
    _, _, program = complete_costs(graph, plan)
    for operator in graph.operators:
        around = Neighbourhood(graph, plan, operator, MACHINE).planned
        mine = [(one.forward, one.backward) for one in around.redistributions if one.operator == operator.name]
        assert mine == [(one.forward, one.backward) for one in program.redistributions if one.operator == operator.name]


def test_others_are_legal_sorted_and_without_the_chosen_one() -> None:
    graph, plan = quickstart()
    operator = graph.by_name["matmul2"]
    around = Neighbourhood(graph, plan, operator, MACHINE)
    others, sharding = around.others(), rule_of(operator, graph)
    assert [other.seconds for other in others] == sorted(other.seconds for other in others)
    assert all(sharding.legal(other.assignment, plan.mesh) for other in others)
    assert plan.operators["matmul2"].assignment not in [other.assignment for other in others]
    assert len(others) + 1 == len(list(legal_assignments(sharding, plan.mesh)))


def test_gradients_under_zero_are_gathered_too() -> None:
    graph, plan = quickstart()
    operator = graph.by_name["matmul2"]
    sharding = rule_of(operator, graph)
    first = next(factor for factor in sharding.operands[0] if factor is not None)
    # the batch is sharded, so the weight is replicated
    prices = [
        Neighbourhood(graph, plan, operator, MACHINE, stage).price({first: tuple(plan.mesh.names)})
        for stage in (0, 1, 2, 3)
    ]
    assert prices[0].gradients < prices[1].gradients
    assert prices[2].gradients < prices[3].gradients
    assert Neighbourhood(graph, plan, operator, MACHINE, accumulate=3).planned.compute == pytest.approx(
        3 * Neighbourhood(graph, plan, operator, MACHINE).planned.compute
    )


def test_many_axes_are_tried_as_runs() -> None:
    graph, _ = quickstart()
    sharding = rule_of(graph.by_name["matmul"], graph)
    mesh = Mesh(tuple((f"d{number}", 2) for number in range(8)))
    found = list(legal_assignments(sharding, mesh))
    assert 10 < len(found) < 4096
    for assignment in found:
        for axes in assignment.values():
            places = [mesh.names.index(axis) for axis in axes]
            assert places == list(range(places[0], places[-1] + 1))
