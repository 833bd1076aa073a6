"""Parameter servers on several hosts: one that is cut off is missed by nobody, and joins when it returns.

Hosts are network namespaces (see `namespaces`).
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import ROOT, losses
from namespaces import Hosts

pytestmark = pytest.mark.slow
Start = Callable[..., subprocess.Popen[str]]
WORDS = (
    *("+recipe=parameter_server", "world_size=5", "parallel.server.servers=2", "parallel.server.workers=2"),
    *("parallel.server.replicas=1", "train.log_every=1", "evaluate.metric=null", "evaluate.args={}"),
    *("parallel.plan_cache=null", "hydra.run.dir=run", "launch=rank_table", "launch.timeout=6"),
)


def counts(folder: Path) -> Counter[str]:
    """How often servers and workers were lost and have joined."""
    found: Counter[str] = Counter()
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        server = json.loads(line).get("server", {})
        found.update({key: server[key] for key in server if key.endswith(("_lost", "_joined"))})
    return found


def wait(process: subprocess.Popen[str], done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 150
    while not done():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.2)


def test_a_host_that_is_cut_off_is_missed_by_nobody(hosts: Hosts, on_first: Start, tmp_path: Path) -> None:
    first, second = hosts.names
    run, table = tmp_path / "run", f"launch.hosts=[{first}:3,{second}:2]"
    process = on_first("train", *WORDS, "train.steps=100000", table)
    wait(process, lambda: (run / "metrics.jsonl").exists() and len(losses(run)) >= 12)
    hosts.cut_off(second)
    wait(process, lambda: counts(run)["workers_lost"] == 1 and counts(run)["servers_lost"] == 1)
    before = len(losses(run))
    wait(process, lambda: len(losses(run)) >= before + 5)  # without the host
    hosts.bring_back(second)
    wait(process, lambda: counts(run)["workers_joined"] == 3 and counts(run)["servers_joined"] == 3)
    before = len(losses(run))
    wait(process, lambda: len(losses(run)) >= before + 5)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143 and "which is saved" in err
    assert not (run / "restarts.jsonl").exists()


def test_a_host_that_is_started_by_hand_joins(hosts: Hosts, on_first: Start, tmp_path: Path) -> None:
    first, second = hosts.names
    run, table = tmp_path / "run", f"launch.hosts=[{first}:3,{second}:2]"
    servers = ("parallel.server.servers=1", "parallel.server.workers=3", "parallel.server.replicas=0")
    process = on_first("train", *WORDS, *servers, "data.batch_size=48", "train.steps=100000", table, "launch.remote=[]")
    assert process.stdout is not None
    command = next(line for line in process.stdout if line.startswith(f"start on {second}: "))
    wait(process, lambda: (run / "metrics.jsonl").exists() and len(losses(run)) >= 5)  # with one worker of three
    words = ["sh", "-c", command.partition(": ")[2]]
    by_hand = subprocess.Popen(hosts.inside(second, words), env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        wait(process, lambda: counts(run)["workers_joined"] == 3)
        process.terminate()
        _, err = process.communicate(timeout=60)
        assert process.returncode == 143 and "which is saved" in err
        assert by_hand.wait(30) == 0
    finally:
        by_hand.kill()
