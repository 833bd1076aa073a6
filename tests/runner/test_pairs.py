"""All pairs of features: each is accepted, or refused before anything starts with both keys and an alternative."""

from __future__ import annotations

import re
from copy import deepcopy
from itertools import product
from typing import Any

import hydra
import pytest
import torch
from features import BASE, FEATURES, PAIRS, together
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from pydantic import ValidationError

from runner.cli import arguments as words
from runner.cli import recipes
from runner.config import load as config
from runner.config.origins import Origins
from runner.config.schema import Config
from runner.errors import ConfigError
from runner.planning.prepare import prepare

SCHEDULES = ("1f1b", "interleaved", "zero bubble", "zbv", "gpipe")
RECOMPUTE = ("recompute full", "recompute selective", "recompute auto", "sliced inputs")
STAGE_3 = ("states on a disk", "parameters on the host", "parameters on a disk")
ENGINES = ("ZeRO-3", "native", "DeepSpeed")
ZERO = ("ZeRO-1", "ZeRO-2", *ENGINES, "states on the host", *STAGE_3)
ACTIVATIONS = ("activations on the host", "activations on a disk")
AS_IT_IS = ("stand_alone", "hybrid")
"""Modes that run the user's module."""
SERVED = ("parameter_server", "reduced", "async")
UNEVEN, GROUPS = ("uneven",), "cluster.groups"
FEWER, HOSTS = ("fewer ranks", "growing"), ("spare host", "several hosts")
LAUNCHED = (*FEWER, "rescue", *HOSTS)
"""Features that no plan depends on."""
STAGES, STAGE, COMPILE, MODE = (
    "parallel.pipeline.stages",
    "parallel.zero.stage",
    "train.compile",
    "parallel.mode",
)
ENGINE = "parallel.zero.engine"

REFUSED: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, str]], ...] = (
    (SCHEDULES, ("ZeRO-2", *ENGINES, *STAGE_3), (STAGES, STAGE)),
    (SCHEDULES, AS_IT_IS, (STAGES, MODE)),
    (("zero bubble", "zbv"), ("compile",), (COMPILE, "parallel.pipeline.schedule")),
    (RECOMPUTE, ("compile",), (COMPILE, "parallel.recompute.operators")),
    (RECOMPUTE, AS_IT_IS, ("parallel.recompute.operators", MODE)),
    (("ZeRO-1", "ZeRO-2"), ("states on a disk",), (STAGE, "parallel.offload.optimizer")),
    (("ZeRO-1", "ZeRO-2"), STAGE_3[1:], (STAGE, "parallel.offload.parameters")),
    (("DeepSpeed",), ("fp64",), (STAGE, "train.precision")),
    (("states on the host", *STAGE_3[:1]), ("fp64",), ("parallel.offload.optimizer", "train.precision")),
    (STAGE_3[1:], ("fp64",), ("parallel.offload.parameters", "train.precision")),
    (("native",), ("states on the host", "states on a disk"), (ENGINE, "parallel.offload.optimizer")),
    (("native",), STAGE_3[1:], (ENGINE, "parallel.offload.parameters")),
    (("native",), ACTIVATIONS, (ENGINE, "parallel.offload.activations.to")),
    (("native",), ("compile",), (ENGINE, COMPILE)),
    (("native",), ("hybrid",), (ENGINE, MODE)),
    (ZERO, ("stand_alone",), (STAGE, MODE)),
    (ACTIVATIONS, ("compile",), (COMPILE, "parallel.offload.activations.to")),
    (("ring",), ("compile",), (COMPILE, "parallel.context_parallel")),
    (("place",), ("compile",), (COMPILE, "parallel.place")),
    (("place",), AS_IT_IS, ("parallel.place", MODE)),
    (("copies",), AS_IT_IS, ("parallel.copies", MODE)),
    (("compile",), AS_IT_IS, (COMPILE, MODE)),
    (("recompute auto",), UNEVEN, ("parallel.recompute.operators", GROUPS)),
    (("copies",), UNEVEN, ("parallel.copies", GROUPS)),
    (("compile",), UNEVEN, (COMPILE, GROUPS)),
    (SCHEDULES, SERVED, (STAGES, MODE)),
    (ZERO, SERVED, (STAGE, MODE)),
    (RECOMPUTE, SERVED, ("parallel.recompute.operators", MODE)),
    (ACTIVATIONS, SERVED, ("parallel.offload.activations.to", MODE)),
    (("place",), SERVED, ("parallel.place", MODE)),
    (("copies",), SERVED, ("parallel.copies", MODE)),
    (("compile",), SERVED, (COMPILE, MODE)),
    (("fp16",), ("async",), ("train.precision", "parallel.server.consistency")),
    (SERVED, FEWER, (MODE, "launch.min_ranks")),
    (SERVED, ("rescue",), (MODE, "launch.rescue")),
    (SERVED, HOSTS[:1], (MODE, "launch.standby")),
    (SERVED, HOSTS[1:], (MODE, "launch.launcher")),
    ((*UNEVEN, "groups"), FEWER, (GROUPS, "launch.min_ranks")),
    (("stand_alone",), HOSTS, ("world_size", "launch.hosts")),
    (("rescue",), HOSTS, ("launch.rescue", "launch.launcher")),
)
"""Which features clash with which others, and the keys that the paragraph names. All other pairs are accepted."""
CLASHES = {pair: keys for these, others, keys in REFUSED for pair in product(these, others)}


