"""What every rank does for a prediction: build the evaluation programs, take the weights, run batch after batch."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from runner.data.row_seeds import seed_generators
from runner.launch.orders import RankContext
from runner.planning.datasets import prediction_data
from runner.planning.prepare import Prepared
from runner.predict.files import Predictions
from runner.predict.weights import check, fill, open_checkpoint
from runner.training.agreement import agree
from runner.training.evaluate import Evaluator
from runner.training.execution import execution, gather_axes

EVERY = 5.0
"""Seconds between lines of progress."""


def predict(rank: RankContext, prepared: Prepared, folder: Path) -> dict[str, Any]:
    """Predict every row; rank 0 writes. `folder` holds the initial weights.

    Returns rows, seconds (of the batches alone), the average scores (empty where the rows have no labels), and the
    step of the checkpoint, None for weights that come from elsewhere.
    """
    config = prepared.config
    seed_generators(config.train.seed)
    rows, collate = prediction_data(config)
    agree({"the number of rows to predict": str(len(rows))}, "Every rank must read the same data.")
    running = execution(prepared, rank, folder, gather_axes)
    step = None
    if config.predict.checkpoint is not None:
        checkpoint = open_checkpoint(config.predict.checkpoint)
        if not prepared.stages:
            check(checkpoint, running.program.sources)
        fill(checkpoint, running)
        step = checkpoint.step
    evaluator = Evaluator(prepared, running, rank, rows, collate, running.tensors.__getitem__)
    started = reported = time.perf_counter()
    done = 0
    file = Predictions(rank.run_dir, config.predict.format, len(rows)) if rank.rank == 0 else None

    def write(batch: list[int], output: Any) -> None:
        nonlocal reported, done
        if file is not None:
            file.add(batch, output)
            done += len(batch)
            if time.perf_counter() - reported > EVERY:
                reported = time.perf_counter()
                print(f"{done} of {len(rows)} rows, {done / (reported - started):.0f} samples/s", flush=True)

    with nullcontext() if file is None else file:
        evaluation = evaluator.run(write)
    return {
        "rows": len(rows),
        "seconds": time.perf_counter() - started,
        "evaluation": evaluation,
        "step": step,
        "file": None if file is None else file.path.name,
    }
