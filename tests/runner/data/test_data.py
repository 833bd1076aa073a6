"""The data of a run: all ranks read the same data with the same augmentation."""

import networks
import pytest
import torch
from small import ALONE, DOUBLE, HYBRID, MODES, SMALL

from runner.data.order import Order
from runner.errors import ConfigError, RunFailed

AUGMENTED = ("data.target=augmented.Augmented", DOUBLE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        ("parallel=data_parallel", "train.accumulate=2"),
        ("parallel=semi_auto", "parallel.dataset_strategy=[[2,2],[2]]", "model.args.dropout=0.3"),
        ("parallel=data_parallel", "parallel.pipeline.stages=2", "parallel.pipeline.micro_batches=2"),
    ],
)
def test_random_augmentation_verifies(start, how):
    assert start(*SMALL, *AUGMENTED, *how, "verify.steps=5", verb="verify").verdict["passed"]


def test_a_resumed_run_augments_as_the_first_did(start):
    more = (
        *SMALL,
        *AUGMENTED,
        *ALONE,
        "train.steps=6",
        "train.log_every=1",
        "checkpoint.every=3",
        "model.args.dropout=0.2",
    )
    uninterrupted = start(*more, folder="uninterrupted").losses
    start(*more, "train.steps=3", folder="parts")
    assert start(*more, "train.resume=auto", folder="parts").losses == uninterrupted


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ("{less: 8}", "the number of training rows: 56 instead of 64"),
        ("{shift: 1.0}", "training row"),
    ],
)
def test_other_data_on_a_rank_is_named(start, args, named):
    how = ("parallel=data_parallel", "data.target=augmented.OfRank", f"data.args={args}")
    with pytest.raises(RunFailed, match=named):
        start(*SMALL, *how, "world_size=3", "data.batch_size=12")


def test_a_collate_makes_a_row_of_every_sample(start):
    with pytest.raises(ConfigError, match="makes '0' with 8 rows from 16 samples"):
        start(*SMALL, "data.collate=augmented.halves", "parallel=data_parallel")


SHORT = ("data.args.rows=55", "data.drop_last=false", "verify.steps=2", DOUBLE)
"""Three batches of 16 rows in an epoch, and one of 7."""
LONGER = ("verify.steps=6", "train.precision=fp32")
OWN_LOSS = ("model.target=networks.OwnLoss", "loss.target=null", "data.args.keys=true")
SIZED = ("loss.target=networks.SizedLoss",)
SHORT_CASES = {
    "data parallel": ("parallel=data_parallel",),
    "no row for a rank": ("parallel=data_parallel", "data.args.rows=51"),
    "rows that divide": ("parallel=data_parallel", "data.args.rows=60"),
    "operators sliced along many dims": MODES["semi_auto"],
    "batch norm": ("parallel=data_parallel", "model.args.norm=true"),
    "dropout": ("parallel=data_parallel", "model.args.dropout=0.4"),
    "accumulated": ("parallel=data_parallel", "train.accumulate=4", "train.clip=0.1"),
    "one micro-batch less": ("parallel=data_parallel", "train.accumulate=4", "data.args.rows=52"),
    "summed loss": ("parallel=data_parallel", "loss.args={reduction: sum}"),
    "loss of its own": ("parallel=data_parallel", *OWN_LOSS),
    "tensors of sizes": ("parallel=data_parallel", *SIZED),
    "tensors of sizes in a pipeline": (
        "parallel.pipeline.stages=2", "parallel.pipeline.micro_batches=2", "parallel=data_parallel", *SIZED,
    ),
    "hybrid": (*HYBRID, "data.args.rows=60", "verify.reference.target=networks.Classifier"),
    "alone": (*ALONE, "train.accumulate=2"),
    "pipeline": ("parallel.pipeline.stages=2", "parallel.pipeline.micro_batches=4", "parallel=data_parallel"),
    "circular pipeline": (
        "model.target=networks.Stack", "world_size=2", "parallel.pipeline.stages=2", "parallel=data_parallel",
        "parallel.pipeline.virtual_stages=2", "model.args.dropout=0.2",
        "parallel.pipeline.schedule=interleaved_1f1b", "parallel.pipeline.micro_batches=2", "train.accumulate=2",
    ),
    "zero 1": ("parallel=data_parallel", "parallel.zero.stage=1", "train.accumulate=4", "train.precision=fp32"),
    "zero 2": ("parallel=data_parallel", "parallel.zero.stage=2", "train.accumulate=4", *LONGER),
    "zero 3": ("parallel=data_parallel", "parallel.zero.stage=3", "train.accumulate=2", *LONGER),
    "pipeline with zero": (
        "parallel=data_parallel", "parallel.zero.stage=1", "parallel.pipeline.stages=2", *LONGER,
        "parallel.pipeline.micro_batches=4", "model.args.hidden=12",
    ),
    "copies": ("parallel=data_parallel", "parallel.copies=2"),
    "compiled": ("parallel=data_parallel", "train.compile=true"),
}  # fmt: skip


