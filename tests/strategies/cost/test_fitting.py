"""Choosing what to compute again: the knapsack against all choices, and on a model against every plan there is."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from models.gpt import GPT
from models.losses import NextTokenLoss
from strategies.capture import Captured, Objective, capture
from strategies.cost.estimate import LAPTOP, seconds
from strategies.cost.fitting import Choice, Fitting, Way, choices, together
from strategies.cost.updating import Updating
from strategies.engine.lowering import lower
from strategies.engine.offload import Offload
from strategies.engine.program import Options
from strategies.errors import StrategyError
from strategies.plan import Plan
from strategies.planner import make_plan
from strategies.request import Request, WantedRecompute

KINDS: dict[str, dict[Way, tuple[float, int]]] = {
    "a": {"full": (3.0, 10), "selective": (1.0, 4)},
    "b": {"full": (2.0, 9)},
    "c": {"full": (5.0, 11), "selective": (2.5, 7)},
}
LAYERS = {"a": 3, "b": 2, "c": 2}


def test_no_other_choice_saves_as_much_in_less_time():
    frontier = [Choice(0.0, 0, {})]
    for kind, ways in KINDS.items():
        frontier = together(frontier, choices(LAYERS[kind], kind, ways))
    options = [[(0.0, 0), *KINDS[kind].values()] for kind, count in LAYERS.items() for _ in range(count)]
    every = [
        (sum(time for time, _ in picked), sum(saves for _, saves in picked)) for picked in itertools.product(*options)
    ]
    for lacking in range(1, max(saves for _, saves in every) + 1):
        found = next(one for one in frontier if one.saves >= lacking)
        assert found.time == pytest.approx(min(time for time, saves in every if saves >= lacking))
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


def fitting(found: Captured, wanted: WantedRecompute | None = None, updating: Updating | None = None) -> Fitting:
    plan = make_plan(found.graph, Request("data_parallel", 2))
    return Fitting(
        found.graph,
        plan,
        wanted or WantedRecompute("full"),
        updating or Updating(factory=adamw),
        LAPTOP,
        lambda one: lower(found.graph, one, Options(partial_loss=True)),
    )


def every_plan(one: Fitting) -> list[Plan]:
    paths = ("layers.0", "layers.1")
    ways: list[tuple[Way | None, ...]] = list(itertools.product((None, "full", "selective"), repeat=2))
    alone = {path: [path] for path in paths}
    return [
        one._with({(path, way): 1 for path, way in zip(paths, some, strict=True) if way}, alone, "recompute")
        for some in ways
    ]


def test_the_plan_keeps_the_limit_and_none_that_does_is_faster(gpt):
    one = fitting(gpt)
    priced = [(one._time(plan), one._needed(plan).peak) for plan in every_plan(one)]
    peaks = sorted({peak for _, peak in priced})
    assert len(peaks) > 4
    for limit in peaks[:: len(peaks) // 3]:
        plan = one.within(limit)
        assert one._needed(plan).peak <= limit
        assert one._time(plan) <= 1.001 * min(time for time, peak in priced if peak <= limit)
    assert one.within(peaks[-1]) is one.plan
    with pytest.raises(StrategyError, match="even with all repeated layers computed again the plan needs"):
        one.within(peaks[0] - 1)


def test_first_layers_come_first(gpt):
    one = fitting(gpt)
    most = one._needed(one.plan).peak
    plan = one.within(most - 1)
    assert plan.recompute is not None
    assert plan.recompute.modules == ("layers.0",)


def test_only_what_may_be_computed_again_is(gpt):
    one = fitting(gpt, WantedRecompute("full", ("layers.1",), "keep"))
    plan = one.within(one._needed(one.plan).peak - 1)
    assert plan.recompute is not None
    assert plan.recompute.modules == ("layers.1",)
    assert plan.recompute.keeps_communication


@pytest.mark.parametrize(
    ("updating", "text"),
    [
        (Updating(factory=adamw), "choose more train.accumulate, parallel.offload.activations.to=host, more ranks"),
        (Updating(factory=adamw, offload=Offload(activations="host")), "The largest part is optimizer: choose "
         "parallel.zero.stage=1, sliced weights"),
    ],
)  # fmt: skip
def test_what_does_not_fit_says_what_would_help(gpt, updating, text):
    with pytest.raises(StrategyError) as refused:
        fitting(gpt, updating=updating).within(1000)
    assert text in str(refused.value)
    assert str(refused.value).startswith("parallel.memory_limit = 1000 B per rank, but even with all repeated layers")


def test_work_that_is_repeated_costs_time(gpt):
    one = fitting(gpt)
    plain, full = one.plan, every_plan(one)[4]

    def compute(plan: Plan) -> float:
        return seconds(gpt.graph, plan, one.lowered(plan), {}, LAPTOP, 1)["compute"]

    assert full.recompute is not None and len(full.recompute.modules) == 2
    assert compute(plain) < compute(full) < 4 / 3 * compute(plain)  # a third, less what is outside the layers
