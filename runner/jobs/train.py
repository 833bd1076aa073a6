"""`run train`: prepare once in the parent, start the ranks, train."""

from __future__ import annotations

import tempfile
from pathlib import Path

from runner import launch
from runner.schema import Config


def run(config: Config, run_dir: Path) -> float | None:
    """Train. Returns the last loss. Raises ConfigError, StrategyError (wrong input) and RunFailed (a rank failed)."""
    launch.warm()  # the ranks' server imports torch while this process does
    from runner import checkpoint, report
    from runner.prepare import prepare
    from runner.trainer import Job

    with tempfile.TemporaryDirectory(prefix=".start-", dir=run_dir) as folder:
        prepared = prepare(config, Path(folder))
        report.write_plan(prepared, run_dir)
        print(report.headline(prepared, run_dir), flush=True)
        resume = checkpoint.find(config.train.resume, run_dir)
        result = launch.run_ranks(
            "runner.trainer:train",
            Job(prepared, Path(folder).absolute(), resume),
            world_size=prepared.world_size,
            run_dir=run_dir,
            device=prepared.device,
            timeout=config.launch.timeout,
            threads=config.launch.threads,
        )
    print(report.ending(result, run_dir), flush=True)
    loss: float = result["loss"]
    return loss
