"""Callbacks: every hook is called on the ranks that want it, may stop training and change its learning rate, and keeps
its state; what fails is named; a result that is not finite is traced to its operator."""

import json
import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composing import compose_config
from safetensors.torch import load_file
from small import ALONE, MODES, SMALL
from torch import nn

from runner.build.callbacks import callbacks
from runner.checkpoint import read
from runner.commands.convert import run as convert
from runner.errors import ConfigError, RunFailed
from runner.training.callbacks.early_stopping import EarlyStopping
from runner.training.callbacks.nan_watch import _BackwardWatch, _Forward, first_not_finite
from runner.training.hooks import CallbackFailed, Hooks, TrainingState

HOOKED = (*SMALL, *MODES["data_parallel"])


def state(**values: Any) -> TrainingState:
    """What a callback sees on the only rank of a run."""
    config = compose_config(*HOOKED, "evaluate.every=1")
    given: dict[str, Any] = {
        "config": config, "run_dir": Path(), "rank": 0, "world_size": 1, "device": "cpu", "first": 1, "last": 6,
        "module": nn.Identity(), "program": None, "updates": SimpleNamespace(marks=list), "operators": {},
        "repeat": lambda: None,
    }  # fmt: skip
    return TrainingState(**given | values)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("values", "arguments", "stops"),
    [
        ([3.0, 2.0, 2.0, 2.5], {"patience": 2}, 4),
        ([3.0, 2.0, 2.0, 1.9], {"patience": 2}, None),
        ([3.0, 2.9, 2.8], {"patience": 2, "min_delta": 0.5}, 3),
        ([0.1, 0.3, 0.2, math.nan], {"metric": "accuracy", "patience": 2}, 4),
        ([0.1, 0.3], {"metric": "accuracy", "mode": "min", "patience": 1}, 2),
    ],
)
def test_early_stopping(values: list[float], arguments: dict[str, Any], stops: int | None) -> None:
    stopping, seen = EarlyStopping(**arguments), state()
    ended = None
    for number, value in enumerate(values, 1):
        seen.evaluation = {stopping.metric: value}
        again = EarlyStopping(**arguments)
        again.load_state_dict(stopping.state_dict())  # as after a restart
        (stopping := again).evaluation(seen)
        if seen.reason is not None:
            ended = number
            break
    assert ended == stops


