"""The watchdog also covers preparation and saving; a slow but active process is not restarted."""

import json
import os
import re
import signal
import subprocess
import time

import pytest
from small import ALONE, MODES, SMALL

from runner.errors import ConfigError, RunFailed
from runner.launch import forks, liveness
from runner.launch.hangs import GRACE, Stall, diagnose, read_state
from runner.launch.liveness import Signs
from strategies.runtime.flight_recorder import SAVES, SAVING, FlightRecorder
from tests.ranks import start_ranks

TWO = (*SMALL, *MODES["data_parallel"], "world_size=2", "data.target=troubles.Troubled", "data.batch_size=4")


@pytest.fixture
def run(tmp_path):
    def call(entry, payload=None, world_size=1, timeout=1.0, name="the search for a checkpoint"):
        return start_ranks(
            f"troubles:{entry}", payload, world_size, tmp_path, timeout=timeout, name=name if world_size == 1 else None
        )

    return call


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "pattern"),
    [
        ("SIGKILL", r"the preparation was killed by SIGKILL \((was memory short\?|not by the kernel's OOM killer)\)"),
        ("SIGSTOP", r"the preparation hung: it has shown no sign of life for 1 s\. It was stopped"),
    ],
)
def test_a_preparation_that_fails_is_tried_again(start, trouble, capfd, what, pattern):
    trouble(what)
    words = (*TWO, "train.steps=2", "launch.timeout=1")
    ended = start(*words, "launch.max_restarts=1")
    assert re.search(f"restart 1 of 1: {pattern}.* It is prepared again", capfd.readouterr().out)
    assert json.loads((ended.folder / "restarts.jsonl").read_text(encoding="utf-8"))["resume"] is None
    assert len(ended.losses) == 2


@pytest.mark.slow
def test_what_the_data_raises_is_wrong_input_and_not_tried_again(start, trouble, capfd):
    trouble("raise")
    with pytest.raises(ConfigError, match="RuntimeError: the data is not there yet"):
        start(*TWO, "train.steps=2", "launch.max_restarts=1")
    assert "restart" not in capfd.readouterr().out


def test_a_search_that_is_stopped_is_named(run):
    with pytest.raises(RunFailed, match=r"^the search for a checkpoint hung: .* no sign of life for 1 s. It was stop"):
        run("stop")


@pytest.mark.slow
def test_a_process_that_is_silent_for_long_is_given_up(run, monkeypatch):
    monkeypatch.setattr(liveness, "QUIET", 1.0)
    with pytest.raises(RunFailed, match=r"^the search .* hung: .* It was in \S*troubles.py:\d+ \(sleep\)"):
        run("sleep")
    assert run("compute", 4.5) == "done"  # computing counts as activity


@pytest.mark.slow
def test_a_fork_server_that_is_killed_is_named(run):
    with pytest.raises(RunFailed, match=r"^the fork server, of which every rank is a fork, was killed by SIGKILL"):
        run("kill_the_server", world_size=2)
    assert run("compute", 0.0) == "done"


@pytest.mark.slow
def test_a_fork_server_that_is_stopped_is_named(run):
    assert run("compute", 0.0) == "done"
    os.kill(forks.server.pid, signal.SIGSTOP)
    with pytest.raises(
        RunFailed, match=r"^the fork server hung: it was to start the search .* no sign of life for 1 s"
    ):
        run("compute", 0.0)
    assert run("compute", 0.0) == "done"


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_rank_without_room_for_its_log_names_the_disk(run, world_size):
    who = "the search for a checkpoint" if world_size == 1 else "rank [01] of 2"
    with pytest.raises(
        RunFailed, match=rf"^{who} failed: a file may not be larger \(ulimit -f\): OSError: \[Errno 27\]"
    ):
        run("full_log", world_size=world_size)


def test_a_limit_on_files_in_training_is_named(start, trouble):
    trouble("full disk")
    with pytest.raises(RunFailed, match=r"^rank 1 of 2 failed: a file may not be larger .*Where: \S*troubles.py"):
        start(*TWO, "train.steps=2")


@pytest.mark.slow
def test_slow_rows_are_no_hang(start, trouble):
    """A step takes longer than the silence limit, on all ranks."""
    trouble("slow rows")
    assert len(start(*TWO, "data.batch_size=10", "train.steps=2", "launch.timeout=1").losses) == 2


