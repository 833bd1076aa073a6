"""The command lines of launchers, as values: no process is started."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import conf
from runner.config.launch import Launch, from_files
from runner.errors import ConfigError
from runner.launch.launchers.commands import (
    LAUNCHERS,
    Command,
    LaunchSite,
    deepspeed,
    exported,
    mpirun,
    rank_table,
    slurm,
    torchrun,
)
from runner.launch.launchers.join import Identity, identity

PLACE = LaunchSite(
    Path("/runs/a/join"), 4, "10.0.0.1", 29500, "python", Path("/home/me"), {"PYTHONPATH": "a b"}, ("+x=1",)
)
DEFAULTS = OmegaConf.to_container(OmegaConf.load(Path(conf.__path__[0]) / "launch" / "local.yaml"))


def given(**values: Any) -> Launch:
    """The section `launch` with its defaults, on two hosts, with `values`."""
    two = {"hosts": ["10.0.0.1:2", "10.0.0.2:2"], "timeout": 60.0, "remote": ["ssh", "-x"], "options": ["--more"]}
    return Launch.model_validate({**DEFAULTS, "launcher": "torchrun", **two, **values})


def words(command: Command) -> str:
    return shlex.join(command.words)


def test_torchrun_static() -> None:
    first, second = torchrun(given(), PLACE).commands
    assert words(first) == (
        "python -m torch.distributed.run --nnodes=2 --nproc-per-node=2 --node-rank=0 --master-addr=10.0.0.1 "
        "--master-port=29500 --local-addr=10.0.0.1 --max-restarts=0 --more -m runner.join /runs/a/join"
    )
    assert (first.host, second.host) == ("10.0.0.1", "10.0.0.2")
    assert "--node-rank=1" in second.words and "--local-addr=10.0.0.2" in second.words
    assert second.shell(PLACE.directory).startswith("cd /home/me && exec env PYTHONPATH='a b' python -m torch")


def test_torchrun_c10d() -> None:
    first, second = torchrun(given(rendezvous="c10d"), PLACE).commands
    assert "--rdzv-backend=c10d" in first.words and "--rdzv-endpoint=10.0.0.1:29500" in second.words
    assert "--rdzv-conf=is_host=1,join_timeout=60" in first.words
    assert "--rdzv-conf=is_host=0,join_timeout=60" in second.words


def test_torchrun_here() -> None:
    (only,) = torchrun(given(hosts=[]), PLACE).commands
    assert only.host is None and not only.environment
    assert "--nnodes=1" in only.words and "--nproc-per-node=4" in only.words


def test_mpirun() -> None:
    (only,) = mpirun(given(launcher="mpirun"), PLACE).commands
    line = words(only)
    assert line.startswith("mpirun -np 4 --host 10.0.0.1:2,10.0.0.2:2 --mca plm_rsh_agent 'ssh -x' ")
    assert "-x PYTHONPATH" in line and "--wdir /home/me" in line
    assert line.endswith(" --more python -m runner.join /runs/a/join")
    settings = dict(zip(only.words, only.words[1:], strict=False))
    silent = int(settings["oob_tcp_keepalive_time"]) + 3 * int(settings["oob_tcp_keepalive_intvl"])
    assert silent < 60  # seconds until the ranks of a disconnected host end
    assert "plm_rsh_agent" not in words(*mpirun(given(launcher="mpirun", hosts=[]), PLACE).commands)


def test_slurm() -> None:
    found = slurm(given(launcher="slurm"), PLACE)
    (only,) = found.commands
    assert words(only) == (
        "srun --nodes=2 --ntasks=4 --ntasks-per-node=2 --nodelist=10.0.0.1,10.0.0.2 --kill-on-bad-exit=1 "
        "--distribution=block --export=ALL --chdir=/home/me --more python -m runner.join /runs/a/join"
    )
    assert found.script is not None
    lines = found.script.splitlines()
    assert lines[0] == "#!/bin/bash" and "#SBATCH --ntasks=4" in lines and "cd /home/me" in lines
    assert any(line.startswith("unset SLURM_PROCID") for line in lines)
    assert lines[-1] == "exec python -m runner train +x=1"
    nowhere = slurm(given(launcher="slurm", hosts=[], nodes=2), PLACE).commands[0]
    assert "--nodes=2" in nowhere.words and "--ntasks-per-node=2" in nowhere.words
    assert "--nodelist" not in words(nowhere)


def test_deepspeed() -> None:
    found = deepspeed(given(launcher="deepspeed"), PLACE)
    assert words(*found.commands) == (
        "python -m deepspeed.launcher.runner --hostfile=/runs/a/join/hostfile --master_addr=10.0.0.1 "
        "--master_port=29500 --force_multi --no_local_rank --more --module runner.join /runs/a/join"
    )
    assert found.files == {"hostfile": "10.0.0.1 slots=2\n10.0.0.2 slots=2\n"}


def test_rank_table() -> None:
    first, second = rank_table(given(launcher="rank_table"), PLACE).commands
    assert words(first) == "python -m runner.join /runs/a/join --host 10.0.0.1"
    assert (second.host, second.words[-1]) == ("10.0.0.2", "10.0.0.2")


OF_RANK_3 = {
    "torchrun": {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "LOCAL_SIZE": "9"},
    "deepspeed": {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "1"},
    "mpirun": {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_NODE_RANK": "9",
    },
    "slurm": {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "2"},
}


@pytest.mark.parametrize("launcher", [name for name, spec in LAUNCHERS.items() if spec.variables])
def test_identity(launcher: str) -> None:
    environment = OF_RANK_3[launcher]
    assert identity(launcher, environment) == Identity(3, 4, 1, 2)
    for name in LAUNCHERS[launcher].variables or ():
        with pytest.raises(ConfigError, match=f"but {name} is not set to a number"):
            identity(launcher, environment | {name: "x"})


def test_exported() -> None:
    assert exported(["PYTHON*", "A"], {"PYTHONPATH": "1", "A": "2", "AB": "3"}) == {"A": "2", "PYTHONPATH": "1"}


def read(folder: Path, key: str, content: str) -> Any:
    (folder / "file").write_text(content, encoding="utf-8")
    return from_files({"hosts": [], "hostfile": None, "rank_table": None, key: str(folder / "file")})["hosts"]


def test_hostfiles(tmp_path: Path) -> None:
    text = "# nodes\nnode1 slots=4\n\nnode2   slots = 2 max_slots=8 # half\nnode3\n"
    assert read(tmp_path, "hostfile", text) == ["node1:4", "node2:2", "node3:1"]
    for wrong in ("node1 slots=0", "node1 slots=two", "node1 4", "# nothing"):
        with pytest.raises(ConfigError, match=r"launch\.hostfile = "):
            read(tmp_path, "hostfile", wrong)


def test_rank_tables(tmp_path: Path) -> None:
    rows = [
        {"rank": 2, "host": "a", "device": 1},
        {"rank": 0, "host": "a", "device": 0},
        {"rank": 1, "host": "b", "device": 0},
    ]
    hosts = [{"name": "a", "ranks": [0, 2], "devices": [0, 1]}, {"name": "b", "ranks": [1], "devices": [0]}]
    assert read(tmp_path, "rank_table", json.dumps(rows)) == hosts
    servers = [
        {
            "server_id": host["name"],
            "device": [
                {"rank_id": str(rank), "device_id": str(device), "device_ip": "192.168.0.1"}
                for rank, device in zip(host["ranks"], host["devices"], strict=True)
            ],
        }
        for host in hosts
    ]
    assert read(tmp_path, "rank_table", json.dumps({"version": "1.0", "server_list": servers})) == hosts
    for wrong in ("[]", "{", '[{"rank": 0, "host": "a"}]', '[{"rank": "x", "host": "a", "device": 0}]', "{}", "3"):
        with pytest.raises(ConfigError, match=r"launch\.rank_table = "):
            read(tmp_path, "rank_table", wrong)
