"""The same recipe with every launcher on two hosts gives the same losses; and the loss of a host's network.

Hosts are network namespaces (see `namespaces`).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import RECIPE, ROOT, STEPS, losses
from namespaces import Hosts

pytestmark = pytest.mark.slow
Start = Callable[..., subprocess.Popen[str]]
HERE = Path(__file__).parent
PROGRAMS = {"mpirun": "apt-get install -y openmpi-bin", "pdsh": "apt-get install -y pdsh"}


def on_two(hosts: Hosts) -> str:
    return f"launch.hosts=[{','.join(f'{name}:2' for name in hosts.names)}]"


def first_steps(process: subprocess.Popen[str], count: int = 1) -> None:
    """Wait until `count` steps have been printed."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        count -= line.startswith("step ")
        if not count:
            return
    assert process.stderr is not None
    raise AssertionError("".join(lines) + process.stderr.read())


def listening(hosts: Hosts, name: str) -> list[str]:
    """The local addresses with listening sockets on a host, in the kernel's hexadecimal digits."""
    sockets = subprocess.run(
        hosts.inside(name, ["cat", "/proc/net/tcp", "/proc/net/tcp6"]), capture_output=True, encoding="utf-8"
    )
    rows = [line.split() for line in sockets.stdout.splitlines() if ":" in line.split()[0]]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A"]


def test_a_host_that_is_cut_off_is_named_and_nobody_listens_to_strangers(
    hosts: Hosts, on_first: Start, tmp_path: Path
) -> None:
    second = hosts.names[1]
    process = on_first("train", *RECIPE, "train.steps=100000", "launch=rank_table", on_two(hosts), "launch.timeout=6")
    first_steps(process)
    for name in hosts.names:
        found = listening(hosts, name)
        assert found and not [address for address in found if not int(address, 16)], found
    hosts.cut_off(second)
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 6 + 10
    assert process.returncode == 1
    assert err.startswith(f"run: host {second} (ranks 2, 3 of 4) no longer answers")
    assert hosts.empty(10)


@pytest.mark.parametrize(
    ("words", "programs"),
    [
        (["launch=rank_table"], []),
        (["launch=torchrun"], []),
        (["launch=torchrun", "launch.rendezvous=c10d"], []),
        (["launch=mpirun"], ["mpirun"]),
        (["launch=deepspeed"], ["pdsh"]),
        (["launch=slurm"], []),
        (["launch=slurm", "launch.nodes=2"], []),
    ],
    ids=" ".join,
)
def test_every_launcher_gives_the_same_losses(
    hosts: Hosts, on_first: Start, local_losses: list[float], tmp_path: Path, words: list[str], programs: list[str]
) -> None:
    for program in programs:
        assert shutil.which(program), f"this test needs {program}: {PROGRAMS[program]}"
    if words == ["launch=deepspeed"]:
        (tmp_path / "hostfile").write_text("".join(f"{name} slots=2\n" for name in hosts.names), encoding="utf-8")
        words = [*words, "launch.hostfile=hostfile"]
    elif "launch.nodes=2" in words:
        words = [*words, f"launch.address={hosts.names[0]}"]
    else:
        words = [*words, on_two(hosts)]
    hosts.program("srun", f'exec {sys.executable} {HERE / "fake_srun.py"} "$@"')
    process = on_first(
        "train", *RECIPE, f"train.steps={STEPS}", *words, SPACES=json.dumps(hosts.namespaces), SLURM_JOB_ID="7"
    )
    out, err = process.communicate(timeout=170)
    assert (process.returncode, err) == (0, ""), (tmp_path / "run" / "launch.log").read_text(encoding="utf-8")
    assert out.splitlines()[-1].startswith("done: 4 steps")
    assert losses(tmp_path / "run") == local_losses


@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_launchers_whose_host_is_cut_off(hosts: Hosts, on_first: Start, launcher: str) -> None:
    second = hosts.names[1]
    process = on_first("train", *RECIPE, "train.steps=100000", f"launch={launcher}", on_two(hosts), "launch.timeout=12")
    first_steps(process)
    hosts.cut_off(second)
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 12 + 10
    assert process.returncode == 1
    assert err.startswith(f"run: host {second} (ranks 2, 3 of 4) no longer answers")
    assert hosts.empty(30)


def test_a_host_that_comes_back_in_time_goes_on(hosts: Hosts, on_first: Start, tmp_path: Path) -> None:
    process = on_first("train", *RECIPE, "train.steps=200", "launch=rank_table", on_two(hosts), "launch.timeout=40")
    first_steps(process)
    hosts.cut_off(hosts.names[1])
    time.sleep(4)
    hosts.bring_back(hosts.names[1])
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert len(losses(tmp_path / "run")) == 200


def test_a_run_goes_on_without_a_lost_host(hosts: Hosts, on_first: Start, tmp_path: Path) -> None:
    words = ["+recipe=data_parallel", "world_size=4", "train.steps=150", "train.log_every=1", "evaluate.metric=null"]
    words += ["evaluate.args={}", "checkpoint.every=5", "checkpoint.keep=2", "hydra.run.dir=run", "launch=rank_table"]
    words += [on_two(hosts), "launch.timeout=6", "launch.max_restarts=1", "launch.min_ranks=2"]
    process = on_first("train", *words)
    first_steps(process, 12)
    hosts.cut_off(hosts.names[1])
    out, err = process.communicate(timeout=150)
    assert (process.returncode, err) == (0, "")
    assert f"restart 1 of 1: host {hosts.names[1]} (ranks 2, 3 of 4) no longer answers" in out
    assert "parallel.mode=data_parallel, 2 ranks on cpu" in out
    subprocess.run(
        [sys.executable, "-m", "runner", "train", *words[:9], "hydra.run.dir=alone"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True,
        capture_output=True,
    )
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-4)


def test_manually_started_hosts_share_nothing(
    hosts: Hosts, on_first: Start, local_losses: list[float], tmp_path: Path
) -> None:
    words = ["train", *RECIPE[:-1], f"train.steps={STEPS}", "launch=rank_table", on_two(hosts), "launch.port=29444"]
    processes = [
        on_first(*words, f"launch.host={hosts.names[0]}", "hydra.run.dir=first"),
        on_first(*words, "launch.rank=2", "hydra.run.dir=second", on=1),
        on_first(*words, "launch.rank=3", "hydra.run.dir=third", on=1),
    ]
    ended = [(*process.communicate(timeout=120), process.returncode) for process in processes]
    assert [(err, code) for _, err, code in ended] == [("", 0)] * 3
    assert losses(tmp_path / "first") == local_losses


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_command_is_ended(hosts: Hosts, on_first: Start, number: signal.Signals) -> None:
    process = on_first("train", *RECIPE, "train.steps=100000", "launch=mpirun", on_two(hosts), "launch.timeout=20")
    first_steps(process)
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == (130 if number is signal.SIGINT else -signal.SIGKILL)
    assert hosts.empty(15)


def test_a_host_that_cannot_be_reached(hosts: Hosts, on_first: Start) -> None:
    stranger = hosts.names[0].rpartition(".")[0] + ".77"
    words = ["launch=rank_table", f"launch.hosts=[{hosts.names[0]}:2,{stranger}:2]"]
    process = on_first("train", *RECIPE, f"train.steps={STEPS}", *words)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert err.startswith(f"run: rank_table on {stranger} ended with exit code 255 before ")
    assert "No route to host" in err
