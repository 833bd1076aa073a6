"""A launch with this machine as every host: the common behaviour of launchers, without root or a network."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launched import RECIPE, ROOT, STEPS, losses

Start = Callable[..., subprocess.Popen[str]]
PROGRAMS = Path(__file__).parent


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start("launch=mpirun", ...)` trains in `tmp_path`."""
    started: list[subprocess.Popen[str]] = []

    def call(*words: str, **environment: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "runner", "train", *RECIPE, *words],
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
            )
        )
        return started[-1]

    yield call
    for process in started:
        process.kill()
        process.communicate()


def of_run(folder: Path) -> list[int]:
    """The processes whose working directory is `folder`: launchers, hosts and ranks; after a moment to end."""
    until = time.monotonic() + 10
    while (found := inside(folder)) and time.monotonic() < until:
        time.sleep(0.1)
    return found


def inside(folder: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            mine = entry.name.isdigit() and (entry / "cwd").resolve() == folder.resolve()
        except OSError:
            continue
        if mine and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def words_of(process: int) -> bytes:
    """The command line of a process with NUL between its words; those of forks are the same as of the server."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("launch=torchrun",), marks=pytest.mark.slow),
        pytest.param(("launch=deepspeed", "launch.hosts=[localhost:4]"), marks=pytest.mark.slow),
        pytest.param(("launch=slurm",), marks=pytest.mark.slow),
        pytest.param(("launch=mpirun",), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_every_launcher_gives_the_losses_of_local_ranks(
    start: Start, local_losses: list[float], tmp_path: Path, words: tuple[str, ...]
) -> None:
    """On this machine alone, with stand-ins for Slurm and OpenMPI; `test_hosts` runs the real programs."""
    for program in ("srun", "mpirun"):
        stand_in = tmp_path / "bin" / program
        stand_in.parent.mkdir(exist_ok=True)
        stand_in.write_text(
            f'#!/bin/sh\nexec {sys.executable} {PROGRAMS / f"fake_{program}.py"} "$@"\n', encoding="utf-8"
        )
        stand_in.chmod(0o755)
    path = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    process = start(*words, f"train.steps={STEPS}", PATH=path, SLURM_JOB_ID="7")
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, ""), (tmp_path / "run" / "launch.log").read_text(encoding="utf-8")
    assert out.splitlines()[-1].startswith(f"done: {STEPS} steps")
    assert losses(tmp_path / "run") == local_losses
    assert of_run(tmp_path) == []


@pytest.mark.slow
def test_a_rank_table_and_a_killed_rank_after_which_the_launcher_is_restarted(
    start: Start, local_losses: list[float], tmp_path: Path
) -> None:
    rows = [{"rank": rank, "host": f"127.0.0.{1 + rank % 2}", "device": rank // 2} for rank in range(4)]
    (tmp_path / "table.json").write_text(json.dumps(rows), encoding="utf-8")
    fault = "launch.faults=[{kind: kill, rank: 3, step: 3, phase: forward}]"
    where = ("launch=rank_table", "launch.rank_table=table.json", "launch.timeout=20")
    process, waiting = (
        start(f"train.steps={STEPS}", *where, "checkpoint.every=1", "launch.max_restarts=1", fault),
        set(),
    )
    before = set()
    while process.poll() is None:
        now = {one for one in inside(tmp_path) if b"\0--wait\0" in words_of(one)}
        waiting |= now & before  # what such a process starts has its words for a moment
        before = now
        time.sleep(0.1)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert len(waiting) == 2  # one process per host, for both attempts
    assert re.search(
        r"^restart 1 of 1: on 127.0.0.2, rank 3 of 4 ended before it was done \(was it killed\?\)", out, re.M
    )
    assert "step 4/4" in out and out.splitlines()[-1].startswith("done: 4 steps")
    assert losses(tmp_path / "run") == local_losses
    assert [(tmp_path / "run" / "ranks" / f"{rank}.log").exists() for rank in range(4)] == [True] * 4
    assert not list((tmp_path / "run").glob(".*"))  # the files passed to ranks, including the secret
    config = json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))
    assert [host["ranks"] for host in config["launch"]["hosts"]] == [[0, 2], [1, 3]]
    assert of_run(tmp_path) == []


HERE = ["launch=rank_table", "launch.hosts=[127.0.0.1:2,127.0.0.2:2]", "launch.timeout=20"]


@pytest.mark.few(1)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_ranks_join(start: Start, tmp_path: Path, number: signal.Signals, code: int) -> None:
    process = start("train.steps=100000", "launch=torchrun")
    while not (tmp_path / "run" / "launch.log").exists():
        time.sleep(0.01)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == code
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert of_run(tmp_path) == []


@pytest.mark.slow
def test_a_hang_is_reported_with_call_and_location(start: Start, tmp_path: Path) -> None:
    fault = "launch.faults=[{kind: hang, rank: 2, step: 3, phase: forward}]"
    process = start("train.steps=100000", *HERE[:2], "launch.timeout=5", fault)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert re.match(
        r"run: rank 2 of 4 never joined all_reduce #\d+ over .*, in which ranks? [\d, ]+ waited 5 s\. ", err
    )
    assert re.search(r" Rank 2 on 127\.0\.0\.2 was in forward of step 3, \S+\.py:\d+ \(\w+\)\.", err)
    assert of_run(tmp_path) == []


@pytest.mark.slow
def test_sigterm_stops_between_two_steps(start: Start, tmp_path: Path) -> None:
    process = start("train.steps=100000", *HERE)
    assert process.stdout is not None
    assert any(line.startswith("step ") for line in process.stdout)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM, out + err
    assert re.match(r"run: stopped by SIGTERM after step \d+, which is saved", err)
    assert list((tmp_path / "run" / "checkpoints").iterdir())
    assert of_run(tmp_path) == []


@pytest.mark.slow
def test_hosts_that_share_nothing_cannot_save(start: Start, tmp_path: Path) -> None:
    words = [f"train.steps={STEPS}", *HERE, "launch.port=29466", "checkpoint.at_end=true"]
    processes = [start(*words, f"launch.host=127.0.0.{k}", f"hydra.run.dir=host{k}") for k in (1, 2)]
    ended = [(*process.communicate(timeout=120), process.returncode) for process in processes]
    for _, err, code in ended:
        assert code == 2
        assert re.match(r"run: rank 2 has another run folder than rank 0, so checkpoints would lack its slices", err)
    assert not list(tmp_path.glob("host*"))
