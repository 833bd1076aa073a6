"""The run that tests every launcher, and the losses that it records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[4]
RECIPE = (
    "+recipe=quickstart",
    "world_size=4",
    "parallel.strategies={matmul:[[2,2],[2,1]]}",
    "parallel.plan_cache=null",
    "train.log_every=1",
    "checkpoint.at_end=false",
    "hydra.run.dir=run",
)
STEPS = 4


def losses(run_dir: Path) -> list[float]:
    """The loss of every step, to the last bit."""
    records: list[dict[str, Any]] = [
        json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return [record["loss"] for record in records if "loss" in record]
