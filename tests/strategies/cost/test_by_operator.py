"""The costs of single operators add up to the cost of the step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.gpt import GPT
from models.losses import NextTokenLoss
from strategies.capture import Objective, capture
from strategies.core.graph import OperatorGraph
from strategies.core.program import LoweringOptions
from strategies.core.request import OperatorStrategy, RecomputeRequest, Request
from strategies.cost.by_operator import operator_costs
from strategies.cost.step import step_cost
from strategies.lowering.lowering import lower
from strategies.optimizer.settings import OptimizerSettings
from strategies.planner.planner import make_plan
from tests.strategies.machines import cluster

MACHINE = cluster(2, 4)


@pytest.fixture(scope="module")
def gpt() -> OperatorGraph:
    model: nn.Module = GPT(vocabulary=64, length=16, width=32, layers=2, heads=4)
    tokens = torch.zeros(8, 16, dtype=torch.long)
    return capture(Objective(model, NextTokenLoss(), ("0", "1"), ("1",)), (tokens, tokens), training=True).graph


@pytest.mark.few(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_parts_add_up_to_the_step(gpt: OperatorGraph, stage: int, recompute: bool) -> None:
    strategies = {"layers.*.feed_forward.up_proj": OperatorStrategy(((2, 1, 1), (4, 1), (4,)), None)}
    wanted = RecomputeRequest("full") if recompute else None
    plan = make_plan(gpt, Request("auto", 8, strategies=strategies, recompute=wanted))
    program = lower(gpt, plan, LoweringOptions(sharded_optimizer=stage > 0, partial_loss=True))
    settings = OptimizerSettings(stage, torch.optim.Adam, accumulate=3)
    step = step_cost(gpt, plan, program, MACHINE, settings)
    costs = operator_costs(gpt, plan, program, MACHINE, settings, step).values()
    assert sum(cost.forward for cost in costs) == pytest.approx(step.forward)
    assert sum(cost.backward for cost in costs) == pytest.approx(step.backward + step.recomputed)
    assert sum(cost.gradients for cost in costs) == pytest.approx(step.exposed + sum(step.zero.values()))
    assert all(0 <= cost.calls <= cost.forward + cost.backward + 1e-12 for cost in costs)
    calls = [cost.calls / settings.accumulate / MACHINE.launch for cost in costs]
    assert calls == pytest.approx([round(number) for number in calls])
    assert {round(number) for number in calls} >= {0, 2, 3, 5 if recompute else 4}
    if not recompute:
        sent, total = sum(cost.communication for cost in costs), sum(step.redistributions.values())
        loss = total - sent  # the sum of the loss over the ranks belongs to no operator
        assert 0 < sent and (0 < loss < 1e-3 if program.loss_axes else loss == pytest.approx(0, abs=1e-12))
    levels = sum(seconds for cost in costs for seconds in cost.levels.values())
    local = sum(cost.communication + cost.gradients for cost in costs) - levels
    assert -1e-12 <= local < 0.2 * levels
    assert set().union(*(cost.levels for cost in costs)) == {"node", "gpu"}


def test_parameters_are_counted_once_and_by_parts_under_zero(gpt: OperatorGraph) -> None:
    plan = make_plan(gpt, Request("data_parallel", 8))
    size = sum(source.spec.elements * 4 for source in gpt.of_kind("parameter"))
    for stage, share in ((0, 1), (2, 1), (3, 8)):
        program = lower(gpt, plan, LoweringOptions(sharded_optimizer=stage > 0, partial_loss=True))
        settings = OptimizerSettings(stage, torch.optim.SGD)
        step = step_cost(gpt, plan, program, MACHINE, settings)
        costs = operator_costs(gpt, plan, program, MACHINE, settings, step)
        assert sum(cost.parameters for cost in costs.values()) == pytest.approx(size / share, rel=1e-3)


def test_gradients_that_servers_add_up_are_sent_by_no_operator(gpt: OperatorGraph) -> None:
    plan = make_plan(gpt, Request("data_parallel", 8))
    program, settings = lower(gpt, plan, LoweringOptions(partial_loss=True)), OptimizerSettings()
    step = step_cost(gpt, plan, program, MACHINE, settings)
    given = gpt, plan, program, MACHINE, settings, step
    parameters = {source.name for source in gpt.of_kind("parameter")}
    kept = min(parameters)
    plain, alone, none = (
        {name: cost.sent for name, cost in operator_costs(*given, served).items()}
        for served in (frozenset(), parameters - {kept}, parameters)
    )
    sizes = {source.name: source.spec.elements * 4 for source in gpt.of_kind("parameter")}
    assert sum(alone.values()) - sum(none.values()) == 2 * sizes[kept] * 7 // 8
    assert sum(plain.values()) - sum(none.values()) == sum(2 * size * 7 // 8 for size in sizes.values())


def test_large_products_are_bound_by_flops_and_norms_are_not() -> None:
    net = nn.Sequential(nn.LayerNorm(4096), nn.Linear(4096, 4096))
    batch = torch.empty(4096, 4096, device="meta"), torch.empty(4096, 4096, device="meta")
    graph = capture(Objective(net.to("meta"), nn.MSELoss(), ("0", "1"), ("1",)), batch, training=True).graph
    plan = make_plan(graph, Request("data_parallel", 8))
    program, settings = lower(graph, plan), OptimizerSettings()
    step = step_cost(graph, plan, program, MACHINE, settings)
    costs = operator_costs(graph, plan, program, MACHINE, settings, step)
    assert [name for name, cost in costs.items() if cost.flop_bound] == ["1"]
    assert len(costs) > 2
    assert costs["1"].flops == 2 * 4096**3
