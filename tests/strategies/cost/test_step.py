"""Seconds of a step: its parts, overlapped communication, and the effect of recompute, ZeRO and micro-batches."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from strategies.core.program import LoweringOptions
from strategies.core.request import OperatorStrategy, RecomputeRequest, Request
from strategies.cost.step import StepCost, step_cost
from strategies.lowering.lowering import lower
from strategies.optimizer.settings import OptimizerSettings
from strategies.optimizer.updates import BucketLimits
from strategies.optimizer.zero import traffic as zero_traffic
from strategies.planner.planner import make_plan
from tests.strategies.machines import cluster
from tests.strategies.simulated_model import Model

MACHINE = replace(cluster(1, 8), flops={"float32": 1e12}, overlap=1.0)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model(Layers(), None, (torch.randn(256, 512),))


def cost(model: Model, settings: OptimizerSettings, request: Request | None = None, machine: object = None) -> StepCost:
    plan = make_plan(model.graph, request or Request("data_parallel", 8))
    program = lower(model.graph, plan, LoweringOptions(sharded_optimizer=settings.stage > 0, partial_loss=True))
    return step_cost(model.graph, plan, program, machine or MACHINE, settings)  # type: ignore[arg-type]


def test_backward_hides_all_of_adding_gradients_but_the_last_bucket(model: Model) -> None:
    each = OptimizerSettings(overlap=True, cut=BucketLimits(0))
    alone, hidden = cost(model, replace(each, overlap=False)), cost(model, each)
    assert alone.exposed == alone.gradients == hidden.gradients > 0
    assert 0 < hidden.exposed < hidden.gradients / 4
    assert alone.total - hidden.total == pytest.approx(alone.exposed - hidden.exposed)
    half = cost(model, each, machine=replace(MACHINE, overlap=0.5))
    assert half.exposed == pytest.approx(half.gradients / 2)


def test_a_short_backward_hides_no_more_than_its_own_time(model: Model) -> None:
    fast = replace(MACHINE, flops={"float32": 1e18, "float64": 1e18}, memory_bandwidth=1e18, launch=0.0)
    found = cost(model, OptimizerSettings(overlap=True, cut=BucketLimits(0)), machine=fast)
    assert found.exposed == pytest.approx(found.gradients - found.backward)


def test_micro_batches_repeat_compute_and_not_the_update(model: Model) -> None:
    once, thrice = cost(model, OptimizerSettings()), cost(model, OptimizerSettings(accumulate=3))
    assert thrice.compute == pytest.approx(3 * once.compute)
    assert (thrice.gradients, thrice.optimizer) == (once.gradients, once.optimizer)


def test_recompute_repeats_forward_of_its_modules(model: Model) -> None:
    plain = cost(model, OptimizerSettings())
    again = cost(
        model, OptimizerSettings(), Request("data_parallel", 8, recompute=RecomputeRequest("full", None, None, False))
    )
    assert plain.recomputed == 0
    assert again.forward == plain.forward
    assert 0.8 * plain.forward < again.recomputed < plain.forward  # all layers, without the loss


def test_recomputed_collectives_run_again(model: Model) -> None:
    pairs = {
        f"layers.{i}.0.matmul": OperatorStrategy(((1, 1), (1, 8)) if i % 2 == 0 else ((1, 8), (8, 1)), None)
        for i in range(4)
    }
    request = Request("semi_auto", 8, strategies=pairs)
    plain = cost(model, OptimizerSettings(), request)
    repeated = replace(request, recompute=RecomputeRequest("full", None, "repeat", False))
    kept = replace(request, recompute=RecomputeRequest("full", None, "keep", False))
    assert sum(cost(model, OptimizerSettings(), repeated).redistributions.values()) > sum(
        plain.redistributions.values()
    )
    assert cost(model, OptimizerSettings(), kept).redistributions == plain.redistributions


def test_zero_sends_as_many_bytes_as_predicted_and_updates_a_part(model: Model) -> None:
    plan = make_plan(model.graph, Request("data_parallel", 8))
    program = lower(model.graph, plan, LoweringOptions(sharded_optimizer=True, partial_loss=True))

    def states(stage: int) -> float:
        adam = OptimizerSettings(stage, factory=torch.optim.Adam)
        return cost(model, adam).optimizer - cost(model, OptimizerSettings(stage)).optimizer

    for stage in (1, 2, 3):
        found = cost(model, OptimizerSettings(stage))
        assert found.zero.keys() == zero_traffic.predicted(program, stage).keys() | {"all_reduce"}  # the norm
        assert found.gradients == 0
        assert states(stage) == pytest.approx(states(0) / 8)
    once, twice, thrice = (cost(model, OptimizerSettings(2, accumulate=n)).zero["all_reduce"] for n in (1, 2, 3))
    assert thrice - twice == pytest.approx(twice - once)
    assert twice > once
    assert cost(model, OptimizerSettings(1, accumulate=3)).zero["all_reduce"] == pytest.approx(once)


def test_a_gather_of_stage_3_hides_behind_what_uses_the_bucket_before(model: Model) -> None:
    layers = OptimizerSettings(3, engine="native", bucket=2 * 512 * 513)  # in fp64: a bucket per layer
    blocking, half, hidden = (
        cost(model, layers, machine=replace(MACHINE, overlap=share)).zero["all_gather"] for share in (0.0, 0.5, 1.0)
    )
    assert hidden == pytest.approx(blocking / 7)  # 4 forward and 3 backward, and nothing comes before the first
    assert blocking - half == pytest.approx((blocking - hidden) / 2)
    twice = cost(model, replace(layers, accumulate=2)).zero["all_gather"]
    assert twice == pytest.approx(2 * hidden)
    fast = replace(MACHINE, flops={"float32": 1e18}, memory_bandwidth=1e18, launch=1e-9)
    assert cost(model, layers, machine=fast).zero["all_gather"] == pytest.approx(blocking, rel=0.01)
    deepspeed = replace(layers, engine="deepspeed")
    assert cost(model, deepspeed).zero == cost(model, deepspeed, machine=replace(MACHINE, overlap=0.0)).zero


def test_an_update_costs_the_bytes_of_its_calls(model: Model) -> None:
    plain, adam = cost(model, OptimizerSettings()), cost(model, OptimizerSettings(factory=torch.optim.Adam))
    assert adam.optimizer - plain.optimizer == pytest.approx(
        (18 - 3) * 8 * 4 * (512 * 512 + 512) / MACHINE.memory_bandwidth  # times every element is moved, in fp64
    )
    at_once = cost(model, OptimizerSettings(factory=partial(torch.optim.Adam, fused=True)))
    assert plain.optimizer < at_once.optimizer < plain.optimizer + (adam.optimizer - plain.optimizer) / 2
    busy = replace(MACHINE, view=1e-3)  # Adam makes more calls for each of 8 parameters than SGD
    slower = [
        cost(model, one, machine=busy).optimizer
        for one in (OptimizerSettings(), OptimizerSettings(factory=torch.optim.Adam))
    ]
    assert slower[1] - slower[0] > 8 * 5 * 1e-3


def test_parts_make_the_total(model: Model) -> None:
    reported = cost(model, OptimizerSettings(3)).to_json()
    assert reported["total"] == reported["compute"] + reported["communication"] + reported["optimizer"]  # type: ignore[operator]
    assert reported["cluster"] == "described"
