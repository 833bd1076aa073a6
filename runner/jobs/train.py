"""`run train`: prepare once in the parent, start the ranks, train."""

from __future__ import annotations

import tempfile
from pathlib import Path

from runner import launch
from runner.schema import Config
from runner.timeline import begin, marked


def run(config: Config, run_dir: Path) -> float | None:
    """Train. Returns the last loss. Raises ConfigError, StrategyError (wrong input) and RunFailed (a rank failed)."""
    marks = marked(begin(), "config")
    launch.warm()  # the ranks' server imports torch while this process does
    from runner import report
    from runner.prepare import prepare
    from runner.trainer import Job

    marks = marked(marks, "imports")
    with tempfile.TemporaryDirectory(prefix=".start-", dir=run_dir) as folder:
        prepared = prepare(config, Path(folder))
        report.write_plan(prepared, run_dir)
        print(report.headline(prepared, run_dir), flush=True)
        resume = _resume(config, run_dir)
        result = launch.run_ranks(
            "runner.trainer:train",
            Job(prepared, Path(folder).absolute(), resume, marks=marked(marks, "capture and plan")),
            world_size=prepared.world_size,
            run_dir=run_dir,
            device=prepared.device,
            timeout=config.launch.timeout,
            threads=config.launch.threads,
        )
    print(report.ending(result, run_dir), flush=True)
    loss: float = result["loss"]
    return loss


def _resume(config: Config, run_dir: Path) -> Path | None:
    """The checkpoint to continue from. Raises ConfigError where train.resume names none."""
    from runner import checkpoint

    folder = run_dir / "checkpoints"
    checkpoint.clean(folder)
    if config.train.resume is None:
        return None
    found = checkpoint.newest(folder) if config.train.resume == "auto" else checkpoint.locate(Path(config.train.resume))
    if found is None:
        print(f"resume: no checkpoint in {folder} yet, so this run starts from the beginning", flush=True)
        return None
    print(f"resume: continuing from {found}", flush=True)
    return found.absolute()
