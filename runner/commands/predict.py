"""`run predict`: trained weights from any checkpoint, rows in, predictions out, in any plan."""

from __future__ import annotations

import json
from pathlib import Path

from runner import launch
from runner.cli.run_folders import START, without_trace
from runner.config.parallel import Parallel
from runner.config.schema import Config
from runner.launch.launchers.start import make_ready, start
from runner.launch.temporary_folder import own_folder
from runner.report.units import shown_path

SUMMARY = "predict.json"
TRAINING_ONLY = ("zero", "offload", "recompute", "memory_limit")
"""Keys of `parallel`."""


def run(config: Config, run_dir: Path) -> float | None:
    """Predict; write predictions and predict.json. Returns the loss where the rows have labels.

    Raises ConfigError, StrategyError (wrong input) and RunFailed (a rank failed).
    """
    launch.warm()
    config = without_training(config)
    with without_trace(config, run_dir), own_folder(run_dir, START) as folder:
        ready = make_ready(config, run_dir, folder)
        found = start("runner.commands.entries:predict_prepared", ready, config, run_dir, {"folder": str(folder)})
    rate = found["rows"] / found["seconds"]
    (run_dir / SUMMARY).write_text(json.dumps(found | {"samples_per_second": rate}, indent=2) + "\n", encoding="utf-8")
    scores = [f"{name} {value:.6g}" for name, value in found["evaluation"].items()]
    weights = "the weights of model.weights" if found["step"] is None else f"the weights of step {found['step']}"
    print(
        f"predicted: {found['rows']} rows with {weights}, {rate:.0f} samples/s"
        f"{''.join(f', {one}' for one in scores)}; {shown_path(run_dir / found['file'])}",
        flush=True,
    )
    loss: float | None = found["evaluation"].get("loss")
    return loss


def without_training(config: Config) -> Config:
    """`config` for prediction: there are no gradients and no optimizer, so ZeRO, offload, recompute and the memory
    limit of training have their defaults. The slices of the weights are those of the plan. Where servers train, every
    worker predicts a slice of the rows, as a rank of data parallelism."""
    defaults, server = Parallel(), config.parallel.server
    if config.parallel.elastic:
        workers = server.workers if config.world_size is None else server.working(config.world_size)
        config = config.model_copy(update={"parallel": Parallel(mode="data_parallel"), "world_size": workers})
    if config.parallel.mode == "data_parallel" and config.world_size and config.parallel.pipeline.known is None:
        multiple = config.world_size * config.parts  # of rows, which are traced and not trained
        size = max(config.data.batch_size // multiple, 1) * multiple
        config = config.model_copy(update={"data": config.data.model_copy(update={"batch_size": size})})
    parallel = config.parallel.model_copy(update={name: getattr(defaults, name) for name in TRAINING_ONLY})
    train = config.train.model_copy(update={"resume": None, "compile": False, "measure_memory": False})
    return config.model_copy(update={"parallel": parallel, "train": train})
