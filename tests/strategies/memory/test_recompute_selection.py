"""Recompute selection: the knapsack against all candidates, and on a model against every plan."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from models.gpt import GPT
from models.losses import NextTokenLoss
from strategies.capture import Captured, Objective, capture
from strategies.core.errors import StrategyError
from strategies.core.plan import Plan
from strategies.core.program import LoweringOptions
from strategies.core.request import RecomputeRequest, Request
from strategies.cost.step import step_cost
from strategies.lowering.lowering import lower
from strategies.memory.limit import over
from strategies.memory.parts import Memory
from strategies.memory.recompute_selection import Mode, RecomputedLayers, RecomputeSelection, combined, front_of_kind
from strategies.optimizer.settings import OptimizerSettings
from strategies.planner.planner import make_plan
from tests.strategies.machines import cluster

KINDS: dict[str, dict[Mode, tuple[float, int]]] = {
    "a": {"full": (3.0, 10), "selective": (1.0, 4)},
    "b": {"full": (2.0, 9)},
    "c": {"full": (5.0, 11), "selective": (2.5, 7)},
}
CLUSTER = cluster(2)
LAYERS = {"a": 3, "b": 2, "c": 2}


def test_no_other_choice_saves_as_much_in_less_time():
    frontier = [RecomputedLayers(0.0, 0, {})]
    for kind, options_of_kind in KINDS.items():
        frontier = combined(frontier, front_of_kind(LAYERS[kind], kind, options_of_kind))
    options = [[(0.0, 0), *KINDS[kind].values()] for kind, count in LAYERS.items() for _ in range(count)]
    every = [
        (sum(time for time, _ in chosen), sum(saves for _, saves in chosen)) for chosen in itertools.product(*options)
    ]
    for lacking in range(1, max(saves for _, saves in every) + 1):
        found = next(one for one in frontier if one.saves >= lacking)
        assert found.seconds == pytest.approx(min(time for time, saves in every if saves >= lacking))
        counted = [(count, KINDS[kind][way]) for (kind, way), count in found.counts.items() if count]
        assert sum(n * saves for n, (_, saves) in counted) == found.saves


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01)


@pytest.fixture(scope="module")
def gpt() -> Captured:
    torch.manual_seed(0)
    tokens = torch.randint(0, 32, (8, 32))
    model = GPT(32, 32, 32, 2, 2)
    return capture(Objective(model, NextTokenLoss(), ("0", "1"), ("1",)), (tokens, tokens.roll(1)), training=True)


def fitting(
    found: Captured, wanted: RecomputeRequest | None = None, settings: OptimizerSettings | None = None
) -> RecomputeSelection:
    plan = make_plan(found.graph, Request("data_parallel", 2))
    return RecomputeSelection(
        found.graph,
        plan,
        wanted or RecomputeRequest("full"),
        settings or OptimizerSettings(factory=adamw),
        CLUSTER,
        lambda one: lower(found.graph, one, LoweringOptions(partial_loss=True)),
    )


def every_plan(one: RecomputeSelection) -> list[Plan]:
    paths = ("layers.0", "layers.1")
    modes: list[tuple[Mode | None, ...]] = list(itertools.product((None, "full", "selective"), repeat=2))
    alone = {path: [path] for path in paths}
    return [
        one._with({(path, way): 1 for path, way in zip(paths, some, strict=True) if way}, alone, "recompute")
        for some in modes
    ]


def test_the_plan_keeps_the_limit_and_none_that_does_is_faster(gpt):
    one = fitting(gpt)
    priced = [(one._seconds(plan), one._memory(plan).peak) for plan in every_plan(one)]
    peaks = sorted({peak for _, peak in priced})
    assert len(peaks) >= 3
    for limit in peaks:
        plan = one.within(limit)
        assert one._memory(plan).peak <= limit
        assert one._seconds(plan) <= 1.001 * min(time for time, peak in priced if peak <= limit)
    assert one.within(peaks[-1]) is one.plan
    with pytest.raises(StrategyError, match="even with all repeated layers recomputed the plan needs"):
        one.within(peaks[0] - 1)


def test_first_layers_come_first(gpt):
    one = fitting(gpt)
    most = one._memory(one.plan).peak
    plan = one.within(most - 1)
    assert plan.recompute is not None
    assert plan.recompute.modules == ("layers.0",)


def test_only_recomputable_layers_are_recomputed(gpt):
    one = fitting(gpt, RecomputeRequest("full", ("layers.0.feed_forward",), "keep"))
    plan = one.within(one._memory(one.plan).peak - 1)
    assert plan.recompute is not None
    assert plan.recompute.modules == ("layers.0.feed_forward",)
    assert plan.recompute.keeps_communication


PARTS = {"parameters": 10, "gradients": 10, "optimizer": 20, "activations": 5, "buffers": 0}


@pytest.mark.parametrize(
    ("largest", "settings", "advice"),
    [
        (
            "activations",
            OptimizerSettings(),
            "parallel.recompute=auto, more train.accumulate, parallel.offload.activations.to=",
        ),
        ("optimizer", OptimizerSettings(), "parallel.zero.stage=1, sliced weights (parallel.strategies), more ranks"),
        ("optimizer", OptimizerSettings(1), "parallel.offload.optimizer=host, sliced weights"),
        ("gradients", OptimizerSettings(1), "parallel.zero.stage=2, sliced weights"),
        ("parameters", OptimizerSettings(3), "parallel.offload.parameters=host, sliced weights"),
        ("buffers", OptimizerSettings(3), "a smaller parallel.zero.options.reduce_bucket_size, more ranks"),
    ],
)
def test_a_plan_that_does_not_fit_suggests_a_remedy(largest, settings, advice):
    parts = PARTS | {largest: 3 * 2**20}
    needed = Memory(**parts, persistent=0, peaks={"forward": 1, "backward": 2**22}, host=0, disk=0)
    text = over(needed, 2**21, settings, recomputes=False)
    assert text.startswith("parallel.memory_limit = 2 MiB per rank, but the plan needs 4 MiB at once, in backward (")
    assert f"The largest part is {largest}: choose {advice}" in text


def test_work_that_is_repeated_costs_time(gpt):
    one = fitting(gpt)
    plain, full = one.plan, every_plan(one)[4]

    def compute(plan: Plan) -> float:
        return step_cost(gpt.graph, plan, one.lowered(plan), CLUSTER, one.settings).compute

    assert full.recompute is not None and len(full.recompute.modules) == 2
    assert compute(plain) < compute(full) < 4 / 3 * compute(plain)  # a third, less the operators outside the layers