@pytest.mark.slow
@pytest.mark.parametrize("background", ["false", pytest.param("true", marks=pytest.mark.slow)])
@pytest.mark.parametrize("who", ["slow rank 0", pytest.param("slow files", marks=pytest.mark.slow)])
def test_a_slow_save_is_no_hang(start, trouble, who, background):
    trouble(who)
    words = (*TWO, "train.steps=2", "launch.timeout=1", f"checkpoint.background={background}", "checkpoint.every=1")
    began = time.monotonic()
    assert len(start(*words).losses) == 2
    assert time.monotonic() - began > 4


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("background", ["false", "true"])
def test_a_rank_that_hangs_in_saving_is_named(start, trouble, monkeypatch, rank, background):
    monkeypatch.setattr(liveness, "QUIET", 1.0)
    trouble("")
    fault = f"launch.faults=[{{kind: hang, rank: {rank}, step: 2, phase: save}}]"
    words = (*TWO, "train.steps=4", "launch.timeout=1", f"checkpoint.background={background}", "checkpoint.every=2")
    with pytest.raises(RunFailed, match=rf"^rank {rank} of 2 hung in saving, .*\. Rank {rank} was in .*") as caught:
        start(*words, fault)
    assert caught.value.rank == rank


def test_a_single_rank_that_hangs_is_found(start, trouble, monkeypatch):
    monkeypatch.setattr(liveness, "QUIET", 1.0)
    trouble("")
    with pytest.raises(RunFailed, match=r"^no rank has moved on for 1 s\. Rank 0 was in data loading of step 1, "):
        start(
            *TWO,
            *ALONE,
            "train.steps=2",
            "launch.timeout=1",
            "launch.faults=[{kind: hang, rank: 0, step: 1, phase: data}]",
        )


def test_signs_of_life():
    with subprocess.Popen(["sh", "-c", "sleep 60; :"]) as process:
        try:
            signs = Signs(process.pid)
            time.sleep(0.3)
            signs.look()
            before = signs.since
            time.sleep(0.3)
            signs.look()
            assert signs.since == before and signs.stopped is None
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.1)
            signs.look()
            assert signs.stopped is not None and not signs.halted(5.0) and signs.halted(-1.0)
            process.send_signal(signal.SIGCONT)
            time.sleep(0.1)
            signs.look()
            assert signs.stopped is None and not signs.lost(5.0)
        finally:
            process.kill()
    with subprocess.Popen(["sh", "-c", "sh -c 'while :; do :; done'; :"], start_new_session=True) as process:
        try:
            signs = Signs(process.pid)  # the process waits for its computing child
            alone = Signs(process.pid, children=False)
            spinning = Signs(process.pid, computing=False)
            time.sleep(0.5)
            began = time.monotonic()
            for one in (signs, alone, spinning):
                one.look()
            time.sleep(0.5)
            for one in (signs, alone, spinning):
                one.look()
            assert signs.since > began > max(alone.since, spinning.since)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_process_that_ends_while_it_is_looked_at(monkeypatch):
    def gone(plain):
        def look(path="."):
            if str(path).endswith("/task"):
                raise FileNotFoundError(2, "No such file or directory", str(path))
            return plain(path)

        return look

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, gone(getattr(os, name)))
    Signs(os.getpid()).look()


class Shown:
    """Simulated signs of activity."""

    def __init__(self):
        self.silent = self.still = False

    def look(self):
        pass

    def lost(self, timeout):
        return self.silent

    def halted(self, timeout):
        return self.still


def test_a_stall_is_no_slowness(tmp_path):
    ranks = [FlightRecorder() for _ in range(2)]
    for rank, one in enumerate(ranks):
        one.attach(tmp_path / f"{rank}.where")
        one.at(SAVING)
        one.cells[SAVES] = 2
    files, shown = [tmp_path / f"{rank}.where" for rank in range(2)], [Shown(), Shown()]
    stall = Stall(files, -GRACE + 0.1, shown)
    stall.detected()
    time.sleep(0.2)
    assert not stall.detected()  # not while one computes
    shown[0].silent = True
    assert not stall.detected()
    shown[1].still = True
    assert stall.detected()
    ranks[0].advance(4096)
    assert not stall.detected()  # nor while one writes
    shown[1].still, shown[1].silent = False, True
    time.sleep(0.2)
    assert stall.detected()
    at = [read_state(file) for file in files]
    assert diagnose(at, 5.0).hung == (0,)  # both have written their files; rank 0 finishes the checkpoint
    ranks[0].cells[SAVES] += 2
    ranks[1].cells[SAVES] += 1
    at = [read_state(file) for file in files]
    assert diagnose(at, 5.0).text == "rank 1 of 2 hung in saving, and nothing was written for 5 s"
    assert diagnose(at, 5.0, [0]).hung == (0,)


@pytest.mark.parametrize("away", [8.0, 1000.0])
def test_who_looks_late_knows_nothing(tmp_path, monkeypatch, away):
    clock = [100.0]
    monkeypatch.setattr(liveness.time, "monotonic", lambda: clock[0])
    one = FlightRecorder()
    one.attach(tmp_path / "0.where")
    shown = Shown()
    shown.silent = True
    stall = Stall([tmp_path / "0.where"], 5.0, [shown])
    stall.detected()
    clock[0] += away  # the parent was stopped itself
    assert not stall.detected()
    looks = 0
    while not stall.detected():
        clock[0] += 2.0
        looks += 1
    assert looks == 3
