"""train.compile=true: the ranks' compiled programs train to the same numbers as the eager module on one process;
unsupported settings are reported."""

import pytest
from composing import compose_config
from small import HYBRID, MODES, SMALL

from strategies.core.errors import StrategyError
from strategies.runtime import compiled

COMPILED = "train.compile=true"


def test_verified(start):
    words = ("world_size=2", "model.args.dropout=0.25", "verify.steps=2")
    ended = start(*SMALL, *MODES["data_parallel"], COMPILED, *words, verb="verify")
    assert ended.verdict["passed"] and ended.verdict["tolerance"] == 1e-5


def test_ranks_whose_graphs_differ_communicate_in_one_order(start):
    words = ("world_size=2", "model.target=networks.Counting", "verify.steps=2", "launch.timeout=20")
    assert start(*SMALL, *MODES["data_parallel"], COMPILED, *words, verb="verify").verdict["passed"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        MODES["semi_auto"],
        (*MODES["data_parallel"], "parallel.zero.stage=3"),
        (*MODES["semi_auto"], "parallel.zero.stage=1", "model.args.norm=true", "model.target=networks.Classifier"),
        (*MODES["auto"], "train.precision=bf16", "train.accumulate=2"),
        (*MODES["data_parallel"], "model.target=networks.Noisy", "train.precision=fp64"),
    ],
    ids=lambda words: " ".join(words)[:60],
)
def test_verified_with_other_options(start, words):
    assert start(*SMALL, *words, COMPILED, "verify.steps=2", verb="verify").verdict["passed"]


@pytest.mark.slow
def test_a_compiled_run_trains_and_evaluates_as_any_other(start):
    words = (*SMALL, *MODES["data_parallel"], "world_size=2", "evaluate.metric=accuracy")
    first, second = start(*words, folder="plain"), start(*words, COMPILED, folder="compiled")
    assert second.losses == pytest.approx(first.losses, rel=1e-5)
    assert second.evaluations == {step: pytest.approx(values) for step, values in first.evaluations.items()}


@pytest.mark.parametrize("words", [MODES["stand_alone"], HYBRID], ids=["stand_alone", "hybrid"])
def test_modules_that_run_as_they_are_are_not_compiled(command, words):
    done = command(*SMALL, *words, COMPILED)
    assert done.code == 2 and len(done.paragraphs) == 1
    assert "train.compile = true does not go with parallel.mode" in done.err


def test_a_missing_compiler_is_reported_before_anything_is_built(monkeypatch):
    from runner.planning.prepare import prepare

    monkeypatch.setattr(compiled, "missing", lambda device: f"no compiler for {device}")
    with pytest.raises(StrategyError, match="cannot be done here: no compiler for cpu; install it, or leave compiling"):
        prepare(compose_config(*SMALL, *MODES["data_parallel"], COMPILED, "data.target=nowhere.Data"), None)
