"""The entry functions of ranks: preparation, training, prediction, and the search for a checkpoint.

Forks of the warm server call these by name (`runner.launch.launchers.start`, `runner.recovery.restarting`).
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner import checkpoint as checkpoints
from runner.checkpoint import rescue
from runner.config.schema import Config
from runner.errors import ConfigError
from runner.launch.orders import RankContext
from runner.planning import capacity
from runner.planning.joint import prepare_decided
from runner.planning.prepare import Prepared
from runner.predict import predictor
from runner.report import plan_files
from runner.report.text import headline
from runner.run_folder import lineage
from runner.server import roles
from runner.training import fault_injection as faults
from runner.training.agreement import require_shared
from runner.training.trainer import TrainingJob, train
from strategies.core.graph import OperatorGraph


def prepare_alone(rank: RankContext, payload: Mapping[str, str]) -> dict[str, Any]:
    """Prepare as a lone rank: writes plan.json, prints the headline, returns the content of `start.Ready`."""
    config = Config.model_validate_json(payload["config"])
    run, place = lineage.read(rank.run_dir), rank.run_dir / "checkpoints"
    if config.train.resume == "auto":
        rescue.collect(place, None if run is None else run.lineage)
    resume = checkpoints.to_continue(config.train.resume, place, run)
    opened = None if resume is None else checkpoints.read(resume)
    trained = None
    if config.job.name == "predict" and config.predict.checkpoint is not None:
        trained = predictor.open_checkpoint(config.predict.checkpoint, config.predict.average)
        checkpoints.verify(trained.path)

    def accept(graph: OperatorGraph, published: frozenset[str]) -> None:
        if opened is not None:
            checkpoints.check_model(opened, graph.sources, published)
        if trained is not None:
            predictor.check(trained, graph.sources)

    resumed = {} if opened is None else checkpoints.weights_in(opened)
    prepared = prepare_decided(config, Path(payload["folder"]), accept=accept, resumed=resumed)
    if config.job.name == "train":
        faults.check(config, prepared.world_size, prepared.steps)
    ancestry: lineage.Ancestry = ()
    if resume is not None and opened is not None:
        continuation = checkpoints.check(resume, **prepared.identity())
        done, ancestry = opened.step, ((opened.header.run, opened.step), *opened.header.history)
        nothing_left = done >= prepared.steps and (not continuation.data or config.train.epochs is None)
        # repeating a finished command is harmless: it may have been killed after its last save
        if nothing_left and (config.train.resume != "auto" or done > prepared.steps):
            raise ConfigError(
                "MW608",
                f"train.resume: {resume} has {done} steps done, and train.steps (or epochs) asks for {prepared.steps}; "
                "ask for more.",
            )
    capacity.check_plan(prepared, plan_files.write_plan(prepared, rank.run_dir))
    print(headline(prepared, rank.run_dir), flush=True)
    if config.train.resume is not None:
        text = f"continuing from {resume}" if resume else "no checkpoint yet, so this run starts from the beginning"
        print(f"resume: {text}", flush=True)
    pipeline = prepared.config.parallel.pipeline
    return {
        "world_size": prepared.world_size,
        "device": prepared.device,
        "prepared": pickle.dumps(prepared),
        "resume": None if resume is None else str(resume.absolute()),
        "ancestry": ancestry,
        "pipeline": (pipeline.known or 1, pipeline.parts),
    }


def train_prepared(rank: RankContext, payload: Mapping[str, Any]) -> dict[str, Any] | None:
    """Train on one rank from a pickled preparation."""
    resume = payload["resume"]
    prepared: Prepared = pickle.loads(payload["prepared"])
    if prepared.config.launch.by_hand:
        require_shared(prepared.config, rank.run_dir)
    job = TrainingJob(
        prepared,
        Path(payload["folder"]),
        None if resume is None else Path(resume),
        marks=payload["marks"],
        offload=payload["offload"],
        attempt=payload["attempt"],
    )
    if prepared.config.parallel.elastic:
        return roles.train(rank, job)
    return train(rank, job)


def predict_prepared(rank: RankContext, payload: Mapping[str, Any]) -> dict[str, Any]:
    """Predict on one rank from a pickled preparation."""
    return predictor.predict(rank, pickle.loads(payload["prepared"]), Path(payload["folder"]))


def find_again(rank: RankContext, payload: None) -> dict[str, Any]:
    """Find the checkpoint that the next attempt of a run continues, if there is one; on a lone rank, between two
    attempts."""
    run, place = lineage.read(rank.run_dir), rank.run_dir / "checkpoints"
    rescue.collect(place, None if run is None else run.lineage)
    try:
        found = checkpoints.to_continue("auto", place, run)
    except ConfigError:  # all are damaged, which is reported; the run starts from scratch
        found = None
    return {"resume": None if found is None else str(found.absolute())}
