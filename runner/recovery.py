"""A run that fails is started again from its newest checkpoint, in the same folder, as often as it may be.

The survivors of a failure are stopped first, by `launch.run_ranks`; then every rank starts anew, so nothing of the
failed attempt but its files is used. Invariant: what is trained after a restart is, bit for bit, what an undisturbed
run trains. Does not import torch.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner import launch
from runner.errors import ConfigError, RunFailed
from runner.schema import Config
from runner.start import Ready, start
from strategies.errors import StrategyError

RESTARTS = "restarts.jsonl"
"""In the run folder: a line for every restart, with the checkpoint that it continues."""


def train(ready: Ready, config: Config, run_dir: Path, payload: dict[str, Any]) -> Any:
    """Train on all ranks, `1 + launch.max_restarts` times at most; returns what rank 0 returns.

    Raises RunFailed as the last attempt did; wrong input (ConfigError, StrategyError) is not tried again.
    """
    most, count = config.launch.max_restarts, 0
    while True:
        try:
            return start("runner.entries:train_prepared", ready, config, run_dir, payload)
        except (ConfigError, StrategyError) as refused:
            if not count:
                raise
            raise RunFailed(f"Restart {count} of {most} failed: {refused}") from refused
        except RunFailed as failed:
            if count == most:
                if not count:
                    raise
                told = f"restart {count} of {most}"
                raise RunFailed(f"{failed}\nThe run was given up after {told} (launch.max_restarts).") from failed
            count, began = count + 1, time.monotonic()
            ready = replace(ready, resume=_newest(config, run_dir))
            payload = payload | {"marks": ()}  # how long it took to the first step is told once
            cause = str(failed).partition("\n")[0].rstrip(".")
            _note(run_dir, {"restart": count, "cause": cause, "resume": ready.resume, "time": time.time()})
            print(f"restart {count} of {most}: {cause}. {_going_on(ready, time.monotonic() - began)}", flush=True)


def _note(run_dir: Path, restart: dict[str, Any]) -> None:
    with (run_dir / RESTARTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(restart) + "\n")


def _newest(config: Config, run_dir: Path) -> str | None:
    """The newest checkpoint of the run that passes its checks."""
    found: dict[str, str | None] = launch.run_ranks(
        "runner.entries:find_again",
        None,
        world_size=1,
        run_dir=run_dir,
        device="cpu",
        timeout=config.launch.timeout,
        threads=config.launch.threads,
    )
    return found["resume"]


def _going_on(ready: Ready, seconds: float) -> str:
    if ready.resume is None:
        return "There is no checkpoint yet, so it starts from the beginning."
    return f"It goes on from {Path(ready.resume).name}, found in {seconds:.1f} s."
