"""User-defined model, loss and data: imported by name from the working directory, and verified in every form."""

import json
import shutil
import sys
from pathlib import Path

import networks
import pytest
import torch
from small import DOUBLE, MODES, SMALL

from runner import checkpoint as checkpoints
from runner.build.scores import scores, try_evaluation
from runner.errors import ConfigError
from strategies.capture import Objective
from strategies.core.errors import StrategyError

LOSS_GROUP = "optimizer.groups=[{match: ['loss.*'], args: {lr: 0.3}}]"
KEYS = "data.args.keys=true"
SHAPES = {
    "dropout": (("model.args.dropout=0.5",), DOUBLE),
    "dropout in single precision": (("model.args.dropout=0.5",), "train.precision=fp32"),
    "a kept loss": (("model.target=networks.Balanced", "loss.target=null", "data.args.keys=true"), DOUBLE),
    "batch norm": (("model.args.norm=true",), DOUBLE),
    "tied weights": (("model.target=networks.Tied",), DOUBLE),
    "own operators": (
        (
            "model.target=networks.OwnOperators",
            "parallel=semi_auto",
            "parallel.strategies={Doubled: [[2,2]], inner.matmul: [[2,1],[1,2]]}",
        ),
        DOUBLE,
    ),
    "tied weights, sliced": (
        ("model.target=networks.Tied", "parallel=semi_auto", "parallel.strategies={enter.matmul: [[2,1],[1,2]]}"),
        DOUBLE,
    ),
    "any names": (("model.target=networks.Odd", "parallel=data_parallel"), DOUBLE),
    "any names, divided": (
        ("model.target=networks.Odd", "parallel=data_parallel", "parallel.zero.stage=3", "train.clip=0.1"),
        "train.precision=fp32",
    ),
    "several random operators": (("model.target=networks.Noisy",), DOUBLE),
    "several outputs": (
        ("model.target=networks.TwoHeads", "loss.target=networks.WeighedLoss", KEYS, LOSS_GROUP),
        DOUBLE,
    ),
    "own loss": (("model.target=networks.OwnLoss", "loss.target=null", KEYS), DOUBLE),
    "own loss in an object": (("model.target=networks.OwnLoss", "model.args.form=object", "loss.target=null"), DOUBLE),
    "object": (("model.target=networks.Object", "loss.target=networks.object_loss"), DOUBLE),
    "function as loss": (
        ("loss={target: torch.nn.functional.cross_entropy, args: {label_smoothing: 0.1, reduction: sum}}",),
        DOUBLE,
    ),
    "loss first in a tuple": (("loss.target=networks.loss_and_scores",), DOUBLE),
    "loss by name in a pipeline": (("loss.target=networks.named_loss", "parallel.pipeline.stages=2"), DOUBLE),
    "own collate": (("data.target=networks.Words", "data.collate=networks.padded"), DOUBLE),
    "own collate, sliced rows": (
        (
            "data.target=networks.Words",
            "data.collate=networks.padded",
            "parallel=semi_auto",
            "parallel.dataset_strategy=[[2,2],[1]]",
        ),
        DOUBLE,
    ),
    "numpy arrays and numbers": (("data.target=networks.Arrays",), DOUBLE),
    "rows read in part": (
        (
            "model.target=networks.Pixels",
            "data.target=runner.data.synthetic.LargeImages",
            "data.args={channels: 1, height: 6, width: 8, classes: 4}",
            "parallel=semi_auto",
            "parallel.dataset_strategy=[[2,1,1,2],[1]]",
        ),
        DOUBLE,
    ),
    "rows that the ranks cannot share evenly": (("parallel=semi_auto", "data.batch_size=18"), DOUBLE),
    "one rank": (("world_size=1",), DOUBLE),
    "one rank with zero": (("world_size=1", "parallel.zero.stage=2"), "train.precision=fp32"),
    "full batch": (("parallel=auto", "parallel.dataset_strategy=full_batch", *MODES["semi_auto"]), DOUBLE),
    "frozen": (("optimizer.freeze=['inner.*']",), DOUBLE),
    "many micro-batches": (("model.args.dropout=0.2", "train.accumulate=4", "train.clip=0.1"), DOUBLE),
    "hidden dim that nothing divides": (("model.args.hidden=13",), DOUBLE),
    "zero": (("model.target=networks.Tied", "parallel.zero.stage=3", "model.args={}"), "train.precision=fp32"),
}


