"""From a config to running ranks, with one import of torch on the whole machine.

Importing torch and its exporter costs more than everything else before the first step. So the fork server does it once;
a fork of it builds, captures and plans, the ranks are forks of it, and the parent, which talks to the user, never
imports torch
at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner import launch
from runner.checkpoint.lineage import Ancestry
from runner.config.schema import Config
from runner.launch.launchers.host_assignment import part_by_hand
from runner.launch.launchers.start import check, started


@dataclass(frozen=True)
class Ready:
    """What `entries.prepare_alone` found: the ranks to start, the pickled `Prepared` for them, the checkpoint to
    continue, and the run and step of it and of those that it continued."""

    world_size: int
    device: str
    prepared: bytes
    resume: str | None
    ancestry: Ancestry


def make_ready(config: Config, run_dir: Path, folder: Path) -> Ready:
    """Prepare in a process of the fork server; initial weights go to `folder`, plan.json to `run_dir`. The headline is
    printed.

    Raises ConfigError and StrategyError for anything wrong with model, loss, data, strategies or devices.
    """
    check(config.launch)
    payload = {"config": config.model_dump_json(), "folder": str(folder)}
    found = launch.run_ranks(
        "runner.launch.entries:prepare_alone",
        payload,
        world_size=1,
        run_dir=run_dir,
        device="cpu",
        timeout=config.launch.timeout,
        threads=config.launch.threads,
        name="the preparation",
    )
    return Ready(**found)


def start(entry: str, ready: Ready, config: Config, run_dir: Path, payload: dict[str, Any]) -> Any:
    """Run `entry` on all ranks with `payload` and the pickled preparation; returns what rank 0 returns, None where it
    was started by another command."""
    content = payload | {"prepared": ready.prepared, "resume": ready.resume}
    if config.launch.launcher != "local" and not config.launch.by_hand:
        return started(
            entry,
            content,
            config.launch,
            world_size=ready.world_size,
            run_dir=run_dir,
            device=ready.device,
            stoppable=config.job.name == "train",
        )
    return launch.run_ranks(
        entry,
        content,
        world_size=ready.world_size,
        run_dir=run_dir,
        device=ready.device,
        timeout=config.launch.timeout,
        threads=config.launch.threads,
        stoppable=config.job.name == "train",
        rescue=config.launch.rescue and config.job.name == "train",
        part=part_by_hand(config.launch),
    )
