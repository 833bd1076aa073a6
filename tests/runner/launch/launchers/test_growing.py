"""A run grows back when a lost host returns, and a spare host takes the place of a lost one.

Hosts are network namespaces (see `namespaces`).
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launched import losses
from namespaces import Hosts

pytestmark = pytest.mark.slow
Start = Callable[..., subprocess.Popen[str]]
WORDS = (
    *("+recipe=data_parallel", "world_size=4", "train.log_every=1", "evaluate.metric=null", "evaluate.args={}"),
    *("checkpoint.every=5", "checkpoint.keep=2", "hydra.run.dir=run", "launch=rank_table", "launch.timeout=6"),
)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Three hosts; the program `ssh` connects them."""
    made = Hosts(3, tmp_path_factory.mktemp("hosts"))
    yield made
    made.close()


def restarts(folder: Path, count: int, process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """The restarts of a run, once there are `count`."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        file = folder / "restarts.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        if len(lines) >= count:
            return [json.loads(line) for line in lines]
        time.sleep(0.2)
    raise AssertionError(process.communicate()[1])


def steps(folder: Path, count: int) -> None:
    """Wait until `count` steps are recorded."""
    deadline = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists() or len(losses(folder)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_run_grows_back_when_its_host_returns(hosts: Hosts, on_first: Start, tmp_path: Path) -> None:
    first, second, _ = hosts.names
    table = f"launch.hosts=[{first}:2,{second}:2]"
    recovery = ("launch.max_restarts=1", "launch.min_ranks=2", "launch.max_ranks=4")
    process = on_first("train", *WORDS, "train.steps=600", table, *recovery)
    steps(tmp_path / "run", 12)
    hosts.cut_off(second)
    assert [one["ranks"] for one in restarts(tmp_path / "run", 1, process)] == [2]
    before = len(losses(tmp_path / "run"))
    steps(tmp_path / "run", before + 5)
    hosts.bring_back(second)
    found = restarts(tmp_path / "run", 2, process)
    assert [one["ranks"] for one in found] == [2, 4] and second in found[1]["cause"]
    out, err = process.communicate(timeout=150)
    assert (process.returncode, err) == (0, "")
    assert f"growing: host {second} answers again" in out
    assert len(losses(tmp_path / "run")) == 600


def test_a_spare_host_takes_the_place_of_a_lost_one(hosts: Hosts, on_first: Start, tmp_path: Path) -> None:
    first, second, third = hosts.names
    table = (f"launch.hosts=[{first}:2,{second}:2]", f"launch.standby=[{third}:2]")
    process = on_first("train", *WORDS, "train.steps=60", *table, "launch.max_restarts=1")
    steps(tmp_path / "run", 12)
    hosts.cut_off(second)
    out, err = process.communicate(timeout=150)
    assert (process.returncode, err) == (0, "")
    assert f"With {first}, {third}, it goes on" in out
    assert json.loads((tmp_path / "run" / "restarts.jsonl").read_text(encoding="utf-8"))["ranks"] == 4
    assert len(losses(tmp_path / "run")) == 60
