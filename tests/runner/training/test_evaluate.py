"""Evaluation counts every sample exactly once, in every mode, with every form of model, loss and metric."""

from types import SimpleNamespace

import networks
import pytest
import torch
from small import ALONE, HYBRID, MODES, SMALL
from torch import nn
from torch.nn import functional

from runner.build.scores import Scores, Updated
from runner.errors import ConfigError

STILL = ("optimizer.args.lr=0.0", "train.steps=1")
"""Training that changes nothing: the evaluated weights are the initial ones."""


@pytest.fixture
def evaluate(start):
    """`evaluate("auto", ...)` gives the evaluations, by step, of a training of the small classifier."""

    def call(mode, *overrides):
        return start(*SMALL, *(HYBRID if mode == "hybrid" else MODES[mode]), *overrides).evaluations

    return call


def truth(rows, seed=1):
    torch.manual_seed(0)
    model, data = networks.Classifier(), networks.Points(rows, seed)
    with torch.no_grad():
        scores = model(data.x)
    accuracy = (scores.argmax(1) == data.y).double().mean().item()
    return {"loss": functional.cross_entropy(scores, data.y).item(), "accuracy": accuracy}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("mode", "size"),
    [
        *((mode, "null") for mode in (*MODES, "hybrid")),
        *(pytest.param(mode, 12, marks=[pytest.mark.slow] * (mode != "semi_auto")) for mode in MODES),
        ("hybrid", 12),
    ],
)
def test_every_sample_once_with_a_short_last_batch(evaluate, mode, size):
    found = evaluate(
        mode, *STILL, "evaluate.metric=accuracy", "evaluate.args={rows: 50, seed: 1}", f"evaluate.batch_size={size}"
    )
    assert found == {1: pytest.approx(truth(50), rel=1e-6)}


OWN_LOSS = ("loss.target=null", "data.args.keys=true")
COUNTING = {
    "loss": ("stand_alone",),
    "own loss": ("stand_alone", "model.target=networks.OwnLoss", *OWN_LOSS),
    "loss, sliced": ("auto",),
    "loss of terms": ("stand_alone", "loss.target=networks.MixedLoss", "loss.args={ignore_index: -100}"),
    "loss of terms, sliced": ("auto", "loss.target=networks.MixedLoss", "loss.args={ignore_index: -100}"),
    "own mean": ("stand_alone", "model.target=networks.OwnMean", *OWN_LOSS),
    "own mean, sliced": ("data_parallel", "model.target=networks.OwnMean", *OWN_LOSS),
    "own loss, sliced": ("data_parallel", "model.target=networks.OwnLoss", *OWN_LOSS),
    "loss of a hybrid model": ("hybrid",),
    "own loss of a hybrid model": ("hybrid", "model.args={returns_loss: true}", *OWN_LOSS),
}


@pytest.mark.parametrize(
    "way",
    [way if way in ("loss", "own mean, sliced") else pytest.param(way, marks=pytest.mark.slow) for way in COUNTING],
)
def test_a_mean_over_classes_is_that_of_all_samples_together(evaluate, way):
    """Batches have 12, 9, 6 and 3 rows that count, and the short last one none."""
    mode, *words = COUNTING[way]
    rows = 48 if way.startswith("own loss of") else 50
    words = (*STILL, *words, "data.target=networks.PartlyIgnored", "evaluate.batch_size=12")
    found = evaluate(mode, *words, f"evaluate.args={{rows: {rows}, seed: 1, ignored: true}}")
    torch.manual_seed(0)
    model, data = networks.Classifier(), networks.PartlyIgnored(rows, 1, ignored=True)
    with torch.no_grad():
        scores = model(data.x)
    loss = networks.MixedLoss(-100) if way.startswith("loss of terms") else nn.CrossEntropyLoss()
    losses = [loss(scores[at : at + 12], data.y[at : at + 12]).item() for at in range(0, 48, 12)]
    expected = loss(scores, data.y).item()
    assert found == {1: {"loss": pytest.approx(expected, rel=1e-6)}}
    assert abs(sum(losses) / 4 - expected) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["stand_alone", "semi_auto", "hybrid"])
def test_workers_read_for_an_evaluation(evaluate, mode):
    words = (*STILL, "evaluate.metric=accuracy", "evaluate.args={rows: 50, seed: 1}", "evaluate.batch_size=12")
    found = evaluate(mode, *words, "data.workers=2", "data={target: networks.InWorkers, shuffle: false}")
    assert found == {1: pytest.approx(truth(50), rel=1e-6)}


