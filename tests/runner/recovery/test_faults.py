"""Injected faults happen where configured, once per run folder, and the run recovers from each."""

import json
import re

import pytest
from disturbed import RESTARTS, faults, stored
from small import ALONE, MODES, SMALL

from runner.errors import ConfigError, RunFailed


def test_a_fault_in_a_short_batch_comes_in_its_step(start, tmp_path):
    words = ("data.args={rows: 56}", "data.drop_last=false", "train.log_every=1")
    with pytest.raises(RunFailed, match="an injected fault, in forward of step 4"):
        start(
            *SMALL, *MODES["data_parallel"], *words, "launch.faults=[{kind: raise, rank: 1, step: 4, phase: forward}]"
        )
    lines = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


FOUR = (*SMALL, *MODES["semi_auto"], "optimizer.target=torch.optim.AdamW", "checkpoint.every=2", "train.log_every=1")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("fault", "pattern", "after"),
    [
        ("{kind: kill, rank: 2, step: 3, phase: data}", "rank 2 of 4 was killed by SIGKILL", "step-00000002"),
        pytest.param(
            "{kind: raise, rank: 1, step: 5, phase: forward}",
            "rank 1 of 4 failed: Injected: an injected fault, in forward of step 5",
            "step-00000004",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "{kind: kill, rank: 0, step: 5, phase: backward}",
            "rank 0 of 4 was killed by SIGKILL",
            "step-00000004",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "{kind: hang, rank: 3, step: 3, phase: collective}",
            "rank 3 of 4 never joined",
            "step-00000002",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "{kind: kill, rank: 3, step: 4, phase: optimizer}",
            "rank 3 of 4 was killed by SIGKILL",
            "step-00000002",
            marks=pytest.mark.slow,
        ),
        ("{kind: kill, rank: 1, step: 4, phase: save}", "rank 1 of 4 was killed by SIGKILL", "step-00000002"),
        ("{kind: disk_full, rank: 2, step: 4}", r"\[Errno 28\] No space left on device", "step-00000002"),
        ("{kind: kill, rank: 1, step: 1, phase: data}", "no checkpoint yet. It starts from the beginning", ""),
    ],
)
def test_a_run_goes_on_as_if_nothing_had_happened(start, undisturbed, capfd, fault, pattern, after):
    expected = undisturbed(*FOUR)
    capfd.readouterr()
    ended = start(*FOUR, *RESTARTS, faults(fault))
    said = capfd.readouterr().out
    lines = [line for line in said.splitlines() if line.startswith("restart ")]
    assert len(lines) == 1 and lines[0].startswith("restart 1 of 9: ")
    assert re.search(pattern, lines[0])
    assert f"It goes on from {after}" in lines[0] or not after
    assert stored(ended.folder) == expected


@pytest.mark.parametrize("kind", ["corrupt", pytest.param("truncate", marks=pytest.mark.slow)])
def test_a_damaged_checkpoint_is_passed_over(start, undisturbed, capfd, kind):
    expected = undisturbed(*FOUR)
    fault = f"{{kind: {kind}, rank: 1, step: 4}}", "{kind: kill, rank: 0, step: 6, phase: data}"
    ended = start(*FOUR, *RESTARTS, faults(*fault))
    said = capfd.readouterr().out
    assert "step-00000004 is damaged: rank-0000" in said and "It goes on from step-00000002" in said
    assert stored(ended.folder) == expected


