"""Metrics of a corpus on four ranks, with a short last batch, are those of one device; schedulers follow them."""

import json
from typing import Any

import pytest
from small import ALONE, MODES, SMALL

F1 = "{target: torchmetrics.F1Score, args: {task: multiclass, num_classes: 4, average: macro}}"
AUC = "{target: torchmetrics.AUROC, args: {task: multiclass, num_classes: 4}, name: auc}"
MAP = "{target: torchmetrics.retrieval.RetrievalMAP, inputs: networks.ranked, name: retrieved}"
BOXES = "{target: networks.MeanPrecision, inputs: networks.boxes}"  # computes map, and a list that is no result
METRICS = f"evaluate.metrics=[accuracy, {F1}, {AUC}, {MAP}, {BOXES}]"
DETECTED = "evaluate.metrics=[{target: detection.MeanAveragePrecision, inputs: detection.boxes}]"  # of torchmetrics
EVALUATED = (*SMALL, "train.precision=fp64", METRICS, "evaluate.batch_size=24")


def evaluations(folder) -> list[dict[str, Any]]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [record["evaluation"] for record in records if "evaluation" in record]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto"])
def test_corpus_metrics_are_those_of_one_device(start, mode: str) -> None:
    alone = evaluations(start(*EVALUATED, *ALONE, "evaluate.every=3", folder="alone").folder)
    ranks = start(*EVALUATED, *MODES[mode], "evaluate.every=3", "checkpoint.best=F1Score", folder="ranks").folder
    found = evaluations(ranks)
    assert len(found) == 2 and {*found[0]} == {"loss", "accuracy", "F1Score", "auc", "retrieved", "map"}
    assert 0 < found[0]["map"] != found[1]["map"]
    assert found == [pytest.approx(one, rel=1e-10) for one in alone]
    best = [1, 2] if found[1]["F1Score"] > found[0]["F1Score"] else [1]
    saved = sorted(path.name for path in (ranks / "checkpoints").glob("step-*"))
    assert saved == [f"step-{3 * number:08}" for number in {*best, 2}]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto"])
def test_average_precision_of_boxes_is_that_of_one_device(start, mode: str) -> None:
    """Lists of boxes of all ranks, of rows with different numbers of them, as COCO's tools count them."""
    words = (*SMALL, "train.precision=fp64", DETECTED, "evaluate.batch_size=24", "evaluate.every=3")
    alone = evaluations(start(*words, *ALONE, folder="alone").folder)
    ranks = evaluations(start(*words, *MODES[mode], "checkpoint.best=map_50", folder="ranks").folder)
    assert {"map", "map_50", "mar_100"} < {*alone[0]} and alone[0]["map"] != alone[1]["map"]
    assert 0 < alone[0]["map"] < alone[0]["map_50"] < 1
    assert ranks == [pytest.approx(one, rel=1e-10) for one in alone]


@pytest.mark.slow
def test_a_scheduler_follows_a_metric(start) -> None:
    """The learning rate is halved after the evaluations that are not better, on all ranks, also after a restart."""
    words = (
        *EVALUATED, *MODES["data_parallel"], "evaluate.every=1", "optimizer.args.lr=1.0", "checkpoint.every=3",
        "optimizer.scheduler.target=torch.optim.lr_scheduler.ReduceLROnPlateau", "optimizer.scheduler.metric=auc",
        "optimizer.scheduler.args={mode: max, factor: 0.5, patience: 0}",
    )  # fmt: skip
    ended = start(*words).folder
    lines = [json.loads(line) for line in (ended / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    expected, lr, best = [], 1.0, float("-inf")
    for line in lines:
        if "evaluation" in line:
            value = line["evaluation"]["auc"]
            lr, best = (lr, value) if value > best * (1 + 1e-4) or best < 0 else (lr / 2, best)
        else:
            expected.append(lr)
    assert [line["lr"] for line in lines if "lr" in line] == expected and lr < 1
    again = start(*words, f"train.resume={ended}/checkpoints/step-00000003", folder="again").folder
    resumed = [json.loads(line) for line in (again / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["lr"] for line in resumed if "lr" in line] == expected[3:]