SLOW = frozenset(
    {
        "rows that divide", "dropout", "one micro-batch less", "summed loss", "loss of its own", "alone",
        "tensors of sizes in a pipeline", "circular pipeline", "zero 1", "zero 2", "zero 3", "pipeline with zero",
        "copies", "compiled",
    }
)  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in SHORT_CASES])
def test_a_short_last_batch_trains_as_on_one_device(start, name):
    assert start(*SMALL, *SHORT, *SHORT_CASES[name], verb="verify").verdict["passed"]


@pytest.mark.parametrize("shuffle", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_epochs_end_with_the_rows_that_are_left(start, shuffle):
    more = (*SMALL, "parallel=data_parallel", DOUBLE, "data.args.rows=55", "data.drop_last=false", "train.accumulate=2")
    more += (f"data.shuffle={shuffle}".lower(), "train.steps=null", "train.epochs=2", "train.log_every=1")
    ran = start(*more, "evaluate.metric=accuracy", folder="run")
    assert [*ran.evaluations] == [4, 8]
    for rank in range(4):
        lines = [
            line
            for line in (ran.folder / "ranks" / f"{rank}.log").read_text(encoding="utf-8").splitlines()
            if line.startswith("epoch ")
        ]
        fields = [line.split() for line in lines]
        assert [(words[1], words[3]) for words in fields] == [(str(1 + step // 4), str(step + 1)) for step in range(8)]
        assert [float(words[5]) for words in fields] == pytest.approx(ran.losses, rel=1e-5)
    torch.manual_seed(0)
    model, points, losses = networks.Classifier().double(), networks.Points(55), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    order = Order(55, 16, 0, shuffle, drop_last=False)
    for step in range(8):
        rows = order.rows(step)
        assert len(rows) == (7 if step % 4 == 3 else 16)
        loss = torch.nn.functional.cross_entropy(model(points.x[rows].double()), points.y[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert ran.losses == pytest.approx(losses, rel=1e-10)
    assert [*range(55)] == sorted(row for step in range(4) for row in order.rows(step))
    if not shuffle:
        assert order.rows(3) == order.rows(7) == [*range(48, 55)]
        start(*more, "train.epochs=1", "checkpoint.every=3", folder="parts")
        assert start(*more, "train.resume=auto", folder="parts").losses == ran.losses


@pytest.mark.parametrize(("args", "said"), [("{}", True), ("{rows: 16, seed: 1}", False)])
def test_an_evaluation_of_the_rows_of_training_says_so(start, capfd, args, said):
    more = ("parallel=data_parallel", "train.steps=1", "evaluate.every=1", f"evaluate.args={args}")
    start(*SMALL, *more)
    assert ("evaluate: the rows of training" in capfd.readouterr().out) == said


def test_an_evaluation_has_the_tensors_of_its_batches(start):
    """Of batches of 16 and 5 rows."""
    more = ("model.target=networks.SizedClassifier", DOUBLE, "parallel=data_parallel", "train.steps=1")
    evaluated = ("optimizer.args.lr=0.0", "evaluate.args={rows: 21, seed: 1}", "evaluate.every=1")
    found = start(*SMALL, *more, *evaluated).evaluations[1]["loss"]
    torch.manual_seed(0)
    model, points, total = networks.SizedClassifier().double(), networks.Points(21, seed=1), 0.0
    for x, y in zip(points.x.double().split(16), points.y.split(16), strict=True):
        total += torch.nn.functional.cross_entropy(model(x), y, reduction="sum").item()
    assert found == pytest.approx(total / 21, rel=1e-10)


def test_an_evaluation_counts_as_its_own_loss_does(start):
    """Not by class weights of training."""
    more = ("model.target=networks.WeightedInTraining", "loss.target=null", "data.args.keys=true", "train.steps=1")
    evaluated = ("optimizer.args.lr=0.0", "evaluate.args={rows: 32, seed: 1, keys: true}", "evaluate.every=1")
    found = start(*SMALL, *more, DOUBLE, "parallel=data_parallel", *evaluated).evaluations[1]["loss"]
    torch.manual_seed(0)
    model, points = networks.WeightedInTraining().double().eval(), networks.Points(32, seed=1)
    assert found == pytest.approx(model(points.x.double(), points.y).item(), rel=1e-10)


def test_a_model_that_cannot_train_on_the_last_rows_is_refused(start):
    more = ("model.args.norm=true", "data.args.rows=49", "data.drop_last=false")
    for mode in (("parallel=data_parallel",), ("parallel=stand_alone", "world_size=1")):
        with pytest.raises(ConfigError, match=r"data.drop_last = false: .* batch of 1 samples"):
            start(*SMALL, *mode, *more)
    with pytest.raises(ConfigError, match=r"data.drop_last = false: .*cannot slice batch entry '0' of shape \(7, 12\)"):
        start(*SMALL, *HYBRID, *SHORT)
