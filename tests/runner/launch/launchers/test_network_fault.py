"""An injected fault takes the network of one host down, and the run goes on without it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import losses
from namespaces import Hosts

pytestmark = pytest.mark.slow


def test_the_network_of_a_host_fails(
    hosts: Hosts, on_first: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    second = hosts.names[1]
    fault = "{kind: network, rank: 2, step: 8, phase: forward, interface: eth0}"
    process = on_first(
        *("train", "+recipe=quickstart", "world_size=4", "parallel=data_parallel", "parallel.strategies=null"),
        *("train.steps=12", "checkpoint.every=3", "parallel.plan_cache=null", "hydra.run.dir=run"),
        *("launch=rank_table", f"launch.hosts=[{','.join(f'{name}:2' for name in hosts.names)}]", "launch.timeout=6"),
        *("launch.max_restarts=1", "launch.min_ranks=2", f"launch.faults=[{fault}]"),
    )
    out, err = process.communicate(timeout=150)
    assert (process.returncode, err) == (0, ""), err
    assert f"restart 1 of 1: host {second} (ranks 2, 3 of 4) no longer answers" in out
    assert "With 2 ranks, and a plan searched anew, it goes on from step-00000006" in out
    restart = json.loads((tmp_path / "run" / "restarts.jsonl").read_text(encoding="utf-8"))
    assert restart["ranks"] == 2 and len(losses(tmp_path / "run")) == 12
    assert [file.name for file in (tmp_path / "run" / "faults").iterdir()] == ["network-in-forward-of-8-on-2-0"]
