"""A run that is killed and resumed ends as if it had never stopped: the same bits, the same lines of metrics."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from observed import content, ranks_of_this_process
from safetensors.torch import load_file
from small import HYBRID, MODES, SMALL

from runner.errors import ConfigError, RunFailed
from strategies.core.errors import StrategyError

STEPS = 18
LONG = (
    f"train.steps={STEPS}",
    "checkpoint={every: 3, at_end: true, keep: 2}",
    "data.args.rows=70",
    "optimizer.target=torch.optim.AdamW",
    "optimizer.scheduler={target: torch.optim.lr_scheduler.CosineAnnealingLR, args: {T_max: 18}}",
    "evaluate.every=6",
    "train.log_every=4",
)
DROPOUT = "model.args.dropout=0.3"
NORM = "model.args.norm=true"
KINDS = {
    "stage 0": (*MODES["semi_auto"], DROPOUT, NORM, "train.clip=0.5"),
    "stage 1": (*MODES["data_parallel"], DROPOUT, "parallel.zero.stage=1"),
    "stage 3": (*MODES["semi_auto"], DROPOUT, "parallel.zero.stage=3"),
    "native stage 3": (*MODES["semi_auto"], DROPOUT, "parallel.zero={stage: 3, engine: native}", "train.accumulate=2"),
    "stand_alone": (*MODES["stand_alone"], DROPOUT, NORM),
    "hybrid": HYBRID,
    "fp16": (*MODES["data_parallel"], DROPOUT, "train.precision=fp16", "loss.args.reduction=sum"),
    "fp16, stage 2": (*MODES["semi_auto"], "train.precision=fp16", "parallel.zero.stage=2", "loss.args.reduction=sum"),
    "bf16": (*MODES["data_parallel"], DROPOUT, "train.precision=bf16", "train.accumulate=2"),
}


def lines(ended):
    """The metrics without the values that depend on time."""
    clock = {"seconds", "data_seconds", "samples_per_second"}
    return [{key: value for key, value in record.items() if key not in clock} for record in ended.records]


@pytest.fixture(scope="module")
def remembered():
    return {}


@pytest.fixture
def uninterrupted(start, remembered):
    """`uninterrupted("stage 0")` runs without a stop. Returns its final tensors and its metrics."""

    def call(kind):
        if kind not in remembered:
            ended = start(*SMALL, *LONG, *KINDS[kind], folder="uninterrupted")
            remembered[kind] = (content(ended.folder), lines(ended))
        return remembered[kind]

    return call


def check_as_if_never_stopped(start, uninterrupted, kind, folder, except_step=None):
    ended = start(*SMALL, *LONG, *KINDS[kind], "train.resume=auto", folder=folder)
    (name, expected), metrics = uninterrupted(kind)
    found_name, found = content(ended.folder)
    assert found_name == name == f"step-{STEPS:08d}"
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    rest = [[line for line in one if line["step"] != except_step] for one in (lines(ended), metrics)]
    assert rest[0] == rest[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind == "stage 1")) for kind in KINDS])
def test_in_two_parts(start, uninterrupted, kind, capfd):
    """The first part ends normally; its last step is evaluated and measured, because a run's last step always is."""
    uninterrupted(kind)
    capfd.readouterr()
    start(*SMALL, *LONG, *KINDS[kind], "train.steps=11", folder="parts")
    check_as_if_never_stopped(start, uninterrupted, kind, "parts", except_step=11)
    assert "resume: continuing from " in capfd.readouterr().out


def kill_a_rank_at(folder, steps, in_a_save):
    """Kill one rank of this process after `steps` steps or, `in_a_save`, at the next checkpoint while it is written."""

    def watch():
        metrics = folder / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text(encoding="utf-8").count("\n") >= steps):
            time.sleep(0.002)
        while in_a_save and not any((folder / "checkpoints").glob(".step-*.partial")):
            time.sleep(0.0005)
        os.kill(random.choice(ranks_of_this_process()), signal.SIGKILL)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "in_a_save"), [("stage 0", True), pytest.param("stage 3", False, marks=pytest.mark.slow)]
)
def test_a_rank_is_killed(start, uninterrupted, tmp_path, kind, in_a_save):
    uninterrupted(kind)
    killer = kill_a_rank_at(tmp_path / "killed", 7, in_a_save)
    with pytest.raises(RunFailed, match="was killed by SIGKILL"):
        start(*SMALL, *LONG, *KINDS[kind], folder="killed")
    killer.join()
    check_as_if_never_stopped(start, uninterrupted, kind, "killed")


