"""A plan has one cost: what the search says, what `run plan` writes, and what `run explain` divides among operators."""

from __future__ import annotations

from pathlib import Path

import pytest

from runner.planning.joint import prepare_decided
from runner.report.plan_files import write_plan
from tests.runner.composing import compose_config

LARGE, BY_HAND = "llama_8b", "hybrid_matmul"
"""Takes minutes; has no plan."""
RECIPES = sorted({path.stem for path in (Path(__file__).parents[3] / "recipes").glob("*.yaml")} - {LARGE, BY_HAND})
SLOW_NORMS = (
    "cluster.machine.operators={layer_norm: {forward: {call: 1e-4, factor: 2}, backward: {call: 3e-4, factor: 9}}}"
)
QUICK = ("quickstart", "ffn_auto", "gpt", "gpt_pipeline", "moe", "zero")
VARIANTS = [
    *(pytest.param(name, (), marks=() if name in QUICK else pytest.mark.slow) for name in RECIPES),
    ("gpt", ("parallel.zero.stage=3", "train.accumulate=2")),
    pytest.param("gpt", ("parallel.zero={stage: 3, engine: deepspeed}", "train.accumulate=2"), marks=pytest.mark.slow),
    pytest.param(
        "gpt", ("parallel.mode=auto", "parallel.search=dynamic_programming", "parallel.zero=3"), marks=pytest.mark.slow
    ),
    ("gpt", ("parallel.mode=auto", "parallel.search=dynamic_programming", "parallel.recompute=selective")),
    ("gpt", ("parallel.mode=auto", "parallel.search=dynamic_programming", "cluster=laptop_gloo", f"++{SLOW_NORMS}")),
    pytest.param("moe", ("parallel.mode=auto", "parallel.search=dynamic_programming"), marks=pytest.mark.slow),
    pytest.param("vit", ("parallel.search=recursive_programming",), marks=pytest.mark.slow),
]


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
@pytest.mark.parametrize(("recipe", "overrides"), VARIANTS)
def test_search_plan_and_operators_have_one_cost(recipe: str, overrides: tuple[str, ...], tmp_path: Path) -> None:
    content = write_plan(
        prepare_decided(compose_config(f"+recipe={recipe}", "parallel.plan_cache=null", *overrides), None), tmp_path
    )
    assert content is not None
    cost = content["cost"]
    assert content["search"]["cost"] == pytest.approx(cost["total"], rel=1e-9)
    if "pipeline" in content:  # each stage has its own cost
        return
    predicted = [operator["predicted"] for operator in content["operators"]]

    def total(part: str) -> float:
        return sum(one[part] for one in predicted)

    assert total("forward") == pytest.approx(cost["forward"], rel=1e-9)
    assert total("backward") == pytest.approx(cost["backward"] + cost["recomputed"], rel=1e-9)
    exposed = cost["gradients_exposed"] + sum(cost["zero"].values())
    assert total("gradients") in (pytest.approx(exposed, rel=1e-9), 0.0)  # 0 where no parameter has replicas
