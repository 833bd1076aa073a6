"""Loggers of a run beside `metrics.jsonl` (`report.loggers`): CSV, TensorBoard, Weights & Biases, MLflow.

Rank 0 owns them. Each receives the config and what the plan predicts when training begins, then every number with its
step, as `train/NAME` and `evaluation/NAME`. Nothing leaves the machine by default: W&B writes its offline folder and
MLflow its file store, both into the run folder; WANDB_MODE and MLFLOW_TRACKING_URI say otherwise. Invariant: a run that
is resumed goes on in the same run of each service, whose id the run folder keeps.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from runner.config.schema import Config
from runner.errors import ConfigError
from runner.run_folder.lineage import LOGGED

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow-skinny"}
"""Modules that a logger imports, with the packages to install."""
PROJECT = "meshwright"
BATCH = 100
"""Parameters that MLflow takes in one call."""


def require_loggers(config: Config) -> None:
    """Raise ConfigError unless the package of every logger is installed. Imports none of them."""
    for name in config.report.every_logger:
        if name in PACKAGES and importlib.util.find_spec(name) is None:
            key = "report.tensorboard = true" if config.report.tensorboard and name == "tensorboard" else None
            raise ConfigError(
                "MW802",
                f"{key or f'report.loggers has {name}, which'} needs the package {PACKAGES[name]}, which is not "
                f"installed. Install it (pip install {PACKAGES[name]}) or "
                + ("set report.tensorboard=false." if key else f"leave {name} out."),
            )


class Logger(Protocol):
    """What receives the numbers of a run. Every call may raise what the service raises."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record numbers by name; steps do not decrease."""

    def close(self, failed: bool) -> None:
        """End the record; `failed` if the run did."""


def loggers_of(config: Config, run_dir: Path, first: int) -> dict[str, Logger]:
    """The loggers of a run whose next step is `first`.

    Raises:
        ConfigError: one of them cannot begin.
    """
    require_loggers(config)
    facts = _facts(config, run_dir)
    made: dict[str, Logger] = {}
    for name in config.report.every_logger:
        with _named(name, "begin"):
            made[name] = LOGGERS[name](run_dir, first, facts)
    return made


@contextmanager
def _named(name: str, what: str) -> Iterator[None]:
    """Turn what a service raises into one paragraph that names the logger."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            "MW808", f"report.loggers: {name} cannot {what}: {reason}. Mend that, or leave {name} out."
        ) from error


def close(loggers: Mapping[str, Logger], failed: bool) -> None:
    """End all records. Raises ConfigError where one cannot be ended."""
    for name, logger in loggers.items():
        with _named(name, "end"):
            logger.close(failed)


def log(loggers: Mapping[str, Logger], step: int, section: str, values: Mapping[str, float]) -> None:
    """Pass numbers to all loggers. Raises ConfigError where one cannot record them."""
    named = {f"{section}/{key}": float(value) for key, value in values.items()}
    for name, logger in loggers.items():
        with _named(name, f"record step {step}"):
            logger.log(step, named)


def _facts(config: Config, run_dir: Path) -> dict[str, Any]:
    """The config and, where there is a plan, the predicted seconds of a step and bytes of a rank, by dotted name."""
    found = {name: value for name, value in _flat(config.model_dump(mode="json")) if value is not None}
    file = run_dir / "plan.json"
    if file.is_file():
        plan = json.loads(file.read_text(encoding="utf-8"))
        found |= {"predicted.step_seconds": plan["cost"]["total"], "predicted.memory_bytes": plan["memory"]["peak"]}
    return found


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def _kept_id(run_dir: Path, service: str, make: Callable[[], str]) -> tuple[str, bool]:
    """The id of the run at a service, made if the run folder has none; whether it had one."""
    path = run_dir / LOGGED[1]
    ids: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    known = service in ids
    if not known:
        ids[service] = make()
        path.write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")
    return ids[service], known


class Csv:
    """`metrics.csv`: a line per record. A new name is a new column, for which the file is written anew."""

    def __init__(self, run_dir: Path, first: int, facts: Mapping[str, Any]) -> None:
        self.path = run_dir / LOGGED[0]
        rows: list[dict[str, Any]] = []
        if self.path.is_file():
            with self.path.open(encoding="utf-8", newline="") as file:
                rows = [
                    row for row in csv.DictReader(file) if (row["step"] or "").isdigit() and int(row["step"]) < first
                ]
        self.columns = list(rows[0]) if rows else ["step"]
        self._rewrite(rows)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        new = [name for name in values if name not in self.columns]
        if new:
            self.file.close()
            with self.path.open(encoding="utf-8", newline="") as file:
                rows: list[dict[str, Any]] = list(csv.DictReader(file))
            self.columns += new
            self._rewrite(rows)
        self.writer.writerow({"step": step, **values})
        self.file.flush()

    def close(self, failed: bool) -> None:
        self.file.close()

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        hidden = self.path.with_name(f".{self.path.name}")
        self.file = hidden.open("w", encoding="utf-8", newline="")
        self.writer = csv.DictWriter(self.file, self.columns)
        self.writer.writeheader()
        self.writer.writerows(rows)
        self.file.flush()
        os.replace(hidden, self.path)


class TensorBoard:
    """Writes event files in `tensorboard/`."""

    def __init__(self, run_dir: Path, first: int, facts: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first)
        table = "".join(f"| {name} | {value} |\n" for name, value in facts.items())
        self.writer.add_text("config", f"| key | value |\n|---|---|\n{table}")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        self.writer.close()


class WandB:
    """A run of Weights & Biases in `wandb/`, offline unless WANDB_MODE says otherwise; `wandb sync` uploads it."""

    def __init__(self, run_dir: Path, first: int, facts: Mapping[str, Any]) -> None:
        import wandb

        os.environ.setdefault("WANDB_MODE", "offline")
        id, known = _kept_id(run_dir, "wandb", lambda: uuid.uuid4().hex[:8])
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            dir=run_dir,
            id=id,
            resume="allow" if known else None,
            config=dict(facts),
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


class MLflow:
    """A run of MLflow in the file store `mlruns/`, or where MLFLOW_TRACKING_URI is."""

    def __init__(self, run_dir: Path, first: int, facts: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        where = os.environ.get("MLFLOW_TRACKING_URI") or (run_dir / "mlruns").absolute().as_uri()
        self.client = MlflowClient(tracking_uri=where)
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)

        def begin() -> str:
            found = self.client.get_experiment_by_name(project)
            experiment = self.client.create_experiment(project) if found is None else found.experiment_id
            made: str = self.client.create_run(experiment, run_name=run_dir.name).info.run_id
            return made

        self.id, known = _kept_id(run_dir, "mlflow", begin)
        if known:
            self.client.update_run(self.id, "RUNNING")
            return
        parameters = [Param(name, str(value)[:500]) for name, value in facts.items()]
        for place in range(0, len(parameters), BATCH):
            self.client.log_batch(self.id, params=parameters[place : place + BATCH])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self.client.log_batch(self.id, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    def close(self, failed: bool) -> None:
        self.client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


LOGGERS: dict[str, Any] = {"csv": Csv, "tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
"""By their names in `report.loggers`."""
