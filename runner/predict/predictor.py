"""What every rank does for a prediction: build the evaluation programs, take the weights, run batch after batch."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from runner import home
from runner.build.pretrained import listed
from runner.checkpoint import Checkpoint, locate, read
from runner.data.row_seeds import seed_generators
from runner.errors import ConfigError
from runner.launch.orders import RankContext
from runner.planning.datasets import prediction_data
from runner.planning.prepare import Prepared
from runner.predict.files import Predictions
from runner.training.agreement import agree
from runner.training.evaluate import Evaluator
from runner.training.execution import Execution, execution, gather_axes
from strategies.capture import check_decided
from strategies.core.graph import Source
from strategies.runtime.shards import Shard, of_slice

KEY = "predict.checkpoint"
KINDS = ("parameter", "buffer")
EVERY = 5.0
"""Seconds between lines of progress."""


def open_checkpoint(path: str, average: str | None) -> Checkpoint:
    """The checkpoint that `predict.checkpoint` means, with the weights that `predict.average` names. Raises ConfigError
    if there is none."""
    place = home.expanded(path)
    if place.is_file():
        raise ConfigError(
            "MW613",
            f"{KEY} = {path!r} is a file, not a checkpoint, which is a folder; weights in a file are read with "
            f"model.weights={path} and {KEY}=null.",
        )
    found = read(locate(place, KEY))
    return found if average is None else found.averaged(average)


def check(checkpoint: Checkpoint, sources: Iterable[Source]) -> None:
    """Raise ConfigError unless `checkpoint` holds the parameters and buffers of this model, in their shapes."""
    expected = {one.name: one.spec.shape for one in sources if one.kind in KINDS and 0 not in one.spec.shape}
    stored = {name: checkpoint.tensors[f"model/{name}"].shape for name in checkpoint.names}
    fault = None
    if missing := [name for name in expected if name not in stored]:
        fault = f"does not have {listed(missing)}, which the model needs"
    elif unexpected := [name for name in stored if name not in expected]:
        fault = f"has {listed(unexpected)}, which the model does not know"
    if fault is not None:
        raise ConfigError("MW613", f"{KEY}: {checkpoint.path} {fault}.")
    for name, shape in expected.items():
        if tuple(shape) != stored[name]:
            raise ConfigError(
                "MW613",
                f"{KEY}: {name} has shape {list(stored[name])} in {checkpoint.path}, but the model has {list(shape)}; "
                "model.args or model.config describe another model.",
            )


def fill(checkpoint: Checkpoint, execution: Execution) -> None:
    """Load the stored values into this rank's shards. Calls no collective. Raises ConfigError as `check`."""
    programs = [execution.program, *(program for _, program in execution.evaluations.values())]
    if (runner := execution.runner) is not None:
        programs += [unit.program for units in runner.evaluations.values() for unit in units]
    expected: dict[str, list[Shard]] = {}
    for program in programs:
        for source in program.sources:
            key, shape = f"model/{source.name}", source.spec.shape
            if source.kind in KINDS and key in checkpoint.tensors:
                blocks = program.layouts[source.id].blocks(shape, program.mesh, execution.communicator.rank)
                expected[key] = of_slice(shape, blocks, execution.tensors[source.name])
    checkpoint.fill(expected)


def predict(rank: RankContext, prepared: Prepared, folder: Path) -> dict[str, Any]:
    """Predict every row; rank 0 writes. `folder` holds the initial weights.

    Returns rows, seconds (of the batches alone), the average scores (empty where the rows have no labels), and the
    step of the checkpoint, None for weights that come from elsewhere.
    """
    config = prepared.config
    torch.set_default_dtype(prepared.default_dtype)
    seed_generators(config.train.seed)
    rows, collate = prediction_data(config)
    agree({"the number of rows to predict": str(len(rows))}, "Every rank must read the same data.")
    running = execution(prepared, rank, folder, gather_axes)
    step = None
    if config.predict.checkpoint is not None:
        checkpoint = open_checkpoint(config.predict.checkpoint, config.predict.average)
        if not prepared.stages:
            check(checkpoint, running.program.sources)
        for decided in (one.decided for one in prepared.evaluations.values()):
            stored = {name: checkpoint.read(f"model/{name}") for name in decided if name in checkpoint.names}
            check_decided(decided, stored, f"{KEY} = {config.predict.checkpoint!r}")
        fill(checkpoint, running)
        step = checkpoint.step
    again = partial(prediction_data, config, len(rows))
    evaluator = Evaluator(prepared, running, rank, rows, collate, running.tensors.__getitem__, lambda: again()[0])
    started = reported = time.perf_counter()
    done = 0
    file = None
    if rank.rank == 0:
        file = Predictions(rank.run_dir, config.predict.format, len(rows), prepared.row_names)

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
