"""Every logger records the numbers of a run, read back with the service's own library; a resumed run goes on in it."""

import csv
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from small import MODES, SMALL

from runner.errors import ConfigError
from runner.training import loggers
from runner.training.loggers import LOGGERS, Logger, close, log
from runner.training.metrics import Metrics

FACTS = {"world_size": 4, "model.target": "models.ffn.FFN", "predicted.step_seconds": 0.25}


@pytest.fixture(autouse=True)
def of_the_run_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The services' own variables do not lead elsewhere, and what a logger sets is forgotten."""
    wandb, mlflow = ("MODE", "PROJECT"), ("TRACKING_URI", "EXPERIMENT_NAME", "ALLOW_FILE_STORE")
    for name in (*(f"WANDB_{one}" for one in wandb), *(f"MLFLOW_{one}" for one in mlflow)):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def run(name: str, folder: Path, first: int, last: int) -> None:
    made: dict[str, Logger] = {name: LOGGERS[name](folder, first, FACTS)}
    for step in range(first, last + 1):
        log(made, step, "train", {"loss": 1 / step, "lr": 0.5})
    log(made, last, "evaluation", {"accuracy": last / 10})
    close(made, failed=False)


def test_csv(tmp_path: Path) -> None:
    run("csv", tmp_path, 1, 3)
    run("csv", tmp_path, 3, 4)  # resumed after step 2
    with (tmp_path / "metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "4"]
    assert [float(row["train/loss"]) for row in rows if row["train/loss"]] == [1, 1 / 2, 1 / 3, 1 / 4]
    assert [row["evaluation/accuracy"] for row in rows] == ["", "", "", "", "0.4"]


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run("tensorboard", tmp_path, 1, 3)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(one.step, one.value) for one in events.Scalars("train/loss")] == [
        (1, 1),
        (2, 0.5),
        (3, pytest.approx(1 / 3)),
    ]
    assert [one.value for one in events.Scalars("evaluation/accuracy")] == [pytest.approx(0.3)]
    assert events.Tags()["tensors"] == ["config/text_summary"]


@pytest.mark.slow
def test_mlflow(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    run("mlflow", tmp_path, 1, 2)
    run("mlflow", tmp_path, 3, 4)
    client = MlflowClient((tmp_path / "mlruns").as_uri())
    (experiment,) = (one for one in client.search_experiments() if one.name == "meshwright")
    (found,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert [(one.step, one.value) for one in history] == [(step, 1 / step) for step in range(1, 5)]
    assert found.data.metrics["evaluation/accuracy"] == 0.4
    assert found.data.params == {name: str(value) for name, value in FACTS.items()}
    assert found.info.status == "FINISHED"


def contents(path: Path) -> Iterator[bytes]:
    """The records of a file of W&B: 7 bytes of header, then LevelDB's log format. What `wandb sync` reads."""
    data, place, record = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        left = 2**15 - place % 2**15
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])  # after the checksum
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # complete, or the last part
            yield record
            record = b""


@pytest.mark.slow
def test_wandb(tmp_path: Path) -> None:
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    run("wandb", tmp_path, 1, 2)
    run("wandb", tmp_path, 3, 4)
    wandb.teardown()  # its service writes a finished run's last records a little later
    id = json.loads((tmp_path / "loggers.json").read_text(encoding="utf-8"))["wandb"]
    files = sorted((tmp_path / "wandb").glob(f"offline-run-*/run-{id}.wandb"))
    assert len(files) == 2  # `wandb sync` joins what has one id
    seen, config = {}, {}
    for path in files:
        for data in contents(path):
            record = Record.FromString(data)
            config |= {one.key: json.loads(one.value_json) for one in record.run.config.update}
            items = {"/".join(one.nested_key) or one.key: one.value_json for one in record.history.item}
            if "train/loss" in items:
                seen[record.history.step.num] = float(items["train/loss"])
    assert seen == {step: pytest.approx(1 / step) for step in range(1, 5)}
    assert FACTS.items() <= config.items()


@pytest.mark.slow
def test_a_run_of_the_command(start, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*SMALL, *MODES["data_parallel"], "evaluate.every=3", "report.loggers=[csv,mlflow]")
    ended = start(*words)
    with (ended.folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    losses = [float(row["train/loss"]) for row in rows if row["train/loss"]]
    assert losses == ended.losses
    assert [row["step"] for row in rows if row["evaluation/loss"]] == ["3", "6"]
    from mlflow import MlflowClient

    id = json.loads((ended.folder / "loggers.json").read_text(encoding="utf-8"))["mlflow"]
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # as docs/how-to/loggers.md says of reading
    found = MlflowClient((ended.folder / "mlruns").as_uri()).get_run(id)
    assert found.data.metrics["train/loss"] == ended.losses[-1]
    predicted = ended.plan["cost"]["total"], ended.plan["memory"]["peak"]
    assert (found.data.params["predicted.step_seconds"], found.data.params["predicted.memory_bytes"]) == tuple(
        map(str, predicted)
    )
    assert found.data.params["parallel.mode"] == "data_parallel"


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_package_that_is_not_installed(start, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"report\.loggers has {name}, which needs the package {name}") as refused:
        start(*SMALL, *MODES["data_parallel"], f"report.loggers=[{name}]")
    assert refused.value.code == "MW802"


def test_a_logger_that_cannot_write(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, log_every=1, progress=False, loggers={"csv": LOGGERS["csv"](tmp_path, 1, FACTS)})
    with (
        pytest.raises(ConfigError, match=r"report\.loggers: csv cannot record step 1: .*leave csv out") as refused,
        metrics,
    ):
        os.remove(tmp_path / "metrics.csv")
        metrics.step(1, loss=1.0, lr=0.1, seconds=0.1, samples=4)
    assert refused.value.code == "MW808"
    assert (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").count("\n") == 1  # which comes first