def kill_everything(folder, words, steps):
    """Start the command in a new process group and kill the group after `steps` steps."""
    process = subprocess.Popen(
        [sys.executable, "-m", "runner", *words, f"hydra.run.dir={folder}"],
        cwd=folder.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,
    )
    try:
        metrics, until = folder / "metrics.jsonl", time.monotonic() + 60
        while not (metrics.exists() and metrics.read_text(encoding="utf-8").count("\n") >= steps):
            assert process.poll() is None and time.monotonic() < until, process.communicate()[1]
            time.sleep(0.002)
        time.sleep(random.uniform(0, 0.03))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def words_of(kind):
    """The words of the command line in a folder where `networks` is not importable."""
    return (*SMALL, *LONG, *KINDS[kind])


@pytest.fixture(autouse=True)
def visible(monkeypatch):
    """Makes `networks` importable for the command in another process."""
    here = str(Path(__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ["PYTHONPATH"], here]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stage 0"])
def test_everything_is_killed(start, uninterrupted, tmp_path, kind):
    uninterrupted(kind)
    kill_everything(tmp_path / "killed", words_of(kind), 8)
    check_as_if_never_stopped(start, uninterrupted, kind, "killed")


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(10))
@pytest.mark.parametrize("kind", ["stage 0", "stage 3"])
def test_everything_is_killed_at_any_moment(start, uninterrupted, tmp_path, kind, attempt):
    uninterrupted(kind)
    steps = random.Random(attempt).randrange(1, STEPS - 4)
    kill_everything(tmp_path / "killed", words_of(kind), steps)
    check_as_if_never_stopped(start, uninterrupted, kind, "killed")


@pytest.mark.slow
def test_killed_before_the_first_checkpoint(start, uninterrupted, tmp_path, capfd):
    kind = "stage 0"
    uninterrupted(kind)
    killer = kill_a_rank_at(tmp_path / "killed", 2, in_a_save=False)
    with pytest.raises(RunFailed):
        start(*SMALL, *LONG, *KINDS[kind], f"checkpoint.every={STEPS}", folder="killed")
    killer.join()
    capfd.readouterr()
    check_as_if_never_stopped(start, uninterrupted, kind, "killed")
    assert "resume: no checkpoint yet, so this run starts from the beginning" in capfd.readouterr().out


@pytest.mark.slow
def test_from_a_path(start, uninterrupted, tmp_path):
    """A run in another folder resumes from a checkpoint in the middle; its metrics begin there."""
    kind = "stage 0"
    start(*SMALL, *LONG, *KINDS[kind], "train.steps=12", "checkpoint.keep=null", folder="first")
    path = tmp_path / "first" / "checkpoints" / "step-00000006"
    ended = start(*SMALL, *LONG, *KINDS[kind], f"train.resume={path}", folder="second")
    (_, expected), metrics = uninterrupted(kind)
    found = content(ended.folder)[1]
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
    assert lines(ended) == [record for record in metrics if record["step"] > 6]


OTHERS = [
    (("optimizer.args.lr=0.5",), "optimizer.args.lr was null and is now 0.5"),
    (("optimizer.target=torch.optim.Adam",), "optimizer.target was"),
    (
        ("model.args.hidden=32",),
        r"inner.weight is of shape \[16, 12\] in it, and this model has",
    ),
    (("model.args.norm=false",), "it has trained norm.bias, which this model does not have"),
]


