"""The same recipe with every launcher on two hosts: the same losses; and what happens when a host is cut off.

Hosts are network namespaces (see `namespaces`). The rank table stands for all launchers in the short run of the tests.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import RECIPE, STEPS, losses
from namespaces import Hosts

Start = Callable[..., subprocess.Popen[str]]
HERE = Path(__file__).parent
PROGRAMS = {"mpirun": "apt-get install -y openmpi-bin", "pdsh": "apt-get install -y pdsh"}


def table(hosts: Hosts, folder: Path) -> str:
    """A rank table whose ranks are not in the order of the hosts."""
    first, second = hosts.names
    rows = [{"rank": rank, "host": (first, second)[rank % 2], "device": rank // 2} for rank in range(4)]
    (folder / "table.json").write_text(json.dumps(rows))
    return "launch.rank_table=table.json"


def on_two(hosts: Hosts) -> str:
    return f"launch.hosts=[{','.join(f'{name}:2' for name in hosts.names)}]"


def first_steps(process: subprocess.Popen[str], count: int = 1) -> None:
    """Wait until `count` steps have been told."""
    assert process.stdout is not None
    told = []
    for line in process.stdout:
        told.append(line)
        count -= line.startswith("step ")
        if not count:
            return
    assert process.stderr is not None
    raise AssertionError("".join(told) + process.stderr.read())


def listening(hosts: Hosts, name: str) -> list[str]:
    """The local addresses, in the kernel's hexadecimal digits, at which somebody listens on a host."""
    told = subprocess.run(
        hosts.inside(name, ["cat", "/proc/net/tcp", "/proc/net/tcp6"]), capture_output=True, text=True
    )
    rows = [line.split() for line in told.stdout.splitlines() if ":" in line.split()[0]]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A"]


def test_a_rank_table_on_two_hosts(hosts: Hosts, on_first: Start, local_losses: list[float], tmp_path: Path) -> None:
    process = on_first("train", *RECIPE, f"train.steps={STEPS}", "launch=rank_table", table(hosts, tmp_path))
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert "step 4/4" in out and out.splitlines()[-1].startswith("done: 4 steps")
    assert losses(tmp_path / "run") == local_losses
    assert [(tmp_path / "run" / "ranks" / f"{rank}.log").exists() for rank in range(4)] == [True] * 4
    assert not list((tmp_path / "run").glob(".*"))  # what ranks were told, the secret too
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert [host["ranks"] for host in config["launch"]["hosts"]] == [[0, 2], [1, 3]]


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "programs"),
    [
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
        (tmp_path / "hostfile").write_text("".join(f"{name} slots=2\n" for name in hosts.names))
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
    assert (process.returncode, err) == (0, ""), (tmp_path / "run" / "launch.log").read_text()
    assert out.splitlines()[-1].startswith("done: 4 steps")
    assert losses(tmp_path / "run") == local_losses


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_launchers_whose_host_is_cut_off(hosts: Hosts, on_first: Start, launcher: str) -> None:
    second = hosts.names[1]
    process = on_first("train", *RECIPE, "train.steps=100000", f"launch={launcher}", on_two(hosts), "launch.timeout=6")
    first_steps(process)
    hosts.cut_off(second)
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - began < 6 + 10
    assert process.returncode == 1
    assert err.startswith(f"run: host {second} (ranks 2, 3 of 4) no longer answers")
    assert hosts.empty(30)


@pytest.mark.slow
def test_a_host_that_comes_back_in_time_goes_on(hosts: Hosts, on_first: Start, tmp_path: Path) -> None:
    process = on_first("train", *RECIPE, "train.steps=200", "launch=rank_table", on_two(hosts), "launch.timeout=40")
    first_steps(process)
    hosts.cut_off(hosts.names[1])
    time.sleep(4)
    hosts.bring_back(hosts.names[1])
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert len(losses(tmp_path / "run")) == 200


@pytest.mark.slow
def test_hosts_started_by_hand_share_nothing(
    hosts: Hosts, on_first: Start, local_losses: list[float], tmp_path: Path
) -> None:
    words = ["train", *RECIPE[:-1], f"train.steps={STEPS}", "launch=rank_table", on_two(hosts), "launch.port=29444"]
    begun = [
        on_first(*words, f"launch.host={hosts.names[0]}", "hydra.run.dir=first"),
        on_first(*words, "launch.rank=2", "hydra.run.dir=second", on=1),
        on_first(*words, "launch.rank=3", "hydra.run.dir=third", on=1),
    ]
    ended = [(*process.communicate(timeout=120), process.returncode) for process in begun]
    assert [(err, code) for _, err, code in ended] == [("", 0)] * 3
    assert losses(tmp_path / "first") == local_losses


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_command_is_ended(hosts: Hosts, on_first: Start, number: signal.Signals) -> None:
    process = on_first("train", *RECIPE, "train.steps=100000", "launch=mpirun", on_two(hosts), "launch.timeout=20")
    first_steps(process)
    process.send_signal(number)
    process.communicate(timeout=20)
    assert process.returncode == (130 if number is signal.SIGINT else -signal.SIGKILL)
    assert hosts.empty(15)


@pytest.mark.slow
def test_a_host_that_cannot_be_reached(hosts: Hosts, on_first: Start) -> None:
    stranger = hosts.names[0].rpartition(".")[0] + ".77"
    words = ["launch=rank_table", f"launch.hosts=[{hosts.names[0]}:2,{stranger}:2]"]
    process = on_first("train", *RECIPE, f"train.steps={STEPS}", *words)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert err.startswith(f"run: rank_table on {stranger} ended with exit code 255 before ")
    assert "No route to host" in err
