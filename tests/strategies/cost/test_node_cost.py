"""The node cost of a parameter, for one micro-batch of a step."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from strategies.capture import Objective, capture
from strategies.core.graph import Ref
from strategies.core.layout import Layout
from strategies.core.program import LoweringOptions
from strategies.core.request import OperatorStrategy, Request
from strategies.core.steps import MIRROR, ROTATE
from strategies.cost.exposed_communication import added_seconds
from strategies.cost.node_cost import NodeCost
from strategies.cost.problem import Problem
from strategies.cost.step import step_cost, works_of
from strategies.lowering.lowering import lower
from strategies.optimizer.bytes_per_element import needed
from strategies.optimizer.settings import OptimizerSettings
from strategies.optimizer.updates import Engine
from strategies.planner.planner import make_plan
from strategies.rules import rule_of
from tests.strategies.search.test_factor_graph import NODES, llama, problem_of

MICRO_BATCHES = 4


class Picture(nn.Module):
    """Two convolutions of the same shapes, of which the second reads neighbouring rows."""

    def __init__(self) -> None:
        super().__init__()
        self.point, self.window = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.window(self.point(x))
        return out


def test_calls_of_the_same_shapes_differ_in_what_they_fetch() -> None:
    captured = capture(Objective(Picture(), None, ("0",), ()), (torch.zeros(2, 4, 16, 16),), training=False)
    problem = problem_of(captured.graph, 4)
    costs = NodeCost(problem, NODES)
    communicate = [costs.communicates(one, rule_of(one, problem.graph)) for one in problem.graph.operators[:2]]
    assert communicate == [False, True]


def test_a_ring_costs_what_its_blocks_do_not_hide(problem: Problem) -> None:
    """As in the step of the lowered program; gathered keys and values cost something else."""
    graph, axis = problem.graph, problem.mesh.names[-1]
    attention = next(one for one in graph.operators if one.op == "scaled_dot_product_attention")
    path = attention.name.replace(".0.", ".*.")
    slices = problem.mesh.sizes[axis]
    strategy = OperatorStrategy(((1, 1, slices, 1),) * 3, None)
    request = Request("auto", slices, mesh=((axis, slices),), strategies={path: strategy}, ring=True)
    plan = make_plan(graph, request)
    works = dict(zip((one.name for one in graph.operators), works_of(graph, plan, NODES), strict=True))
    added = added_seconds(lower(graph, plan, LoweringOptions(ring=True)), works, NODES)
    own = replace(problem, mesh=plan.mesh, ring=True)
    sharding, assignment = rule_of(attention, graph), plan.operators[attention.name].assignment
    around, gathered = (
        NodeCost(replace(own, ring=ring), NODES).local_communication(attention, sharding, assignment)
        for ring in (True, False)
    )
    assert 2 * around == pytest.approx(added[ROTATE] + added[MIRROR], rel=1e-9)  # two layers
    assert NodeCost(own, NODES).communicates(attention, sharding)
    assert around != pytest.approx(gathered, rel=1e-3)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return problem_of(llama(2), 8)


def seconds(problem: Problem, stage: int, micro_batches: int, sliced: bool = False) -> float:
    """Seconds of the largest parameter, replicated or sharded over all ranks."""
    source = max(problem.graph.of_kind("parameter"), key=lambda one: one.spec.elements)
    axes = problem.mesh.names
    unsharded = Layout.replicated(2) if stage else Layout(((), ()), frozenset(axes))
    layout = Layout((axes, ())) if sliced else unsharded
    assert Ref(source.id) in problem.graph.trained
    node_cost = NodeCost(replace(problem, stage=stage, micro_batches=micro_batches), NODES)
    return node_cost.parameter_seconds(layout, source.spec)


def test_work_done_once_per_step_counts_for_its_share(problem: Problem) -> None:
    assert seconds(problem, 0, MICRO_BATCHES) == pytest.approx(seconds(problem, 0, 1) / MICRO_BATCHES)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_work_of_zero_for_every_micro_batch_counts_in_full(problem: Problem, stage: int) -> None:
    one, many = seconds(problem, stage, 1), [seconds(problem, stage, count) for count in (MICRO_BATCHES, 10**9)]
    assert one > many[0] > many[1] > 0.05 * one
    assert (many[0] - many[1]) * MICRO_BATCHES == pytest.approx(one - many[1])  # the rest is once per step


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_parameter_that_is_cut_is_only_updated(problem: Problem, stage: int) -> None:
    """And copied by ZeRO, for every micro-batch."""
    copied = seconds(problem, stage, 10**9, sliced=True)
    updated = seconds(problem, stage, MICRO_BATCHES, sliced=True) - copied
    assert updated == pytest.approx(seconds(problem, 0, 1, sliced=True) / MICRO_BATCHES)
    assert copied == pytest.approx(0.0, abs=1e-9) if stage == 0 else copied > updated
    assert updated + copied < seconds(problem, stage, MICRO_BATCHES)


@pytest.mark.parametrize(("stage", "engine"), [(0, "deepspeed"), *product((1, 2, 3), ("deepspeed", "native"))])
def test_it_equals_the_cost_of_a_step_of_the_plan(problem: Problem, stage: int, engine: Engine) -> None:
    """Search and step estimate updates equally: with the bytes that the optimizer moves, and exposed gradient
    reductions where they follow backward."""
    for optimizer, overlaps in product((torch.optim.AdamW, torch.optim.SGD), (True, False)):
        need = needed(optimizer, torch.float32)
        changed = replace(problem, stage=stage, engine=engine, optimizer_bytes=need.moved, overlaps=overlaps)
        replicated = {one.name: Layout.replicated(len(one.spec.shape)) for one in changed.graph.sources}
        plan = replace(make_plan(changed.graph, Request("data_parallel", 8)), tensors=replicated)
        settings = OptimizerSettings(stage, optimizer, overlap=overlaps, engine=engine)
        program = lower(changed.graph, plan, LoweringOptions(partial_loss=True, sharded_optimizer=stage > 0))
        cost = step_cost(changed.graph, plan, program, NODES, settings)
        axes = frozenset(plan.mesh.names) if stage == 0 else frozenset()
        own = NodeCost(replace(changed, mesh=plan.mesh), NODES)
        sources = [one for one in changed.graph.of_kind("parameter") if one.trainable]
        total = sum(own.parameter_seconds(Layout(((),) * len(one.spec.shape), axes), one.spec) for one in sources)
        assert total == pytest.approx(cost.exposed + sum(cost.zero.values()) + cost.optimizer, rel=0.2)