PRODUCT = (
    *(*SMALL, "model.target=networks.Product", "loss.target=null", "data.target=networks.Products"),
    *("data.unbatched=[w]", DOUBLE),
)
LAYOUTS = "parallel.layouts={l: {device_matrix: [2,2], axes: [dp,mp]}}"
SLICED = {
    "by counts": ("parallel=semi_auto", "parallel.dataset_strategy=[[2,2],[2,1]]"),
    "by layouts": (
        *("parallel=semi_auto", LAYOUTS),
        "parallel.strategies={matmul: [{layout: l, dims: [dp,mp]}, {layout: l, dims: [mp,null]}]}",
        "parallel.dataset_strategy=[{layout: l, dims: [dp,mp]}, {layout: l, dims: [mp,null]}]",
    ),
    "by default, accumulated": ("parallel=data_parallel", "train.accumulate=2"),
    "by default, which the ranks cannot share": ("parallel=data_parallel", "world_size=8"),
    "from a collate": ("parallel=data_parallel", "data.args.collated=true", "data.collate=networks.with_w"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SLICED)
def test_inputs_that_are_not_batches(start, kind):
    ended = start(*PRODUCT, *SLICED[kind], "verify.steps=2", verb="verify")
    assert ended.verdict["passed"]
    axes = {"by counts": "d0", "by layouts": "mp"}
    if kind in axes:
        assert ended.plan["inputs"]["w"]["dims"] == [[axes[kind]], []]


def test_an_input_that_the_ranks_cannot_share_is_complete_on_each(command, tmp_path):
    done = command("plan", *PRODUCT, "parallel=data_parallel", "world_size=8", f"hydra.run.dir={tmp_path}")
    assert done.code == 0, done.err
    inputs = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))["inputs"]
    assert [inputs[name]["dims"] for name in ("x", "w")] == [[["dp"], []], [[], []]]


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (("data.unbatched=[]",), ("'w' with 12 rows from 16", "data.unbatched=[w]")),
        (("data.unbatched=[v]", "data.args={}", "data.collate=null"), ("no 'v'", "x, w")),
        (("evaluate.every=1",), ("data.unbatched = ['w']", "evaluate.every = 1")),
        (("data.drop_last=false",), ("data.unbatched = ['w']", "drop_last=true")),
    ],
)
def test_unbatched_inputs_are_refused(command, words, texts):
    done = command(
        "plan", *PRODUCT, "parallel=data_parallel", "data.args.collated=true", "data.collate=networks.with_w", *words
    )
    assert done.code == 2 and [text for text in texts if text not in done.err] == []


NO_DIMS = (
    *(*SMALL, "parallel=data_parallel", "model.target=networks.Scalars", "train.clip=0.01"),
    *("optimizer.target=torch.optim.SGD", "optimizer.args={lr: 10.0, momentum: 0.9}"),
)
STAGES = [
    ("parallel.zero.stage=1", "parallel.pipeline.stages=2"),
    ("parallel.zero.stage=2", "parallel.offload.optimizer=host"),
    ("parallel.zero.stage=3", "world_size=2"),
]


@pytest.mark.slow
@pytest.mark.parametrize("words", STAGES, ids=["1", "2", "3"])
def test_parameters_of_no_dims_under_zero(start, words):
    """Plain SGD with a large learning rate shows a wrong norm in the weights."""
    ended = start(*NO_DIMS, *words, "verify.steps=2", verb="verify")
    assert ended.verdict["passed"] and max(ended.verdict["weight_max_rel_diff"].values()) <= 1e-6


