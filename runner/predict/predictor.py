"""What every rank does for a prediction: build the evaluation programs, take the weights, run batch after batch."""

from __future__ import annotations

import random
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import torch

from runner.launch.orders import RankContext
from runner.planning.datasets import prediction_data
from runner.planning.prepare import Prepared
from runner.predict.files import Predictions
from runner.predict.weights import check, fill, open_checkpoint
from runner.training.agreement import agree
from runner.training.evaluate import evaluator
from runner.training.execution import execution, gather_axes

EVERY = 5.0
"""Seconds between lines of progress."""


def predict(rank: RankContext, prepared: Prepared, folder: Path) -> dict[str, Any]:
    """Predict every row; rank 0 writes. `folder` holds the initial weights.

    Returns rows, seconds (of the batches alone), the average scores (empty where the rows have no labels), and the
    step of the checkpoint, None for weights that come from elsewhere.
    """
    config = prepared.config
    random.seed(config.train.seed)
    numpy.random.seed(config.train.seed % 2**32)
    torch.manual_seed(config.train.seed)
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
    evaluating = evaluator(prepared, running, rank, rows, collate, running.tensors.__getitem__)
    totals: dict[str, float] = {}
    started = reported = time.perf_counter()
    done = 0
    file = Predictions(rank.run_dir, config.predict.format, len(rows)) if rank.rank == 0 else None
    with nullcontext() if file is None else file:
        for batch, output in evaluating.outputs():
            for name, value in evaluating.measured(batch, output).items():
                totals[name] = totals.get(name, 0.0) + value * len(batch)
            if file is not None:
                file.add(batch, output)
                done += len(batch)
                if time.perf_counter() - reported > EVERY:
                    reported = time.perf_counter()
                    print(f"{done} of {len(rows)} rows, {done / (reported - started):.0f} samples/s", flush=True)
    return {
        "rows": len(rows),
        "seconds": time.perf_counter() - started,
        "evaluation": {name: total / len(rows) for name, total in totals.items()},
        "step": step,
        "file": None if file is None else file.path.name,
    }