@pytest.mark.few(1)
@pytest.mark.parametrize("loss", ["loss_and_scores", "named_loss"])
def test_losses_that_return_more(evaluate, loss):
    words = (*STILL, "evaluate.metric=accuracy", "evaluate.args={rows: 50, seed: 1}", "evaluate.batch_size=12")
    found = evaluate("stand_alone", f"loss.target=networks.{loss}", *words)
    assert found == {1: pytest.approx(evaluate("stand_alone", *words)[1], rel=1e-6)}


def test_rows_that_mix_see_no_padding(evaluate):
    short = ("model.target=networks.Mixing", *STILL, "evaluate.args={rows: 50, seed: 1}", "evaluate.batch_size=12")
    assert evaluate("data_parallel", *short) == {1: pytest.approx(evaluate("stand_alone", *short)[1], rel=1e-6)}


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [7, 64])
def test_a_batch_that_ranks_cannot_share(evaluate, size):
    found = evaluate(
        "semi_auto",
        *STILL,
        "evaluate.metric=accuracy",
        "evaluate.args={rows: 50, seed: 1}",
        f"evaluate.batch_size={size}",
    )
    assert found == {1: pytest.approx(truth(50), rel=1e-6)}


WHOLE = ("data.batch_size=64", "evaluate.batch_size=64", "evaluate.every=1", "train.steps=4", "optimizer.args.lr=0.1")
"""Every step trains on all samples, so what evaluation finds after one step is the training loss of the next."""


def check_against_the_next_step(ended):
    assert list(ended.evaluations) == [1, 2, 3, 4]
    assert [ended.evaluations[step]["loss"] for step in (1, 2, 3)] == pytest.approx(ended.losses[1:], rel=1e-5)
    assert len(set(ended.losses)) == 4


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2, 3))])
@pytest.mark.parametrize("mode", ["semi_auto", "hybrid"])
def test_trained_weights_are_evaluated(start, mode, stage):
    options = HYBRID if mode == "hybrid" else MODES[mode]
    check_against_the_next_step(start(*SMALL, *options, *WHOLE, f"parallel.zero.stage={stage}"))


@pytest.mark.few(1)
@pytest.mark.parametrize("form", ["dict", "tuple", "object", "alone"])
def test_models_that_return_their_loss(start, form):
    options = ("model.target=networks.OwnLoss", f"model.args.form={form}", "loss.target=null", "parallel=data_parallel")
    check_against_the_next_step(start(*SMALL, *WHOLE, *options))


@pytest.mark.slow
def test_models_that_return_their_loss_with_a_short_batch(evaluate):
    own = ("model.target=networks.OwnLoss", "loss.target=null", *STILL, "evaluate.args={rows: 50, seed: 1}")
    found = evaluate("data_parallel", *own)
    assert found == {1: pytest.approx({"loss": truth(50)["loss"]}, rel=1e-6)}
    assert evaluate("stand_alone", *own) == {1: pytest.approx(found[1], rel=1e-6)}


def test_hybrid_models_that_return_their_loss(start):
    own = ("model.args={returns_loss: true}", "loss.target=null")
    check_against_the_next_step(start(*SMALL, *HYBRID, *WHOLE, *own))


TWO = ("model.target=networks.TwoHeads", "loss.target=networks.WeighedLoss", "data.args.keys=true")


SEVERAL = [ALONE, ("parallel=data_parallel",), ("parallel=data_parallel", "parallel.zero.stage=1")]


@pytest.mark.slow
@pytest.mark.parametrize("options", SEVERAL)
def test_several_outputs_and_a_loss_that_learns(start, options):
    ended = start(*SMALL, *options, *WHOLE, *TWO, "evaluate.metric=networks.disagreement")
    check_against_the_next_step(ended)
    assert all(0 < found["disagreement"] < 1 for found in ended.evaluations.values())


def test_metric_by_name(evaluate):
    found = evaluate("auto", *STILL, "evaluate.metric=networks.share_of_first", "evaluate.args={rows: 50, seed: 1}")
    torch.manual_seed(0)
    model = networks.Classifier()
    share = (model(networks.Points(50, 1).x).argmax(1) == 0).double().mean().item()
    assert found[1]["share_of_first"] == pytest.approx(share)


