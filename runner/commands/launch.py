"""`run launch`: train with a launcher; with `--dry-run` only print what would be started."""

from __future__ import annotations

from pathlib import Path

from runner.commands import train
from runner.config.schema import Config, Job


def run(config: Config, run_dir: Path) -> float | None:
    """Train as `run train` does, and with the same result; None after a dry run."""
    return train.run(config.model_copy(update={"job": Job(name="train")}), run_dir)