BOUNDED = (*SMALL, "model.target=networks.Bounded", "parallel=data_parallel")


@pytest.mark.parametrize("words", [(), pytest.param(("train.accumulate=2", "world_size=2"), marks=pytest.mark.slow)])
def test_parameters_that_forward_writes(start, words):
    verdict = start(*BOUNDED, DOUBLE, *words, "verify.steps=4", verb="verify").verdict
    assert verdict["passed"] and max(verdict["weight_max_rel_diff"].values()) <= 1e-10


@pytest.mark.parametrize("word", ["parallel.zero.stage=1", "train.precision=bf16", "train.compile=true"])
def test_parameters_that_forward_writes_have_no_copies(start, word):
    with pytest.raises(ConfigError) as error:
        start(*BOUNDED, word, verb="plan")
    assert error.value.code == "MW451" and word.partition("=")[0] in str(error.value)


def test_a_trial_of_an_evaluation_leaves_parameters_as_they_were():
    torch.manual_seed(0)
    net, loss, x = networks.Bounded(), torch.nn.CrossEntropyLoss(), torch.randn(8, 12)
    before = {name: (one.data_ptr(), one.clone()) for name, one in net.named_parameters()}
    batch = {"0": x, "1": torch.zeros(8, dtype=torch.long)}
    try_evaluation(Objective(net, loss, ("0", "1"), ("1",)), batch, scores((), loss))
    assert all(one.data_ptr() == before[name][0] and one.equal(before[name][1]) for name, one in net.named_parameters())
    net(x)
    assert not net.inner.weight.equal(before["inner.weight"][1])


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("parallel.zero.stage=1", "parallel.pipeline.schedule=zero_bubble")])
def test_a_stage_of_a_pipeline_that_is_frozen(start, words):
    given = ("optimizer.freeze=[inner.*]", "parallel.pipeline.stages=2", "parallel.pipeline.cuts={outer: 1}")
    ended = start(*SMALL, "parallel=data_parallel", *given, *words, "train.clip=0.01", verb="verify")
    assert ended.verdict["passed"] and {*ended.verdict["grad_max_rel_diff"]} == {"outer.weight", "outer.bias"}


@pytest.mark.slow
@pytest.mark.parametrize("words", STAGES, ids=["1", "2", "3"])
def test_checkpoints_of_parameters_of_no_dims(start, words):
    words = (*NO_DIMS, *words, "checkpoint.every=2", "evaluate.metric=accuracy", "evaluate.args={rows: 50, seed: 1}")
    uninterrupted = start(*words, "train.steps=3", folder="uninterrupted")
    start(*words, "train.steps=2", folder="parts")
    parts = start(*words, "train.steps=3", "train.resume=auto", folder="parts")
    assert parts.value == uninterrupted.value and parts.evaluations[3] == uninterrupted.evaluations[3]
    stored = checkpoints.read(checkpoints.newest(parts.folder / "checkpoints"))
    assert stored.read("model/temperature").shape == ()


