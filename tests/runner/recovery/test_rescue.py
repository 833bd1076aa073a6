"""Ranks that survive a failure save their state from memory, and the restart loses no step."""

import json
import re
import time

import pytest
from disturbed import RESTARTS, faults, stored
from small import MODES, SMALL

from runner.checkpoint import rescue
from runner.checkpoint.manifest import Stamp
from runner.checkpoint.saving import Mark
from runner.errors import RunFailed
from runner.launch import local
from strategies.runtime.tensor_files import Part, StoredTensor

RESCUE = ("launch.rescue=true", *RESTARTS)
PLAIN = (*SMALL, *MODES["semi_auto"], "optimizer.target=torch.optim.AdamW", "train.log_every=1")
ADAM = "optimizer.target=torch.optim.AdamW"
PIPELINE = (*SMALL, *MODES["data_parallel"], "world_size=2", "parallel.pipeline={stages: 2, micro_batches: 2}")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("words", "fault", "pattern"),
    [
        (PLAIN, "{kind: kill, rank: 1, step: 4, phase: data}", "step-00000003 is made of .* without rank 1"),
        pytest.param(
            PLAIN,
            "{kind: hang, rank: 0, step: 5, phase: backward}",
            "step-00000004 is made of what the ranks had in memory$",
            marks=pytest.mark.slow,
        ),
        (
            PLAIN,
            "{kind: raise, rank: 3, step: 3, phase: forward}",
            "step-00000002 is made of what the ranks had in mem",
        ),
        pytest.param(
            (*SMALL, *MODES["data_parallel"], ADAM, "parallel.zero.stage=1"),
            "{kind: raise, rank: 2, step: 4, phase: data}",
            "step-00000003 is made of what the ranks had in memory$",
            marks=pytest.mark.slow,
        ),
        pytest.param(  # the state of the rank that hangs is nowhere else
            (*SMALL, *MODES["data_parallel"], ADAM, "parallel.zero.stage=1"),
            "{kind: hang, rank: 2, step: 4, phase: data}",
            "step-00000003 is made of what the ranks had in memory$",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_no_step_is_lost(start, undisturbed, capfd, words, fault, pattern):
    expected = undisturbed(*words)
    capfd.readouterr()
    ended = start(*words, *RESCUE, faults(fault))
    said = capfd.readouterr().out
    assert re.search(f"^rescue: {pattern}", said, re.M)
    step = int(re.search(r"rescue: step-(\d+)", said)[1])
    assert f"It goes on from step-{step:08d}" in said
    assert stored(ended.folder) == expected
    assert len((ended.folder / "restarts.jsonl").read_text(encoding="utf-8").splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "step", "without"),
    [
        ("killed as it saves", 4, "3"),
        pytest.param("killed as it starts", None, "", marks=pytest.mark.slow),
        pytest.param("killed in the rescue", 4, "2, 3", marks=pytest.mark.slow),
    ],
)
def test_a_kill_at_an_awkward_moment_costs_no_step(
    start, undisturbed, trouble, monkeypatch, capfd, what, step, without
):
    """Survivors that wait where no error reaches them save their memory too, and are not waited for in vain."""
    words = (*PLAIN, "data.target=troubles.Troubled", "checkpoint.every=2", "checkpoint.background=true")
    words = (*words, "train.callbacks=[troubles.KilledAsItSaves]")
    monkeypatch.setattr(local, "RESCUE", 60.0)
    trouble("none")
    expected = undisturbed(*words)
    trouble(what)
    capfd.readouterr()
    began = time.monotonic()
    hit = () if step is None or without == "3" else (faults("{kind: kill, rank: 3, step: 5, phase: data}"),)
    ended = start(*words, *RESCUE, *hit)
    assert time.monotonic() - began < 50
    said = capfd.readouterr().out
    if step is not None:
        assert f"rescue: step-{step:08d} is made of what the ranks had in memory without rank" in said
        assert f" {without}\n" in said and f"goes on from step-{step:08d}" in said
    assert "nothing is saved" not in said
    assert stored(ended.folder) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "fault", "pattern"),
    [
        (
            (*SMALL, *MODES["data_parallel"], ADAM, "parallel.zero.stage=1", "checkpoint.every=2"),
            "{kind: kill, rank: 2, step: 6, phase: backward}",
            r"under ZeRO rank \d alone has its part of the states",
        ),
        (
            (*PIPELINE, "checkpoint.every=2"),
            "{kind: kill, rank: 1, step: 6, phase: forward}",
            "no rank of a stage of the pipeline is left",
        ),
    ],
)
def test_an_incomplete_rescue_is_not_used(start, undisturbed, capfd, words, fault, pattern):
    expected = undisturbed(*words)
    capfd.readouterr()
    ended = start(*words, *RESCUE, faults(fault))
    said = capfd.readouterr().out
    assert re.search(f"rescue: what the other ranks left of step-00000005 is not enough: {pattern}", said)
    assert "It goes on from step-00000004" in said
    assert stored(ended.folder) == expected
    assert not list((ended.folder / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_weights_in_change_are_not_left(start, undisturbed, capfd):
    """Batch norm updates its buffers in forward, so during backward they are not the state between two steps."""
    words = (*PLAIN, "model.args.norm=true", "checkpoint.every=2")
    expected = undisturbed(*words)
    capfd.readouterr()
    ended = start(*words, *RESCUE, faults("{kind: raise, rank: 0, step: 4, phase: backward}"))
    said = capfd.readouterr().out
    assert "rescue: rank 0, nothing is saved: weights or buffers were being changed" in said
    assert "rescue: step" not in said and "It goes on from step-00000002" in said
    assert stored(ended.folder) == expected


@pytest.mark.slow
def test_a_scheduler_follows_an_evaluation_that_a_failure_ends(start, capfd, tmp_path):
    plateau = "{target: torch.optim.lr_scheduler.ReduceLROnPlateau, args: {patience: 0, threshold: 10.0}}"
    metric = f"evaluate.metrics=[{{target: networks.kills_once, args: {{calls: {tmp_path / 'calls'}}}}}]"
    words = (*PLAIN, f"optimizer.scheduler={plateau}", "evaluate.every=2", metric)
    disturbed = start(*words, *RESCUE, folder="disturbed")
    assert "restart 1 of 9: rank 0 of 4 was killed" in capfd.readouterr().out
    assert stored(disturbed.folder) == stored(start(*words, folder="undisturbed").folder)


@pytest.mark.slow
def test_a_rescued_step_is_evaluated_when_the_run_goes_on(start, capfd, tmp_path):
    """A rank dies when its state is that after an evaluation step, and the others wait for it in a callback."""
    plateau = "{target: torch.optim.lr_scheduler.ReduceLROnPlateau, args: {patience: 0, threshold: 10.0}}"
    words = (*PLAIN, f"optimizer.scheduler={plateau}", "evaluate.every=2", "train.log_every=1", "optimizer.args.lr=0.1")
    kills = f"train.callbacks=[{{target: networks.DiesOnce, args: {{step: 4, mark: {tmp_path / 'mark'}}}}}]"
    disturbed = start(*words, *RESCUE, kills, folder="disturbed")
    assert "It goes on from step-00000004" in capfd.readouterr().out
    calm = start(*words, folder="undisturbed")
    assert stored(disturbed.folder) == stored(calm.folder)
    assert disturbed.losses == calm.losses and disturbed.evaluations == calm.evaluations


@pytest.mark.slow
def test_the_last_evaluation_of_a_shorter_run_decides_nothing(start):
    """What follows evaluations sees those alone that a longer run has, too."""
    plateau = "{target: torch.optim.lr_scheduler.ReduceLROnPlateau, args: {patience: 0, threshold: 10.0}}"
    words = (*PLAIN, f"optimizer.scheduler={plateau}", "evaluate.every=4", "optimizer.args.lr=0.01")
    parts = [start(*words, f"train.steps={steps}", "train.resume=auto", folder="parts") for steps in (5, 7, 11)]
    assert stored(parts[-1].folder) == stored(start(*words, "train.steps=11", folder="straight").folder)


@pytest.mark.slow
def test_the_rescue_of_a_killed_run_is_found_on_resume(start, undisturbed, capfd):
    expected = undisturbed(*PLAIN)
    with pytest.raises(Exception, match="an injected fault"):
        start(*PLAIN, "launch.rescue=true", faults("{kind: raise, rank: 3, step: 3, phase: data}"))
    capfd.readouterr()
    ended = start(*PLAIN, "train.resume=auto")
    assert "rescue: step-00000002 is made of what the ranks had in memory" in capfd.readouterr().out
    assert stored(ended.folder) == expected


def test_a_folder_without_a_word_is_removed(tmp_path, capsys):
    (tmp_path / ".step-00000003.rescue").mkdir()
    assert rescue.collect(tmp_path, None) is None
    (tmp_path / ".step-00000003.rescue").mkdir()
    (tmp_path / ".step-00000003.rescue" / rescue.RESCUED).write_text(
        json.dumps({"header": "{}", "stages": 1}), encoding="utf-8"
    )
    assert rescue.collect(tmp_path, None) is None
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out.count("is not enough") == 2


def test_what_replicas_have_left_is_kept_once(tmp_path):
    def left(rank, *rows):
        name = f"rank-{rank}.safetensors"
        (tmp_path / name).touch()
        parts = tuple(Part(name, 0, (block,)) for block in rows)
        tensors = {"model/w": StoredTensor((4,), "float32", parts)}
        return Mark(rank, 0, {name: Stamp(0, ""), f"rank-{rank}.pt": Stamp(0, "")}, tensors, None)

    marks = rescue._once(tmp_path, [left(0, (0, 2)), left(1, (2, 4)), left(2, (0, 2)), left(3, (0, 2), (2, 4))])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank-0.safetensors", "rank-1.safetensors"]
    assert [[*mark.files] for mark in marks[1:3]] == [["rank-1.safetensors", "rank-1.pt"], ["rank-2.pt"]]
    assert [len(mark.tensors) for mark in marks] == [1, 1, 0, 0]


def test_other_launchers_refuse(command):
    done = command(*PLAIN, "launch=torchrun", "launch.rescue=true")
    assert done.code == 2 and "launch.rescue = true does not go with launch.launcher = 'torchrun'" in done.err


def test_an_evaluation_that_fails_after_the_last_step_loses_no_training(start, capfd):
    def measured(folder):
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [(one["step"], one.get("loss"), one.get("evaluation")) for one in map(json.loads, lines)]

    evaluation = ("data.target=networks.Broken", "evaluate.args={rows: 32, broken: 32}", "evaluate.batch_size=16")
    words = (*SMALL, *MODES["data_parallel"], ADAM, *evaluation)
    expected = measured(start(*words, folder="undisturbed").folder)
    with pytest.raises(RunFailed, match="ValueError: broken"):
        start(*words, "evaluate.args.broken=20")
    assert "train.resume=auto goes on from it" in capfd.readouterr().out
    assert measured(start(*words, "train.resume=auto").folder) == expected
    assert "step-00000006 is made of what the ranks had in memory" in capfd.readouterr().out
