"""SIGTERM, SIGINT and SIGHUP: all ranks stop after the same step, which is saved, and the command ends with 128 + the
signal; a second one ends it at once."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from small import MODES, SMALL

from runner import checkpoint as checkpoints
from runner.errors import Stopped
from runner.launch import stopping
from runner.launch.interrupts import SAME, Interrupts
from runner.launch.stopping import EXIT_CODE, Stopping


@pytest.mark.parametrize("coupled", [True, False])
def test_simulated_ranks_agree_on_the_last_step(monkeypatch, coupled):
    """Ranks that synchronize at every step, and ranks that run independently, however far apart."""
    requested, store, world = threading.Event(), dist.HashStore(), 5
    monkeypatch.setattr(stopping, "_requested", requested)
    meeting, lasts = threading.Barrier(world), {}

    def train(rank):
        agreed = Stopping(rank, world, store, done=2, poll=0.01)
        draw = random.Random(rank)
        for step in range(3, 10_000):
            if not agreed.begin(step):
                lasts[rank] = step - 1
                return
            time.sleep(draw.random() * 0.002 * (1 if coupled else rank + 1))
            if coupled:
                meeting.wait(10)

    threads = [threading.Thread(target=train, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    requested.set()
    for thread in threads:
        thread.join(10)
    assert lasts == dict.fromkeys(range(world), lasts.get(0)) and 3 < lasts[0] < 10_000


def test_one_request_reaches_the_others(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(stopping, "_requested", threading.Event())
    monkeypatch.setattr(stopping, "_received", [signal.SIGHUP])
    found = [Stopping(rank, 2, store, done=3, poll=0.01) for rank in range(2)]
    assert all(one.begin(4) for one in found)
    store.set(stopping.REQUESTED, "")  # as a rank on another host does
    until = time.monotonic() + 5
    while any(one._decided.is_set() is False for one in found):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert [one.begin(5) for one in found] == [False, False]
    assert [one.signal for one in found] == [signal.SIGHUP, signal.SIGHUP]


LONG = (*SMALL, *MODES["semi_auto"], "train.steps=2000", "train.log_every=500", "checkpoint.at_end=true")


def started(folder, *words):
    return subprocess.Popen(
        [sys.executable, "-m", "runner", *LONG, *words, f"hydra.run.dir={folder}", "parallel.plan_cache=null"],
        cwd=folder.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,
    )


def wait_for_steps(process, folder, steps):
    metrics, until = folder / "metrics.jsonl", time.monotonic() + 100
    while not (metrics.exists() and metrics.read_text(encoding="utf-8").count("\n") >= steps):
        assert process.poll() is None and time.monotonic() < until, process.communicate()
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize("to_a_rank", [False, True])
def test_it_stops_between_two_steps_and_goes_on(tmp_path, start, to_a_rank):
    """Sent to the command, as by a terminal or a job scheduler, and to a single rank."""
    folder = tmp_path / "stopped"
    process = started(folder)
    try:
        wait_for_steps(process, folder, 20)
        requested = rank_of(process, folder, 2) if to_a_rank else process.pid
        os.kill(requested, signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == EXIT_CODE == 143, err
    saved = checkpoints.newest(folder / "checkpoints")
    done = checkpoints.read(saved).step
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record["step"] for record in records] == list(range(1, done + 1)) and 20 <= done < 2000
    assert f"run: stopped by SIGTERM after step {done}, which is saved. It goes on with: run world_size=4 " in err
    assert err.endswith(f" hydra.run.dir={folder} train.resume=auto\n")
    assert not (folder / "error.txt").exists()
    last = f"train.steps={done + 2}"
    went_on = start(*LONG, last, "train.resume=auto", folder="stopped")
    uninterrupted = start(*LONG, last, folder="uninterrupted")
    assert [record["loss"] for record in went_on.records] == uninterrupted.losses
    ends = [checkpoints.newest(one.folder / "checkpoints") for one in (went_on, uninterrupted)]
    files = [checkpoints.read(end).header.files for end in ends]
    assert [one["rank-00001.safetensors"] for one in files[:1]] == [files[1]["rank-00001.safetensors"]]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_and_the_end_of_a_terminal_save_too(tmp_path, number):
    """A terminal signals the foreground process group; a job scheduler may signal the ranks, too."""
    folder = tmp_path / "stopped"
    process = started(folder)
    try:
        wait_for_steps(process, folder, 5)
        rank = rank_of(process, folder, 1)
        os.killpg(process.pid, number)
        if number == signal.SIGHUP:
            os.kill(rank, number)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 128 + number, err
    done = checkpoints.read(checkpoints.newest(folder / "checkpoints")).step
    assert f"run: stopped by {number.name} after step {done}, which is saved. It goes on with: run " in err
    assert ("Ctrl-C again ends at once" in err) == (number == signal.SIGINT)


def test_a_signal_that_comes_twice_at_once_is_one():
    """A key that bounces, or a wrapper that passes on what a terminal sends to all."""
    with Interrupts(lambda number: True) as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.stopping
        interrupts._stopped_at -= SAME
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        assert Interrupts._once_more is not None
        Interrupts._once_more.cancel()


@pytest.mark.slow
def test_a_closed_console_ends_no_run(tmp_path):
    """`run ... | head -1`, where a restart has something to say."""
    words = ("train.steps=6", "launch.max_restarts=1", "launch.faults=[{kind: kill, rank: 1, step: 3, phase: data}]")
    process = started(tmp_path / "run", *words)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(100) == 0
    assert process.stderr.read() == "" and "restart" in (tmp_path / "run" / "restarts.jsonl").read_text("utf-8")
    process.stderr.close()


@pytest.mark.parametrize("after", [0.0, 0.1, 0.7])
def test_ctrl_c_before_there_is_anything_to_save(tmp_path, after):
    """Two signals while the command imports modules, reads its config or starts."""
    process = started(tmp_path / "never")
    try:
        maps = Path(f"/proc/{process.pid}/maps")
        while "pydantic_core" not in maps.read_text(encoding="utf-8"):
            time.sleep(0.005)
        time.sleep(after)
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=20)
    except ProcessLookupError:  # it has ended before the second one
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, err) == (130, "run: interrupted.\n")


@pytest.mark.slow
def test_a_sweep_counts_its_jobs(command, job, tmp_path):
    began = []

    def stop(config, run_dir):
        began.append(config.train.seed)
        if len(began) == 2:
            raise Stopped("stopped by SIGINT after step 3, which is saved.", signal.SIGINT, saved=True)
        return 0.5

    job(stop)
    words = ("-m", *SMALL, *MODES["semi_auto"], "train.seed=1,2,3", "hydra.sweep.dir=out")
    done = command(*words)
    assert (done.code, began) == (130, [1, 2])
    assert "sweep: 1 of 3 jobs done" in done.out
    assert any("job #1" in line and "after step 3" in line for line in done.paragraphs)
    assert any(
        line.endswith("hydra.sweep.dir=" + str(tmp_path / "out") + " train.resume=auto") for line in done.paragraphs
    )
    went_on = command(*words, "train.resume=auto")
    assert (went_on.code, began) == (0, [1, 2, 2, 3])
    assert "sweep: 3 of 3 jobs done" in went_on.out


def rank_of(process, folder, number):
    shown = str(folder / "ranks" / f"{number}.where")
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if os.getsid(int(maps.parent.name)) == process.pid and shown in maps.read_text(encoding="utf-8"):
                return int(maps.parent.name)
        except (OSError, ProcessLookupError):
            continue
    raise AssertionError(f"no rank {number}")


@pytest.mark.slow
def test_a_second_one_ends_it_at_once(tmp_path):
    folder = tmp_path / "stopped"
    process = started(folder, "launch.faults=[{kind: hang, rank: 1, step: 5, phase: forward}]")
    try:
        wait_for_steps(process, folder, 4)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        time.sleep(1.0)
        assert process.poll() is None  # it waits for the end of the step, which never comes
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        err = process.communicate(timeout=30)[1]
    finally:
        process.kill()
    assert (process.returncode, err) == (143, "run: terminated.\n")
    assert time.monotonic() - began < 5


def test_the_error_of_a_stopped_run(command, job):
    def stop(config, run_dir):
        raise Stopped("stopped after step 3.")

    job(stop)
    done = command(*SMALL, *MODES["semi_auto"])
    assert (done.code, done.paragraphs) == (143, ["run: stopped after step 3."])