@pytest.mark.slow
def test_how_often(evaluate):
    assert list(evaluate("data_parallel", "train.steps=7", "evaluate.every=3")) == [3, 6, 7]
    assert list(evaluate("data_parallel", "train.steps=7", "evaluate.metric=accuracy")) == [7]
    assert evaluate("data_parallel", "train.steps=7") == {}


@pytest.mark.slow
def test_running_statistics_are_those_of_training(start):
    norm = (
        "model.args.norm=true",
        "optimizer.args.lr=0.0",
        "evaluate.every=2",
        "evaluate.args.seed=1",
        "train.precision=fp64",
    )
    alone = start(*SMALL, *ALONE, *norm, folder="alone")
    found = start(*SMALL, *MODES["semi_auto"], *norm)
    assert list(found.evaluations) == [2, 4, 6]
    assert found.evaluations[2]["loss"] != found.evaluations[4]["loss"]
    for step, results in alone.evaluations.items():
        assert found.evaluations[step] == pytest.approx(results, rel=1e-10)


@pytest.mark.slow
def test_random_numbers_in_evaluation(start):
    noise = ("model.target=networks.Noisy", "train.random=exact", "evaluate.every=1", "train.precision=fp64")
    alone = start(*SMALL, *ALONE, *noise, folder="alone")
    found = start(*SMALL, "parallel=data_parallel", *noise)
    assert found.losses == pytest.approx(alone.losses, rel=1e-10)
    for step, results in alone.evaluations.items():
        assert found.evaluations[step] == pytest.approx(results, rel=1e-10)


REFUSED = [
    (("evaluate.metric=accuracy", "loss.target=null", "model.target=networks.OwnLoss"), "loss.target is null"),
    (("evaluate.metric=networks.precision",), "networks has no 'precision'"),
    (("evaluate.metric=networks.disagreement",), "evaluate: the metric disagreement fails in evaluation: IndexError"),
    (("evaluate.metric=torch.sub",), "RuntimeError"),
    (("evaluate.args.seeds=1",), "takes no argument 'seeds'"),
    (("evaluate.args.keys=true",), "the samples have the entries x, label, those of training 0, 1"),
    (("evaluate.args.rows=0",), "has no rows"),
    (
        ("evaluate.metric=accuracy", "model.target=networks.Object", "loss.target=networks.object_loss"),
        "the model returns a Answer, which cannot be handed to the loss in pieces",
    ),
]


@pytest.mark.few(4)
@pytest.mark.parametrize(("overrides", "says"), REFUSED)
def test_refused_before_training(start, tmp_path, overrides, says):
    with pytest.raises(ConfigError, match=says):
        start(*SMALL, "parallel=data_parallel", *overrides)
    assert list((tmp_path / "run").iterdir()) == []


def test_accuracy_needs_classes(start):
    with pytest.raises(ConfigError, match=r"accuracy needs class scores \[n, classes, ...\]"):
        start("+recipe=quickstart", "evaluate.metric=accuracy")


@pytest.mark.parametrize("share", [False, True])
def test_what_divides_by_no_count_is_a_mean_over_rows(evaluate, share):
    """In batches of 12 and a short one of 2 rows, though each has a sum behind a division."""
    words = ("loss.target=networks.WeightsOfTasks", f"loss.args.share={share}", *STILL, "evaluate.batch_size=12")
    found = evaluate("stand_alone", *words, "evaluate.args={rows: 50, seed: 1}")
    torch.manual_seed(0)
    model, data = networks.Classifier(), networks.Points(50, 1)
    with torch.no_grad():
        expected = networks.WeightsOfTasks()(model(data.x), data.y).item()
    assert found == {1: {"loss": pytest.approx(expected, rel=1e-6)}}


def test_numbers_of_one_name_take_that_of_their_metric():
    """A metric may compute several; what no other one computes keeps its name."""

    def metric(*names):
        values = SimpleNamespace(reset=lambda: None, update=print, compute=lambda: dict.fromkeys(names, 1.0))
        return Updated(values)

    metrics = {"first": metric("low", "high"), "second": metric("low", "middle")}
    assert [*Scores(None, metrics, {}, frozenset(["second"])).results()] == ["low", "high", "second.low", "middle"]
    with pytest.raises(ConfigError, match="two results are called 'low'") as refused:
        Scores(None, metrics, {}).results()
    assert refused.value.code == "MW843"
