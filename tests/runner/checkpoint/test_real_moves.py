"""Runs on real ranks that change their plan between resumes end like a run with one plan."""

import json

import pytest
import torch
from small import ALONE, HYBRID, SMALL

from runner import checkpoint as checkpoints
from strategies.core.errors import StrategyError

COMMON = (
    *SMALL[1:],
    "model.target=networks.Tied",
    "optimizer.target=torch.optim.AdamW",
    "optimizer.args.lr=0.01",
    "optimizer.scheduler={target: torch.optim.lr_scheduler.CosineAnnealingLR, args: {T_max: 12}}",
    "train.clip=0.05",
    "train.random=exact",
    "data.args.rows=50",
)
CHAIN = [
    ("world_size=4", "parallel=auto", "parallel.strategies.enter.matmul=[[1,2],[2,2]]", "parallel.zero.stage=1"),
    ("world_size=2", "parallel=data_parallel", "parallel.zero.stage=3"),
    ALONE,
    ("world_size=4", "parallel=data_parallel", "parallel.pipeline.cuts={leave: 1}", "parallel.pipeline.stages=2"),
    ("world_size=3", "parallel=data_parallel", "parallel.zero.stage=2", "data.batch_size=15"),
]
"""Each takes over from the one before, after two steps."""


def tensors(folder, step=None):
    place = folder / "checkpoints"
    opened = checkpoints.read(checkpoints.newest(place) if step is None else place / f"step-{step:08d}")
    return {key: opened.read(key) for key in opened.tensors}


def moved(start, chain, *words, begin="run-0"):
    """Run two steps under each plan of `chain`. Returns the last run folder."""
    resume, folder = (), None
    for number, plan in enumerate(chain):
        steps = f"train.steps={2 * (number + 1)}"
        folder = start(*COMMON, *words, *plan, *resume, steps, folder=f"run-{number}").folder
        resume = (f"train.resume={folder}",)
    return folder


def largest(ours, truth):
    assert ours.keys() == truth.keys()
    return max(
        ((ours[key].double() - truth[key].double()).norm() / truth[key].double().norm().clamp_min(1e-12)).item()
        for key in truth
        if truth[key].is_floating_point()
    )


@pytest.mark.slow
def test_a_chain_of_plans_trains_as_one_process_does(start, capfd):
    truth = start(*COMMON, *ALONE, "train.steps=8", folder="alone").folder
    capfd.readouterr()
    folder = moved(start, CHAIN[:4])
    assert largest(tensors(folder), tensors(truth)) <= 1e-5
    ours, theirs = (
        json.loads((one / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]) for one in (folder, truth)
    )
    assert ours["step"] == theirs["step"] == 8
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    assert ours["lr"] == theirs["lr"]
    printed = capfd.readouterr().out
    assert printed.count("resume: moved to another plan: world_size was") == 3
    assert "random numbers" not in printed


@pytest.mark.slow
def test_all_stages_go_on_with_the_learning_rate_of_a_run_without_stages(start):
    """That run has resumed a pipeline itself; no parameter is on two stages."""
    words = "model.target=networks.Classifier", "train.log_every=1"
    staged = ("world_size=2", "parallel=data_parallel", "parallel.pipeline.stages=2")
    truth = start(*COMMON, *words, *ALONE, "train.steps=6", folder="alone").folder
    folder = moved(start, [staged, ("world_size=2", "parallel=data_parallel"), staged], *words)
    assert largest(tensors(folder), tensors(truth)) <= 1e-5


ENGINES = [
    ("world_size=2", "parallel=data_parallel", "parallel.zero={stage: 1, engine: deepspeed}"),
    ("world_size=3", "parallel=data_parallel", "parallel.zero={stage: 2, engine: native}"),
    ("world_size=2", "parallel=data_parallel", "parallel.zero={stage: 1, engine: native}", "train.accumulate=2"),
    ("world_size=3", "parallel=data_parallel", "parallel.zero={stage: 2, engine: deepspeed}"),
    ("world_size=4", "parallel=data_parallel", "parallel.zero={stage: 1, engine: native}",
     "parallel.pipeline.cuts={leave: 1}", "parallel.pipeline.stages=2"),
]  # fmt: skip


@pytest.mark.slow
def test_engines_of_zero_continue_each_others_runs(start):
    """On other numbers of ranks, of which 3 do not divide the parameters."""
    words = ("data.batch_size=24", "data.args.rows=48")
    truth = start(*COMMON, *words, *ALONE, "train.steps=10", folder="alone").folder
    assert largest(tensors(moved(start, ENGINES, *words)), tensors(truth)) <= 1e-5


@pytest.mark.slow
def test_half_precision_moves_its_masters(start):
    """Resumed in fp32, a bf16 run continues with the fp32 weights and states of its optimizer."""
    first = start(*COMMON, *CHAIN[1], "train.precision=bf16", "train.steps=2", folder="run-0").folder
    before = tensors(first)
    assert {tensor.dtype for key, tensor in before.items() if key.startswith("model/")} == {torch.float32}
    still = ("optimizer.args.lr=0.01", "train.precision=bf16", "train.steps=4")
    stayed = start(*COMMON, *CHAIN[1], *still, f"train.resume={first}", folder="stayed").folder
    went = start(*COMMON, *CHAIN[0], *still, f"train.resume={first}", folder="went").folder
    wide = start(
        *COMMON, *ALONE, "train.precision=fp32", "train.steps=4", f"train.resume={first}", folder="wide"
    ).folder
    truth = tensors(stayed)
    assert 0 < largest(tensors(wide), truth) <= 2e-2
    assert largest(tensors(went), truth) <= 2e-2


