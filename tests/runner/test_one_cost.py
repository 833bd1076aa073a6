"""One cost: the cost that a search minimises and certifies equals the cost that `run plan` reports."""

from __future__ import annotations

import math
from typing import Any

import pytest
from composing import compose_config
from small import SMALL

from runner.cli import recipes
from runner.errors import ConfigError
from runner.planning.joint import prepare_decided
from runner.report import plan_files
from runner.report.text import headline
from strategies.core.errors import StrategyError
from strategies.core.request import SEARCHES

FEW = ("zero",)
"""Recipes that are planned in about a second, one of which is enough for a quick run."""
UNPLANNED = ("hybrid_matmul",)
LONG = ("llama_8b", "resnet")
"""Recipes of which only one search is tried."""


def reported(tmp_path: Any, *words: str) -> dict[str, Any]:
    """The content of plan.json."""
    config = compose_config("job=plan", *words)
    prepared = prepare_decided(config, None, say=lambda line: None)
    content = plan_files.write_plan(prepared, tmp_path)
    assert content is not None and headline(prepared, tmp_path)
    return content


def checked(content: dict[str, Any]) -> float:
    """The cost of a step in seconds. Asserts that the search reports the same cost."""
    search, cost = content["search"], content["cost"]["total"]
    assert math.isclose(search["cost"], cost, rel_tol=1e-9)
    if search["lower_bound"] is not None:
        assert 0 < search["lower_bound"] <= cost * (1 + 1e-12)
        assert math.isclose(search["gap"], cost / search["lower_bound"] - 1, abs_tol=1e-9)
    if search.get("mesh") is not None:
        assert math.isclose(search["mesh"]["seconds"], cost, rel_tol=1e-9)
        second = search["runner_up"]
        assert second is None or (second["seconds"] >= cost * (1 - 1e-9) and second["mesh"] != search["mesh"]["mesh"])
    if search.get("propagation") is not None:
        prices = search["propagation"]
        taken = prices["cheapest"] if prices["by_price"] else prices["followed"]
        assert math.isclose(taken, cost, rel_tol=1e-9) and prices["cheapest"] <= prices["followed"]
    if search.get("decided") is not None:
        assert math.isclose(search["decided"]["seconds"], cost, rel_tol=1e-9)
    return float(cost)


def compare(tmp_path: Any, *words: str, searches: tuple[str, ...] = SEARCHES) -> dict[str, dict[str, Any]]:
    """The plan of every search. Asserts that the exact search finds the lowest cost."""
    found: dict[str, dict[str, Any]] = {}
    for search in searches:
        try:
            found[search] = reported(tmp_path, *words, f"parallel.search={search}", "parallel.plan_cache=null")
        except (ConfigError, StrategyError) as error:
            assert search == "sharding_propagation" and "starts from configured operators" in str(error)
    costs = {search: checked(content) for search, content in found.items()}
    assert costs["dynamic_programming"] <= min(costs.values()) * (1 + 1e-9)
    assert found["dynamic_programming"]["search"]["lower_bound"] is not None
    return found


NAMES = [name for name in recipes.catalogue() if name not in UNPLANNED]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_every_search_reports_the_cost_of_the_plan(name: str, tmp_path: Any) -> None:
    checked(reported(tmp_path, f"+recipe={name}", "parallel.plan_cache=null"))
    if name not in LONG:
        compare(tmp_path, f"+recipe={name}", "parallel.mode=auto")


@pytest.mark.slow
def test_a_plain_network_on_eight_ranks(tmp_path: Any) -> None:
    """Without strategies: backward is too short to overlap the calls, and one call carries many gradients."""
    words = ("+recipe=mae_784", "parallel=auto", "parallel.strategies=null")
    found = compare(tmp_path, *words, searches=("dynamic_programming", "recursive_programming"))
    assert found["dynamic_programming"]["search"]["gap"] < 1


STACK = (*SMALL, "model.target=networks.Stack", "optimizer.target=torch.optim.AdamW", "parallel=auto")
FEATURES = {
    "ZeRO 1": ("parallel.zero=1",),
    "ZeRO 3, accumulated": ("parallel.zero=3", "train.accumulate=2"),
    "recompute": ("parallel.recompute=full",),
    "pipeline": ("parallel.pipeline.stages=2", "parallel.pipeline.micro_batches=2"),
    "copies": ("parallel.copies=2",),
    "at once": ("parallel.comm_async=false", "parallel.comm_overlap=false"),
    "calls alone": ("parallel.comm_fusion.all_reduce.mode=none",),
    "a mesh": ("parallel.mesh={dp: 2, tp: 2}",),
    "memory": ("parallel.memory_limit=400KB", "parallel.recompute=auto"),
    "decided": ("parallel.zero.stage=auto", "parallel.pipeline.stages=auto", "parallel.recompute=auto"),
}


SLOW = ("at once", "calls alone", "a mesh", "ZeRO 1", "decided", "pipeline")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "words", [pytest.param(FEATURES[one], id=one, marks=[pytest.mark.slow] * (one in SLOW)) for one in FEATURES]
)
def test_whatever_a_step_does(words: tuple[str, ...], tmp_path: Any) -> None:
    some = ("dynamic_programming", "recursive_programming")
    compare(tmp_path, *STACK, "world_size=4", "data.batch_size=8", *words, searches=some)


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), FEATURES["decided"]], ids=["searched", "decided"])
def test_a_plan_of_the_cache_or_of_a_file(words: tuple[str, ...], tmp_path: Any) -> None:
    given = (*STACK, "world_size=4", "data.batch_size=8", "parallel.search=dynamic_programming", *words)
    first, again = (reported(tmp_path, *given, f"parallel.plan_cache={tmp_path}/plans") for _ in range(2))
    assert again["search"]["loaded_from"] == "the plan cache" and checked(first) == checked(again)
    assert again["search"]["lower_bound"] == first["search"]["lower_bound"]
    slower = () if words else ("parallel.comm_overlap=false", "parallel.comm_async=false")
    other = reported(tmp_path, *given, *slower, f"parallel.plan={tmp_path}/plan.json")
    assert checked(other) >= checked(first) and other["search"]["lower_bound"] is None
