"""Hydra's sweep plugins: jobs in other processes, started by joblib and submitit, and jobs chosen by Optuna."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
WORDS = ["-m", "+recipe=quickstart", "train.steps=2", "hydra.sweep.dir=mine", "parallel.plan_cache=null"]


def run(folder: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, str]]]:
    done = subprocess.run(
        [sys.executable, "-m", "runner", *WORDS, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=170,
    )
    with (folder / "mine" / "results.csv").open(newline="", encoding="utf-8") as file:
        return done, list(csv.DictReader(file))


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher",
    [
        ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
        ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=3"],
    ],
    ids=["joblib", "submitit"],
)
def test_jobs_of_a_launcher_end_as_those_of_this_process(tmp_path, launcher):
    rates = "optimizer.args.lr=0.1,1e30"
    done, rows = run(tmp_path, *launcher, rates)
    assert done.returncode == 1, done.stdout + done.stderr
    assert [row["status"] for row in rows] == ["done", "failed"]
    assert "The loss of step 2 is" in rows[1]["error"]
    assert "The loss of step 2 is" in (tmp_path / "mine" / "1" / "error.txt").read_text(encoding="utf-8")
    written = (tmp_path / "mine" / "0" / "metrics.jsonl").stat().st_mtime_ns

    again, rows = run(tmp_path, *launcher, rates)
    assert again.returncode == 1
    assert [row["status"] for row in rows] == ["done", "failed"]
    assert (tmp_path / "mine" / "0" / "metrics.jsonl").stat().st_mtime_ns == written


@pytest.mark.slow
def test_optuna_learns_from_losses_and_goes_on_after_a_failed_job(tmp_path):
    interval = "optimizer.args.lr=tag(log,interval(0.01,1e20))"
    optuna = ["hydra/sweeper=optuna", "hydra.sweeper.n_jobs=1", "hydra.sweeper.sampler.seed=1"]
    done, rows = run(tmp_path, *optuna, "hydra.sweeper.n_trials=3", interval)
    assert done.returncode == 1, done.stdout + done.stderr
    statuses = [row["status"] for row in rows]
    assert len(rows) == 3 and {*statuses} == {"done", "failed"}
    best = min((row for row in rows if row["loss"]), key=lambda row: float(row["loss"]))
    results = (tmp_path / "mine" / "optimization_results.yaml").read_text(encoding="utf-8")
    assert best["optimizer.args.lr"] in results