@pytest.fixture
def started(start, tmp_path):
    ended = start(*SMALL, *LONG, *KINDS["stage 0"], "train.steps=5", folder="run")
    return ended, {path: path.read_bytes() for path in ended.folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_another_run_is_refused_and_nothing_is_touched(start, started):
    ended, before = started
    for overrides, says in OTHERS:
        with pytest.raises(StrategyError, match=says):
            start(*SMALL, *LONG, *KINDS["stage 0"], *overrides, "train.resume=auto", folder="run")
        now = {path: path.read_bytes() for path in ended.folder.rglob("*") if path.is_file()}
        assert {path for path in now if now[path] != before.get(path)} <= {ended.folder / "ranks" / "0.log"}


@pytest.mark.slow
def test_a_run_that_is_done_is_done(start, started):
    """A command may be killed between its last save and its end, and a job scheduler starts it again."""
    ended, before = started
    again = start(*SMALL, *LONG, *KINDS["stage 0"], "train.steps=5", "train.resume=auto", folder="run")
    assert again.value == ended.value and math.isfinite(again.value)
    kept = {path: content for path, content in before.items() if "checkpoints" in path.parts or path.suffix == ".jsonl"}
    assert len(kept) > 2 and {path: path.read_bytes() for path in kept} == kept


@pytest.mark.few(1)
@pytest.mark.parametrize(("steps", "resume"), [(4, "auto"), (5, "{path}")])
def test_more_steps_than_configured_are_refused(start, started, steps, resume):
    path = started[0].folder / "checkpoints" / "step-00000005"
    overrides = (f"train.steps={steps}", f"train.resume={resume.format(path=path)}")
    with pytest.raises(ConfigError, match=rf"has 5 steps done, and train.steps .* asks for {steps}; ask for more"):
        start(*SMALL, *LONG, *KINDS["stage 0"], *overrides, folder="run")


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_options_that_a_step_adds_to_its_groups_go_on(start, stage):
    words = (*SMALL, *MODES["data_parallel"], "optimizer={target: networks.Slowing}", "checkpoint.every=3")
    words += (f"parallel.zero.stage={stage}",)
    every = start(*words, folder="all")
    rest = start(*words, f"train.resume={every.folder}/checkpoints/step-00000003", folder="rest")
    assert rest.losses == every.losses[3:] and len(rest.losses) == 3


@pytest.mark.parametrize(
    ("before", "after"),
    [(1, 1), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((3, 3), (3, 0), (0, 3)))],
)
def test_numbers_that_follow_from_the_options_of_a_group_go_on(start, before, after):
    """Of groups of which a rank has no part."""
    groups = "[{match: ['*.bias'], args: {betas: [0.5, 0.9]}}]"
    words = (*SMALL, *MODES["data_parallel"], "checkpoint.every=3", f"optimizer.groups={groups}")
    words += ("train.precision=fp64", "optimizer.target=torch.optim.NAdam")
    first, then = (f"parallel.zero.stage={stage}" for stage in (before, after))
    every = start(*words, first, folder="all")
    rest = start(*words, then, f"train.resume={every.folder}/checkpoints/step-00000003", folder="rest")
    assert rest.losses == pytest.approx(every.losses[3:], rel=1e-14) and len(rest.losses) == 3


@pytest.mark.parametrize(
    ("before", "after"),
    [(0, 0), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, 0), (3, 3), (0, 3)))],
)
def test_parameters_without_elements_go_on(start, before, after):
    words = (*SMALL, *MODES["data_parallel"], "checkpoint={every: 3, form: both}", "optimizer.target=torch.optim.AdamW")
    words += ("model.target=networks.Vacant",)
    first, then = (f"parallel.zero={{stage: {one}, engine: {'native' if one else 'auto'}}}" for one in (before, after))
    every = start(*words, first, folder="all")
    rest = start(*words, then, f"train.resume={every.folder}/checkpoints/step-00000003", folder="rest")
    assert rest.losses == pytest.approx(every.losses[3:], rel=1e-6) and len(rest.losses) == 3
    stored = load_file(every.folder / "checkpoints/step-00000003/model.safetensors")
    assert stored["prompt"].shape == (0, 4) and stored["nothing"].shape == (0,)


@pytest.mark.parametrize("kind", ["beside", "named"])
def test_an_optimizer_that_keeps_more_than_states_and_groups_does_not_go_on(start, kind):
    words = (*SMALL, *MODES["data_parallel"], "checkpoint.every=3", "train.steps=3")
    words += (f"optimizer={{target: networks.Slowing, args: {{kind: {kind}}}}}",)
    ended = start(*words, folder="all")
    with pytest.raises(StrategyError) as refused:
        start(*words, "train.steps=6", f"train.resume={ended.folder}/checkpoints/step-00000003", folder="rest")
    assert refused.value.code == "MW609"


@pytest.mark.slow
def test_the_command_keeps_the_folder_of_a_run_that_it_refuses_to_continue(command, tmp_path):
    words = (*SMALL, *MODES["data_parallel"], "checkpoint.at_end=true", "train.steps=2", "hydra.run.dir=out")
    assert command(*words).code == 0
    before = (
        (tmp_path / "out" / "config.json").read_text(encoding="utf-8"),
        (tmp_path / "out" / "plan.json").read_text(encoding="utf-8"),
    )
    done = command(*words, "train.resume=auto", "train.steps=4", "optimizer.target=torch.optim.Adam")
    assert done.code == 2
    assert 'optimizer.target was "torch.optim.SGD" and is now "torch.optim.Adam"' in done.paragraphs[0]
    assert before == (
        (tmp_path / "out" / "config.json").read_text(encoding="utf-8"),
        (tmp_path / "out" / "plan.json").read_text(encoding="utf-8"),
    )
    assert json.loads(before[0])["world_size"] == 4
    assert command(*words, "train.resume=auto", "train.steps=4").code == 0