@pytest.mark.slow
def test_a_run_whose_only_checkpoint_is_damaged_begins_again(start, undisturbed, capfd):
    expected = undisturbed(*FOUR)
    fault = "{kind: truncate, rank: 0, step: 2}", "{kind: raise, rank: 2, step: 3, phase: data}"
    assert stored(start(*FOUR, *RESTARTS, faults(*fault)).folder) == expected
    said = capfd.readouterr().out
    assert "step-00000002 is damaged" in said and "It starts from the beginning" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [pytest.param((), marks=pytest.mark.slow), ("parallel.strategies={inner.matmul: [[4,1],[1,1]]}",)]
)
def test_a_rank_that_is_gone_for_good(start, undisturbed, capfd, words):
    """It fails twice without a save in between; the others continue alone. 4, 3 and 2 ranks divide 12 rows."""
    expected = start(*FOUR, "data.batch_size=12", *words, folder="uninterrupted").losses
    capfd.readouterr()
    twice = ["{kind: kill, rank: 3, step: 4, phase: data}"] * 2
    ended = start(*FOUR, "data.batch_size=12", *words, *RESTARTS, faults(*twice), "launch.min_ranks=2")
    said = capfd.readouterr().out
    assert "restart 2 of 9: rank 3 of 4 was killed by SIGKILL" in said
    assert re.search("With 3 ranks, and a plan searched anew, it goes on from step-00000002", said)
    assert ended.losses == pytest.approx(expected, rel=1e-5)
    (last,) = [
        line
        for line in (ended.folder / "restarts.jsonl").read_text(encoding="utf-8").splitlines()
        if '"restart": 2' in line
    ]
    assert json.loads(last)["ranks"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("words", [("parallel.zero.stage=1",), ("checkpoint.background=true",)])
def test_several_failures_under_other_plans(start, undisturbed, words):
    words = (*SMALL, *MODES["data_parallel"], "checkpoint.every=2", *words)
    expected = undisturbed(*words)
    wanted = (
        "{kind: raise, rank: 2, step: 3, phase: backward}",
        "{kind: kill, rank: 1, step: 5, phase: collective}",
        "{kind: kill, rank: 0, step: 6, phase: save}",  # the last one, so that no other fault happens while it saves
    )
    ended = start(*words, *RESTARTS, faults(*wanted))
    assert stored(ended.folder) == expected
    assert len(list((ended.folder / "faults").iterdir())) == 3
    assert len((ended.folder / "restarts.jsonl").read_text(encoding="utf-8").splitlines()) == 3


@pytest.mark.slow
def test_it_ends_after_the_last_restart(start):
    twice = faults(*(f"{{kind: raise, rank: 1, step: {step}, phase: data}}" for step in (2, 3)))
    with pytest.raises(RunFailed, match=r"(?s)Injected: .* in data of step 3.*given up after restart 1 of 1"):
        start(*FOUR, twice, "launch.max_restarts=1")
    assert start(*FOUR, twice, "train.resume=auto").losses  # each happened once in this folder


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("fault", "words", "pattern"),
    [
        ("{kind: kill, rank: 4, step: 1, phase: data}", FOUR, "there are 4 ranks; choose one from 0 to 3"),
        ("{kind: kill, rank: 0, step: 7, phase: data}", FOUR, "the run has 6 steps; choose one from 1 to 6"),
        ("{kind: kill, rank: 0, step: 3, phase: save}", FOUR, "nothing is saved after that step"),
        ("{kind: hang, rank: 0, step: 3, phase: collective}", (*SMALL, *ALONE), "one rank alone joins no collective"),
    ],
)
def test_faults_that_cannot_happen(start, fault, words, pattern):
    with pytest.raises(ConfigError, match=rf"launch.faults.0 \(.*\): {pattern}"):
        start(*words, faults(fault))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("kill", "launch.faults holds 'kill'; each fault is a mapping such as {kind: kill, rank: 1, step: 3"),
        ("{kind: explode, rank: 0, step: 1, phase: data}", "launch.faults.0.kind = 'explode' is not allowed."),
        ("{kind: kill, rank: 0, step: 1}", "launch.faults.0.phase has no value"),
        ("{kind: corrupt, rank: 0, step: 1, phase: data}", "corrupt concerns the files of a checkpoint"),
        ("{kind: network, rank: 0, step: 1, phase: data}", "takes the network `interface` of its rank's host down"),
        ("{kind: kill, rank: 0, step: 1, phase: data, interface: eth0}", "and no other kind does"),
    ],
)
def test_faults_that_are_none(command, left, fault, message):
    done = command(*FOUR, faults(fault))
    assert done.code == 2 and len(done.paragraphs) == 1 and message in done.err
    assert left() == []