@pytest.mark.parametrize(
    ("value", "code", "words"),
    [
        ("nan_wach", "MW204", "Did you mean 'nan_watch'"),
        ("hooked.Fail", "MW301", "Did you mean 'Fails'"),
        ("hooked.NoHooks", "MW840", "Did you mean 'before_step'"),
        ("{target: early_stopping, args: {patienc: 2}}", "MW303", "Did you mean 'patience'"),
        ("{target: early_stopping, args: {mode: mn}}", "MW304", "Did you mean 'min'"),
        ("{target: hooked.Fails, args: {state: {target: torch.nn.Liner}}}", "MW301", "Did you mean 'Linear'"),
    ],
)
def test_what_is_no_callback_is_refused(value: str, code: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as found:
        callbacks(compose_config(*HOOKED, f"train.callbacks=[{value}]"))
    assert found.value.code == code


def test_a_name_twice_is_two_callbacks() -> None:
    both = callbacks(compose_config(*HOOKED, "train.callbacks=[monitor, monitor]"))
    assert [*both] == ["monitor", "monitor#2"]


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_an_error_of_a_callback_names_it(error: type[BaseException]) -> None:
    class Raises:
        def before_step(self, state: TrainingState) -> None:
            raise error("here")

    with pytest.raises(CallbackFailed, match=f"mine fails in before_step at step 4: {error.__name__}: here") as found:
        Hooks({"mine": Raises()}, state(step=4)).call("before_step")
    assert found.value.code == "MW841" and isinstance(found.value.__cause__, error)


def test_the_place_of_a_result_that_is_not_finite() -> None:
    """An infinity that was given is none; a gradient leads to the call whose node made it."""
    x = torch.zeros(3, requires_grad=True)
    with _Forward() as forward:
        y = x.masked_fill(torch.tensor([True, False, False]), -torch.inf).exp()
        assert forward.found is None
        torch.log(y - 2)
    assert forward.found is not None and forward.found[1:] == ("forward", "nan")
    assert "test_callbacks.py" in forward.found[0]
    forward = _Forward()
    with _BackwardWatch(forward) as backward, forward:
        x.exp().sum().backward()
        assert backward.found is None
        x.sqrt().sum().backward()
    assert backward.found is not None and backward.found[1:] == ("backward", "inf")


class _Filled(torch.autograd.Function):
    """Its backward makes a tensor before it writes to it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(gradients[0]).fill_(2.0) * gradients[0]


def test_memory_without_numbers_is_no_gradient() -> None:
    x = torch.ones(3, requires_grad=True)
    torch.use_deterministic_algorithms(True)  # fills new memory with nan
    try:
        assert first_not_finite(lambda: _Filled.apply(x.exp()).sum().backward()) is None
    finally:
        torch.use_deterministic_algorithms(False)


def test_hooks_of_a_run(start) -> None:
    """Called in order on all ranks with the same numbers; one of them changes the learning rate."""
    words = "train.callbacks=[hooked.Calls, hooked.Halves, monitor, {target: early_stopping, args: {patience: 1}}]"
    ended = start(*HOOKED, "evaluate.every=2", "optimizer.args={lr: 1000.0}", words, "checkpoint.every=2")
    calls = [
        [json.loads(line) for line in (ended.folder / f"calls-{rank}.jsonl").read_text(encoding="utf-8").splitlines()]
        for rank in range(4)
    ]
    assert all(one == calls[0] for one in calls)
    steps = [["before_step", "before_update", "after_step"]] * 6
    evaluation = ["before_evaluation", "evaluation", "checkpoint"]
    found = records(ended.folder)
    evaluated = [record["evaluation"]["loss"] for record in found if "evaluation" in record]
    last = 2 * next(n for n, (one, two) in enumerate(pairwise(evaluated), 2) if two >= one)
    assert last < 6
    expected = [name for step in range(last) for name in steps[step] + (evaluation if step % 2 else [])]
    assert [name for name, *_ in calls[0]] == ["start", *expected, "end"]
    trained = [record for record in found if "loss" in record]
    assert [record["step"] for record in trained] == [*range(1, last + 1)]
    assert [record["lr"] for record in trained] == [1000 / 2**n for n in range(last)]
    assert [record["callbacks"]["lr_0"] for record in trained] == [record["lr"] for record in trained]
    assert all(record["callbacks"]["grad_norm"] == record["grad_norm"] > 0 for record in trained)


@pytest.mark.slow
def test_training_that_a_callback_has_ended_is_not_continued(start) -> None:
    stopping = "train.callbacks=[{target: early_stopping, args: {patience: 1}}]"
    words = (*HOOKED, "evaluate.every=2", "optimizer.args={lr: 1000.0}", stopping)
    ended = start(*words, "checkpoint.every=2")
    last = max(record["step"] for record in records(ended.folder))
    assert last < 6
    resume = f"train.resume={ended.folder}/checkpoints/step-{last:08}"
    with pytest.raises(ConfigError) as refused:
        start(*words, resume, folder="again")
    assert refused.value.code == "MW608" and f"after step {last}" in str(refused.value)


@pytest.mark.slow
def test_a_callback_that_raises_ends_the_run(start) -> None:
    with pytest.raises(RunFailed, match=r"hooked.Fails fails in after_step at step 3: KeyError.*hooked\.py") as found:
        start(*HOOKED, "train.callbacks=[hooked.Calls, hooked.Fails]")
    assert (found.value.code, found.value.rank) == ("MW841", 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "more", "operator"),
    [
        ("Logarithm", (), "log"),
        ("Root", (), "sqrt"),
        ("Root", ("parallel.zero.stage=1",), "sqrt"),
        ("Root", ("parallel.zero.stage=3",), "sqrt"),
        ("Root", ("parallel=semi_auto", "+parallel.mesh={dp: 2, tp: 2}", "train.accumulate=2"), "sqrt"),
    ],
)
def test_nan_watch_names_the_operator(start, model: str, more: tuple[str, ...], operator: str) -> None:
    words = (*HOOKED, f"model.target=hooked.{model}", "train.callbacks=[nan_watch]", *more)
    with pytest.raises(RunFailed, match=rf"operator {operator} \({operator}, .*hooked\.py:\d+\)") as found:
        start(*words)
    assert found.value.code == "MW719"


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        MODES["data_parallel"],
        (*MODES["data_parallel"], "parallel.zero.stage=1"),
        (*MODES["data_parallel"], "parallel.zero.stage=2"),
        (*MODES["data_parallel"], "parallel.zero.stage=3"),
        (*MODES["data_parallel"], "parallel.zero.stage=3", "parallel.zero.engine=native"),
        MODES["semi_auto"],
    ],
)
def test_an_average_of_the_weights(start, more: tuple[str, ...]) -> None:
    """Evaluated and saved under every sharding as on one device; a run that is resumed goes on with it."""
    words = (*SMALL, "evaluate.every=2", "checkpoint.every=4", "optimizer.args.lr=0.5")
    averaged = (*words, "train.callbacks=[{target: ema, args: {decay: 0.7}}]")
    alone = records(start(*averaged, *ALONE, folder="alone").folder)
    plain = records(start(*words, *ALONE, folder="plain").folder)
    ended = start(*averaged, *more, folder="ranks").folder
    found = records(ended)
    for one, two, three in zip(alone, plain, found, strict=True):
        if "evaluation" in one:
            assert one["evaluation"]["loss"] != two["evaluation"]["loss"]
            assert three["evaluation"]["loss"] == pytest.approx(one["evaluation"]["loss"], rel=1e-5)
        else:
            assert one["loss"] == two["loss"] and three["loss"] == pytest.approx(one["loss"], rel=1e-5)
    other = MODES["semi_auto"] if more == MODES["data_parallel"] else more
    resume = f"train.resume={ended}/checkpoints/step-00000004"
    again = records(start(*averaged, *other, resume, folder="again").folder)
    assert again[-1]["evaluation"]["loss"] == pytest.approx(found[-1]["evaluation"]["loss"], rel=1e-5)
    last, other = (place / "checkpoints" / "step-00000006" for place in (ended, ended.parent / "alone"))
    convert([str(last), str(ended / "averaged"), "average=ema"])
    weights, expected = load_file(ended / "averaged" / "model.safetensors"), read(other)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected.read(f"ema/{name}"), rtol=1e-4, atol=1e-6)
        assert not torch.equal(weight, expected.read(f"model/{name}"))
    for folder, average in ((last, "predict.average=ema"), (ended / "averaged", "predict.average=null")):
        words = (*averaged, *more, f"predict.checkpoint={folder}", average)
        found_loss = start(*words, verb="predict", folder=f"predicted-{folder.name}").value
        assert found_loss == pytest.approx(found[-1]["evaluation"]["loss"], rel=1e-5)
    with pytest.raises(ConfigError, match="Allowed: ema") as caught:
        read(last).averaged("emma")
    assert caught.value.code == "MW834"


@pytest.mark.slow
@pytest.mark.parametrize("more", [MODES["semi_auto"], (*MODES["data_parallel"], "parallel.zero.stage=1")])
def test_a_trace_names_collectives(start, more: tuple[str, ...]) -> None:
    words = (*SMALL, *more, "train.callbacks=[{target: profiler, args: {wait: 1, warmup: 1, active: 2}}]")
    ended = start(*words)
    for rank in range(4):
        text = (ended.folder / "profile" / f"rank-{rank}-step-4.json").read_text(encoding="utf-8")
        names = [event.get("name", "") for event in json.loads(text)["traceEvents"]]
        assert {name for name in names if name.startswith("ProfilerStep#")} == {"ProfilerStep#2", "ProfilerStep#3"}
        assert "all_reduce for the loss" in names
        if more == MODES["semi_auto"]:
            made = {name.split(" for ")[1] for name in names if "networks.py" in name and " for " in name}
            assert {name.split(",")[0] for name in made} == {"inner (linear", "outer (linear", "gelu (gelu"}


def test_a_run_that_is_too_short_for_a_trace_says_so(start) -> None:
    ended = start(*SMALL, *ALONE, "train.steps=3", "train.callbacks=[profiler]")
    said = (ended.folder / "ranks" / "0.log").read_text(encoding="utf-8")
    assert "profiler: records nothing, as it waits for 3 steps, and this run has 3" in said


def test_nan_watch_says_that_the_data_hold_it(start) -> None:
    with pytest.raises(
        RunFailed, match=r"an entry of the batch.* holds nan on rank 0.*networks\.py:\d+ \(forward\)"
    ) as found:
        start(*SMALL, *ALONE, "data.target=hooked.Holed", "train.callbacks=[nan_watch]")
    assert found.value.code == "MW719"


def test_two_averages_change_no_step(start) -> None:
    """Each restores what it has found, so the last one that wrote comes first."""
    words = (*SMALL, *ALONE, "evaluate.every=1", "optimizer.args.lr=0.5")
    averages = "train.callbacks=[{target: ema, args: {decay: 0.9}}, {target: ema, args: {decay: 0.5}}]"
    assert start(*words, averages, folder="averaged").losses == start(*words, folder="plain").losses


@pytest.mark.slow
def test_histograms_leave_the_numbers_of_tensorboard_there(start) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = "train.callbacks=[{target: histograms, args: {every: 2}}]"
    ended = start(*SMALL, *ALONE, "report.loggers=[tensorboard]", "train.log_every=1", shown).folder
    events = EventAccumulator(str(ended / "tensorboard")).Reload()
    assert [one.step for one in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [one.step for one in events.Histograms("weights/inner.weight")] == [6]  # it keeps one


@pytest.mark.slow
@pytest.mark.parametrize("more", [(*MODES["data_parallel"], "parallel.zero.stage=3"), MODES["semi_auto"]])
def test_histograms_are_those_of_one_device(start, more: tuple[str, ...]) -> None:
    words = (*SMALL, "train.steps=2", "train.callbacks=[{target: histograms, args: {every: 1}}]")

    def lines(folder: Path) -> list[dict[str, Any]]:
        text = (folder / "histograms.jsonl").read_text(encoding="utf-8")
        return sorted(map(json.loads, text.splitlines()), key=lambda one: (one["step"], one["kind"], one["name"]))

    alone, ranks = lines(start(*words, *ALONE, folder="alone").folder), lines(start(*words, *more, folder="r").folder)
    assert len(alone) == len(ranks) == 2 * 2 * 4
    for one, two in zip(alone, ranks, strict=True):
        assert {key: two[key] for key in ("step", "kind", "name", "elements")} == {
            key: one[key] for key in ("step", "kind", "name", "elements")
        }
        assert sum(count for *_, count in two["bins"]) == two["elements"]
        for key in ("min", "max", "mean", "std"):
            assert two[key] == pytest.approx(one[key], rel=1e-4, abs=1e-7)
        moved = {(low, high): count for low, high, count in one["bins"]}
        for low, high, count in two["bins"]:
            moved[low, high] = moved.get((low, high), 0) - count
        # rounding may carry an element over an edge
        assert sum(map(abs, moved.values())) <= 2 + 0.02 * one["elements"]


@pytest.mark.slow
def test_gradients_that_a_callback_writes_are_used(start, tmp_path) -> None:
    given = (*SMALL, "train.precision=fp64", "checkpoint.form=merged", "train.callbacks=[hooked.Clamped]")
    weights = []
    for more in (ALONE, (*MODES["data_parallel"], "parallel.zero.stage=2")):
        ended = start(*given, *more, "run.overwrite=true")
        (file,) = ended.folder.glob("checkpoints/*/model.safetensors")
        weights.append(load_file(file))
    for name, alone in weights[0].items():
        torch.testing.assert_close(weights[1][name], alone, rtol=1e-10, atol=1e-12)
    with pytest.raises(RunFailed, match=r"hooked\.Clamped.*parallel\.zero\.engine=native"):
        start(*given, *more, "parallel.zero.engine=deepspeed", "train.precision=fp32", "run.overwrite=true")


WRITTEN = "train.callbacks=[{target: hooked.ClippedWeights, args: {of: OF}}]"


@pytest.mark.slow
def test_training_goes_on_from_weights_that_a_callback_writes(start) -> None:
    given = (*SMALL, "train.precision=fp64", WRITTEN.replace("OF", "optimizer"), "run.overwrite=true")
    parallel = MODES["data_parallel"]
    alone = [one["loss"] for one in records(start(*given, *ALONE).folder)]
    for more in (MODES["semi_auto"], *((*parallel, f"parallel.zero.stage={stage}") for stage in (1, 3))):
        assert [one["loss"] for one in records(start(*given, *more).folder)] == pytest.approx(alone, rel=1e-10)
    plain = [one["loss"] for one in records(start(*given, *ALONE, WRITTEN.replace("OF", "module")).folder)]
    assert plain == pytest.approx(alone, rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "more"),
    [
        ("module", ("train.precision=bf16",)),
        ("groups", ("train.precision=bf16",)),
        ("groups", ("parallel.zero.stage=1",)),
        ("module", ("parallel.zero.stage=1", "parallel.zero.engine=deepspeed")),
        ("module", ("parallel.zero.stage=3",)),
    ],
)
def test_weights_of_which_there_are_copies_are_written_in_one_way(start, of, more) -> None:
    with pytest.raises(RunFailed, match=r"hooked\.ClippedWeights.*after_step.*state\.weights") as found:
        start(*SMALL, *MODES["data_parallel"], *more, WRITTEN.replace("OF", of))
    assert found.value.code == "MW841"
