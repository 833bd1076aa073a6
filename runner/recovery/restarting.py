"""A run that fails, in its preparation or in training, is restarted from its newest checkpoint in the same folder, up
to the configured number of times.

First `runner.launch` stops the surviving ranks; then every rank starts anew, so only the files of the failed attempt
are used. Invariant: after a restart training is bitwise identical to an undisturbed run, as long as all ranks are
available. Does not import torch.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.config.schema import Config
from runner.errors import ConfigError, RunFailed
from runner.launch.launchers.start import Ready, make_ready, run_alone, start
from runner.launch.startup import marked
from runner.recovery.shrinking import smaller
from runner.run_folder import lineage
from strategies.core.errors import StrategyError

RESTARTS = "restarts.jsonl"
"""In the run folder: a line for every restart, with the checkpoint that it continues."""


def train(config: Config, run_dir: Path, payload: dict[str, Any]) -> Any:
    """Prepare, and train on all ranks, `1 + launch.max_restarts` times at most; returns what rank 0 returns. `payload`
    has the "folder" of the preparation and the "marks" of the time until now.

    A host that no longer answers, and a rank that has failed twice without a save in between, are permanently down: if
    `launch.min_ranks` allows it, the run goes on without them. Raises RunFailed as the last attempt did; wrong input
    (ConfigError, StrategyError) is not tried again.
    """
    most, count, before = config.launch.max_restarts, 0, None
    folder, marks = Path(payload["folder"]), payload["marks"]
    ready: Ready | None = None
    given: str | None = None
    failed: RunFailed | None = None
    while True:
        try:
            if ready is None:
                ready = make_ready(config, run_dir, folder)
                given = ready.resume
                lineage.begin(config, run_dir, ready.resume, ready.ancestry)
                payload = payload | {"marks": () if count else marked(marks, "imports, capture and plan")}
            elif failed is not None:
                began, newest, fewer = time.monotonic(), _newest(config, run_dir) or given, False
                gone = failed.hosts or (failed.rank is not None and before == (failed.rank, newest))
                before = (failed.rank, newest)
                if gone and config.launch.min_ranks is not None:
                    try:
                        config, ready = smaller(config, _left(ready, config, failed), failed.hosts, run_dir, folder)
                        fewer = True
                    except ConfigError as refused:
                        print(f"no smaller run can be prepared, so all ranks are tried again. {refused}", flush=True)
                ready = replace(ready, resume=newest)
                payload = payload | {"marks": ()}  # the time to the first step is reported once
                how = _going_on(ready, fewer, time.monotonic() - began)
                _report(run_dir, count, most, failed, newest, ready.world_size, how)
            return start("runner.commands.entries:train_prepared", ready, config, run_dir, payload)
        except (ConfigError, StrategyError) as refused:
            if not count or ready is None:
                raise
            raise RunFailed("MW718", f"Restart {count} of {most} failed: {refused}") from refused
        except RunFailed as caught:
            if count == most:
                if not count:
                    raise
                which = f"restart {count} of {most}"
                raise RunFailed(
                    caught.code, f"{caught}\nThe run was given up after {which} (launch.max_restarts)."
                ) from caught
            failed, count = caught, count + 1
            if ready is None:
                _report(run_dir, count, most, failed, None, config.world_size, "It is prepared again.")


def _left(ready: Ready, config: Config, failed: RunFailed) -> int:
    """The number of ranks that are not down."""
    lost = sum(len(host.ranks) for host in config.launch.hosts if host.name in failed.hosts)
    return ready.world_size - max(lost, 1)


def _report(
    run_dir: Path, count: int, most: int, failed: RunFailed, resume: str | None, ranks: int | None, how: str
) -> None:
    """Record and print a restart."""
    cause = str(failed).partition("\n")[0].rstrip(".")
    restart = {"restart": count, "cause": cause, "resume": resume, "ranks": ranks}
    try:
        with (run_dir / RESTARTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(restart) + "\n")
    except OSError as error:  # the disk may be full: that is why it is started again
        print(f"{RESTARTS} cannot be written: {error.strerror}", flush=True)
    print(f"restart {count} of {most}: {cause}. {how}", flush=True)


def _newest(config: Config, run_dir: Path) -> str | None:
    """The newest checkpoint of the run that passes its checks."""
    newest: str | None = run_alone("find_again", None, config, run_dir, "the search for a checkpoint")["resume"]
    return newest


def _going_on(ready: Ready, fewer: bool, seconds: float) -> str:
    ranks = f"{ready.world_size} rank{'s' if ready.world_size > 1 else ''}"
    who = f"With {ranks}, and a plan searched anew, it" if fewer else "It"
    if ready.resume is None:
        return f"There is no checkpoint yet. {who} starts from the beginning."
    return f"{who} goes on from {Path(ready.resume).name}, found in {seconds:.1f} s."
