"""The table of mutually exclusive keys: the keys exist, and every rule refuses its pair."""

from __future__ import annotations

from pathlib import Path

import pytest
from composing import compose_config

import recipes
from runner.config import exclusive, keys
from runner.config.exclusive import DEEPSPEED_ONLY, GIVEN, RULES, SOURCES, UNSET, WITHOUT_EFFECT, Rule
from runner.errors import ConfigError

OPEN = tuple(keys.open_mappings())
BREAKING = {
    ("parallel.zero.options.offload_param", "parallel.offload.parameters"): (
        *("parallel=data_parallel", "parallel.offload.parameters=host", "world_size=2"),
        "parallel.zero={stage: 3, options: {offload_param: {device: cpu}}}",
    ),
    ("parallel.mesh", "parallel.mode"): ("parallel=data_parallel", "parallel.mesh={dp: 2}"),
    ("train.steps", "train.epochs"): ("train.epochs=1",),
    ("checkpoint.best", "evaluate.every"): ("checkpoint.best=loss",),
    ("launch.host", "launch.port"): ("launch=rank_table", "launch.hosts=[a:2]", "launch.host=a"),
    ("launch.rank", "launch.launcher"): ("launch=torchrun", "launch.rank=0"),
    ("parallel.offload.folder", "parallel.offload.optimizer"): ("parallel.offload.folder=there",),
    ("launch.hosts", "launch.hostfile"): ("launch=torchrun", "launch.hosts=[a:2]", "launch.hostfile=hosts"),
    ("cluster.file", "cluster.machine"): ("cluster=dgx_h100", "cluster.file=mine.yaml"),
}


@pytest.mark.parametrize("rule", [*RULES, *SOURCES, *WITHOUT_EFFECT], ids=lambda rule: f"{rule.first}-{rule.second}")
def test_every_key_of_a_rule_exists(rule):
    for key in (rule.first, rule.second, *(key for key, _ in rule.where)):
        assert keys.find(key) is not None or key.startswith(OPEN), key
    assert not rule.remedy.endswith(".") and not rule.why.endswith(".")


def test_no_rule_stands_twice():
    signatures = [
        (rule.first, rule.of_first.text, rule.second, rule.of_second.text)
        for rule in (*RULES, *SOURCES, *WITHOUT_EFFECT)
    ]
    assert len(set(signatures)) == len(signatures)


@pytest.mark.parametrize("pair", BREAKING, ids="-".join)
def test_a_config_that_breaks_a_rule_is_refused_with_both_keys(pair):
    with pytest.raises(ConfigError) as caught:
        compose_config("model.target=a.B", "data.target=a.C", "train.steps=1", *BREAKING[pair])
    assert caught.value.code == "MW205" and all(f"{key} = " in str(caught.value) for key in pair)


IDLE = {
    "optimizer.scheduler.args": "optimizer.scheduler.args={gamma: 0.5}",
    "optimizer.scheduler.per": "optimizer.scheduler.per=epoch",
    "loss.args": "loss.args={reduction: sum}",
    "data.prefetch": "data={prefetch: 4, workers: 0}",
    "checkpoint.copies": "checkpoint={copies: 2, form: merged}",
    "parallel.search": "parallel={mode: semi_auto, search: dynamic_programming}",
    "parallel.context_parallel": "parallel={mode: data_parallel, context_parallel: ring}",
    "parallel.reduce_precision": "parallel={mode: auto, reduce_precision: own}",
    "parallel.pipeline.schedule": "parallel={mode: auto, pipeline: {schedule: gpipe}}",
    "parallel.zero.engine": "parallel={mode: auto, zero: {engine: deepspeed}}",
}


@pytest.mark.parametrize("key", IDLE)
def test_a_key_that_has_no_effect_is_named(key):
    config = compose_config("model.target=a.B", "data.target=a.C", "train.steps=1", IDLE[key])
    (notice,) = exclusive.notices(config)
    assert notice.startswith(f"{key} = ") and " has no effect with " in notice


def test_a_layout_that_no_strategy_names():
    cube = "{device_matrix: [2, 2], axes: [dp, mp]}"
    words = (f"parallel.layouts={{used: {cube}, idle: {cube}}}", "world_size=4", "parallel.mode=semi_auto")
    used = "parallel.strategies={layer: {in: [{layout: used, dims: [dp, mp]}, [1, 1]]}}"
    config = compose_config("model.target=a.B", "data.target=a.C", "train.steps=1", *words, used)
    (notice,) = exclusive.notices(config)
    assert notice.startswith("parallel.layouts.idle has no effect")


@pytest.mark.slow
def test_no_recipe_has_a_key_without_effect():
    for recipe in (Path(recipes.__file__).parent).glob("*.yaml"):
        assert not exclusive.notices(compose_config(f"+recipe={recipe.stem}")), recipe.stem


NEEDING = (
    "parallel.zero.options={overlap_comm: true}",
    "parallel.offload.optimizer=host",
    "parallel.offload.parameters=host",
    "parallel.offload.activations.to=host",
    "train.compile=true",
    "parallel.mode=hybrid",
)


def test_zero_is_our_own_unless_something_needs_deepspeed():
    """Those are all keys that our own refuses, and the reason is the key."""
    stage_3 = ("+recipe=zero", "parallel.zero.stage=3")
    assert compose_config(*stage_3).zero_engine == compose_config("+recipe=zero").zero_engine == "native"
    assert compose_config(*stage_3, "parallel.zero.engine=deepspeed").zero_engine == "deepspeed"
    for word, (key, *_) in zip(NEEDING, DEEPSPEED_ONLY, strict=True):
        config = compose_config(*stage_3, word)
        assert config.zero_engine == "deepspeed" and (exclusive.needs_deepspeed(config) or "").startswith(f"{key}=")
        with pytest.raises(ConfigError, match=r"parallel\.zero\.engine = 'native' does not go with"):
            compose_config(*stage_3, word, "parallel.zero.engine=native")


def test_values_are_found_in_configs_and_in_mappings():
    rule = Rule("a.b", GIVEN, "a.c", UNSET, "why", "do this")
    assert rule.breaks({"a": {"b": 0, "c": None}})
    assert not rule.breaks({"a": {"b": False}}) and not rule.breaks({"a": {"b": 1, "c": 2}})
    assert rule.paragraph({"a": {"b": True}}) == "a.b = true does not go with a.c = null: why; do this."
    assert exclusive.value_of(compose_config("+recipe=zero"), "parallel.zero.stage") == 1


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("parallel.strategies={a.matmul: [[1,2],[2,1]]}", "parallel.strategies = {a.matmul: {in: [[1, 2], [2, 1]]}}"),
        ("train.callbacks=[{target: ema, args: {decay: 0.9}}]", "= [{target: 'ema', args: {decay: 0.9}}]"),
    ],
)
def test_values_are_shown_as_they_are_written(word, text):
    with pytest.raises(ConfigError) as caught:
        compose_config("+recipe=parameter_server", word)
    assert text in str(caught.value)