@pytest.fixture(scope="module")
def base() -> dict[str, Any]:
    recipes.register()
    with hydra.initialize_config_module("conf", version_base="1.3"):
        composed = hydra.compose("config", words.for_hydra(None, BASE))
    return OmegaConf.to_container(composed)


def with_features(base: dict[str, Any], *names: str) -> Config:
    """The config of the command line `together(*names)`. Errors have the text of the command."""
    given, parser = together(*names), OverridesParser.create()
    values = deepcopy(base)
    for word in given:
        override: Any = parser.parse_override(f"++{re.sub('^parallel=', 'parallel.mode=', word)}")
        *path, last = override.key_or_group.split(".")
        section = values
        for key in path:
            section = section[key]
        section[last] = override.value()
    try:
        return Config.model_validate(values)
    except ValidationError:
        return config.load(OmegaConf.create(values), Origins(given))


def refusal(call: Any, *args: Any) -> str | None:
    try:
        call(*args)
    except ConfigError as refused:
        (paragraph,) = refused.paragraphs
        return str(paragraph)
    return None


def test_groups_of_devices_are_shown_as_they_are_written(base):
    paragraph = refusal(with_features, base, "uneven", "growing")
    assert paragraph is not None and "[{devices: 3}, {devices: 1, speed: 0.5}]" in paragraph


def test_the_list_of_clashes_is_one_of_pairs():
    assert set(CLASHES) <= set(PAIRS)


@pytest.mark.few(8)
@pytest.mark.parametrize("first", list(FEATURES)[:-1])
def test_two_features_go_together_or_name_each_other(base, first):
    for pair in (pair for pair in PAIRS if pair[0] == first):
        paragraph, keys = refusal(with_features, base, *pair), CLASHES.get(pair)
        assert (paragraph is None) == (keys is None), f"{pair}: {paragraph}"
        if keys is not None and paragraph is not None:
            assert "\n" not in paragraph
            assert all(key in paragraph for key in keys), f"{pair}: {paragraph}"
            assert any(way in paragraph for way in ("hoose", "se parallel", "se launch", "drop", "=null")), (
                f"{pair}: {paragraph}"
            )


@pytest.mark.slow
@pytest.mark.parametrize("first", [name for name in FEATURES if name not in ("hybrid", *LAUNCHED)][:-1])
def test_what_is_accepted_can_be_prepared(base, first):
    """Captured, planned, split and lowered for evaluation: an accepted config causes no error here."""
    torch.set_num_threads(1)
    for pair in (pair for pair in PAIRS if pair[0] == first and pair not in CLASHES):
        if {"hybrid", *LAUNCHED} & set(pair):
            continue
        prepared = prepare(with_features(base, *pair), None, lambda said: None)
        assert bool(prepared.stages) == any(name in SCHEDULES for name in pair)
        assert bool(prepared.evaluations) == ("evaluation" in pair and "stand_alone" not in pair)