@pytest.mark.slow
def test_another_batch_size_goes_on_at_the_same_place_of_the_epoch(start, capfd):
    """50 rows in batches of 16: after 2 steps the epoch is at row 32, in the third batch of 15 (from row 30)."""
    first = start(*COMMON, *CHAIN[1], "train.steps=2", folder="run-0").folder
    assert checkpoints.read(checkpoints.newest(first / "checkpoints")).header.position == (0, 32)
    capfd.readouterr()
    words = (*COMMON, *CHAIN[4], f"train.resume={first}", "train.steps=4")
    second = start(*words, folder="run-1").folder
    assert checkpoints.read(checkpoints.newest(second / "checkpoints")).header.position == (1, 15)
    printed = capfd.readouterr().out
    assert "resume: the data changes: data.batch_size was 16 and is now 15." in printed


def test_statistics_move_between_modes(start):
    """A batch norm's buffers, and dropout with the random numbers of a single device. The gradient of a bias before a
    batch norm is rounding error alone."""
    words = (*COMMON, "model.target=networks.Classifier", "model.args={norm: true, dropout: 0.3}")
    words = (*words, "optimizer.target=torch.optim.SGD", "optimizer.args={lr: 0.05, momentum: 0.9}")
    truth = start(*words, *ALONE, "train.steps=6", folder="alone").folder
    first = start(*words, *CHAIN[2], "train.steps=2", folder="run-0").folder
    second = start(*words, *CHAIN[1], "train.steps=4", f"train.resume={first}", folder="run-1").folder
    third = start(*words, *CHAIN[2], "train.steps=6", f"train.resume={second}", folder="run-2").folder
    found = tensors(third)
    assert "model/norm.running_var" in found and "model/norm.num_batches_tracked" in found
    kept = {key: tensor for key, tensor in tensors(truth).items() if not key.endswith("/inner.bias")}
    assert largest({key: found[key] for key in kept}, kept) <= 1e-5


def test_other_parameters_and_optimizers_are_refused(start):
    first = start(*COMMON, *CHAIN[1], "train.steps=2", folder="run-0").folder
    resume = (f"train.resume={first}", "train.steps=4")
    with pytest.raises(StrategyError, match=r'optimizer\.target was "torch\.optim\.AdamW" and is now'):
        start(*COMMON, *CHAIN[1], *resume, "optimizer.target=torch.optim.Adam", folder="run-1")
    with pytest.raises(StrategyError, match=r"inner\.weight is not there in it"):
        start(*COMMON, *CHAIN[1], *resume, "model.target=networks.Classifier", folder="run-1")


ADAFACTOR = ("optimizer.target=torch.optim.Adafactor", "optimizer.args={lr: 0.01}", "optimizer.scheduler.target=null")
PAIRS = {
    "a state that has not the parameter's shape": (
        ("world_size=2", "parallel=data_parallel", *ADAFACTOR),
        (*ALONE, *ADAFACTOR),
        1e-5,
    ),
    "states in the host's memory": (
        ("world_size=2", "parallel=data_parallel", "parallel.zero.stage=3", "parallel.offload={optimizer: host}"),
        ("world_size=4", "parallel=data_parallel", "parallel.zero.stage=1"),
        1e-5,
    ),
    "a loss scale": (
        ("world_size=2", "parallel=data_parallel", "parallel.zero.stage=2", "train.precision=fp16"),
        ("world_size=4", "parallel=data_parallel", "train.precision=fp16"),
        2e-2,
    ),
    "double precision": (
        ("world_size=2", "parallel=data_parallel", "train.precision=fp64"),
        (*ALONE, "train.precision=fp64"),
        1e-10,
    ),
    "a module that communicates itself": (
        ("world_size=4", *HYBRID),
        ("world_size=2", *HYBRID, "parallel.mesh={dp: 2, tp: 1}"),
        1e-5,
    ),
    "parameters of shape () on servers": (
        (*ALONE, "model.target=networks.Scalars"),
        ("world_size=3", "parallel=parameter_server", "model.target=networks.Scalars"),
        1e-5,
    ),
    "parameters of shape ()": (
        (*ALONE, "model.target=networks.Scalars"),
        ("world_size=2", "parallel=data_parallel", "parallel.zero.stage=1", "model.target=networks.Scalars"),
        1e-5,
    ),
    "parameters that ranks slice in two dims": (
        ("world_size=4", "parallel=semi_auto", "parallel.strategies.enter.matmul=[[1,2],[2,2]]"),
        ("world_size=3", "parallel=semi_auto", "parallel.strategies.enter.matmul=[[1,3],[3,1]]"),
        1e-5,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PAIRS)
def test_there_and_back(start, kind):
    """Two steps under one plan, two under another and two under the first equal six under the first."""
    here, there, tolerance = PAIRS[kind]
    truth = start(*COMMON, *here, "train.steps=6", folder="stayed").folder
    assert largest(tensors(moved(start, [here, there, here])), tensors(truth)) <= tolerance