SLOW = frozenset(
    {
        "any names, divided", "zero", "one rank with zero", "many micro-batches", "frozen", "full batch", "own collate",
        "rows read in part", "object", "loss first in a tuple", "function as loss", "numpy arrays and numbers",
    }
)  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in SHAPES])
def test_verified(start, name):
    overrides, precision = SHAPES[name]
    chosen = [] if any(word.startswith("parallel=") for word in overrides) else ["parallel=data_parallel"]
    assert start(*SMALL, *chosen, *overrides, precision, "verify.steps=2", verb="verify").verdict["passed"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a user module; the import state is restored afterwards."""
    shutil.copy(networks.__file__, tmp_path / "my_networks.py")
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("my_networks", None)


MINE = (
    "model.target=my_networks.Classifier",
    "loss.target=torch.nn.CrossEntropyLoss",
    "data.target=my_networks.Points",
    "parallel=data_parallel",
    "world_size=2",
)


def test_from_the_working_directory(command, folder):
    words = (*MINE, "train.steps=3", "evaluate.metric=my_networks.share_of_first", "model.args.hidden=8")
    done = command(*words, "hydra.run.dir=out")
    assert (done.code, done.err) == (0, "")
    records = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 3]
    assert 0 <= records[-1]["evaluation"]["share_of_first"] <= 1
    assert "done: 3 steps, loss " in done.out and done.out.endswith("; results in out\n")
    assert command("verify", *words, "hydra.run.dir=verified").code == 0
    plan = json.loads((folder / "out" / "plan.json").read_text(encoding="utf-8"))
    assert any("/my_networks.py:" in operator["source"] for operator in plan["operators"])


def test_from_a_recipe_of_the_user(command, folder):
    Path("recipes").mkdir()
    Path("recipes/mine.yaml").write_text(
        "# @package _global_\n# Mine\ndefaults: [{override /parallel: semi_auto}, _self_]\n"
        "world_size: 2\nmodel: {target: my_networks.Classifier}\nloss: {target: torch.nn.CrossEntropyLoss}\n"
        "data: {target: my_networks.Points, args: {rows: 48}, batch_size: 12}\ntrain: {epochs: 1}\n"
        "parallel: {strategies: {inner.matmul: [[1, 2], [2, 1]]}}\n",
        encoding="utf-8",
    )
    done = command("+recipe=mine", "hydra.run.dir=out")
    assert (done.code, done.err) == (0, "")
    assert len(Path("out/metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 4


@pytest.mark.parametrize(("given", "found"), [("args: {lr: 0.01}", {"lr": 0.01}), ("groups: []", {})])
def test_the_learning_rate_of_a_recipe(command, folder, given, found):
    Path("recipes").mkdir()
    Path("recipes/mine.yaml").write_text(
        f"# @package _global_\n# Mine\noptimizer: {{target: torch.optim.Adam, {given}}}\n", encoding="utf-8"
    )
    assert command("plan", "+recipe=mine", *MINE, "train.steps=1", "hydra.run.dir=out").code == 0
    config = json.loads((folder / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["optimizer"]["args"] == found


def test_an_optimizer_without_a_learning_rate(command, folder):
    words = (*MINE, "optimizer.target=my_networks.WithoutRate", "train.steps=2", DOUBLE)
    assert command(*words, "hydra.run.dir=out").code == 0
    same = (*MINE, "optimizer.target=torch.optim.SGD", "optimizer.args.lr=0.1", "train.steps=2", DOUBLE)
    assert command(*same, "hydra.run.dir=sgd").code == 0
    own, others = (
        [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        for name in ("out", "sgd")
    )
    assert [one["loss"] for one in own] == [one["loss"] for one in others]
    assert ["lr" in one for one in own + others] == [False, False, True, True]


def test_an_optimizer_that_clips_large_gradients_is_refused_in_a_pipeline(start):
    words = ("parallel=data_parallel", "parallel.pipeline=2", "world_size=2")
    with pytest.raises(StrategyError, match="Clipping updates parameters by all of a group"):
        start(*SMALL, *words, "optimizer={target: networks.Clipping, args: {lr: 0.1}}")


LARS = (*SMALL, "world_size=2", "model.target=networks.Classifier", "optimizer.target=networks.Lars")


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
def test_an_optimizer_that_takes_norms_is_refused_where_parameters_are_cut_up(start, zero):
    with pytest.raises(StrategyError, match=r"Lars does not update every element .* flattens and cuts up parameters"):
        start(*LARS, "parallel=data_parallel", f"parallel.zero.stage={zero}")
