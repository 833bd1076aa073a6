"""Training on a dataset that takes 20 ms a sample, against the same training on the same samples in memory.

    python -m benchmarks.data [--steps 60] [--rounds 4] [--workers 8] [--only auto]

Both are real runs of the command on one rank, at the same time, each with its workers on one processor, so that
what else the machine does slows both; they change places every round. They print the same losses. A ratio is that of
their median steps without the first ten, and the last lines are medians over the rounds. Goal: at most 1.02 with enough
workers, which are as many as read a micro-batch of a rank in the time of a step; beside it stand `data.workers=auto`
and none.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from torch import Tensor, nn

from runner.data.synthetic import Regression

WIDTH, LAYERS, ROWS = 2048, 6, 16
"""Of the network, and samples of a step on each rank."""
SECONDS = 0.02
WARM_UP = 10


def network() -> nn.Module:
    """x [rows, WIDTH] -> [rows, 1]."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


class Slow(Regression):
    """Samples x [WIDTH], y [1], each of which takes `seconds` to read."""

    def __init__(self, seconds: float) -> None:
        super().__init__(256, WIDTH, 1)
        self._seconds = seconds

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self._seconds)
        return super().__getitem__(index)


def start(seconds: float, workers: str, steps: int, processor: int, folder: Path) -> subprocess.Popen[bytes]:
    """A run on one processor."""
    words = [
        "parallel=data_parallel",
        "world_size=1",
        "model.target=benchmarks.data.network",
        "loss.target=torch.nn.MSELoss",
        "data.target=benchmarks.data.Slow",
        f"data.args.seconds={seconds}",
        f"data.batch_size={ROWS}",
        f"data.workers={workers}",
        "optimizer.args.lr=1e-4",
        f"train.steps={steps}",
        "checkpoint.at_end=false",
        f"hydra.run.dir={folder}",
    ]
    command = ["taskset", "-c", str(processor), sys.executable, "-m", "runner", *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def outcome(process: subprocess.Popen[bytes], folder: Path) -> tuple[float, list[float]]:
    """The median seconds of a step of a run, and its losses."""
    if process.wait():
        sys.exit(f"the run in {folder} failed")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    records = [record for record in records if "loss" in record]
    return statistics.median(one["seconds"] for one in records[WARM_UP:]), [one["loss"] for one in records]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("steps", 60), ("rounds", 4), ("workers", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    ways = [way for way in (str(options.workers), "auto", "0") if options.only in ("", way)]
    for way in ways:
        ratios = []
        for number in range(options.rounds):
            with tempfile.TemporaryDirectory() as place:
                sides = [(0.0, "0", Path(place, "memory")), (SECONDS, way, Path(place, "slow"))]
                started = [
                    start(seconds, workers, options.steps, (number + side) % 2, folder)
                    for side, (seconds, workers, folder) in enumerate(sides)
                ]
                found = [outcome(run, folder) for run, (*_, folder) in zip(started, sides, strict=True)]
            (memory, expected), (slow, losses) = found
            assert losses == expected, "the losses differ"
            ratios.append(slow / memory)
            print(f"{way} workers: {1000 * slow:.1f} ms a step, in memory {1000 * memory:.1f} ms", flush=True)
        print(f"{way} workers: {statistics.median(ratios):.3f} times the step with the data in memory", flush=True)


if __name__ == "__main__":
    main()
