"""Pipelines on real ranks: agreement with one process, predicted bytes, bit-exact resumes, errors for bad configs."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from small import MODES, SMALL

from runner import checkpoint as checkpoints
from runner.config.parallel import Pipeline

TWO = (*SMALL, *MODES["data_parallel"], "parallel.pipeline.cuts={outer: 1}", "parallel.pipeline.stages=2")
TIED = (*SMALL, "parallel=data_parallel", "model.target=networks.Tied", "parallel.pipeline.stages=2")
RANDOM = ("model.args.dropout=0.3", "model.args.norm=true", "train.random=exact")
STACK = (
    *SMALL,
    *("parallel=data_parallel", "model.target=networks.Stack", "model.args.dropout=0.2", "parallel.pipeline.stages=2"),
    *("optimizer.target=torch.optim.AdamW", "train.clip=0.05", "train.random=exact"),
)
"""A weight of two stages, dropout and clipping."""
DEALT = (*STACK, "parallel.pipeline.cuts={layers.1: 1, layers.2: 2, layers.3: 3}")
INTERLEAVED = (*DEALT, "parallel.pipeline.schedule=interleaved_1f1b")
BUBBLE = (*STACK, "parallel.pipeline.cuts={layers.2: 1}", "parallel.pipeline.schedule=zero_bubble")
V = (*DEALT, "parallel.pipeline.schedule=zbv")
BUBBLES = (*DEALT, "parallel.pipeline.schedule=zero_bubble", "parallel.pipeline.virtual_stages=2")
LAYERS = "parallel.recompute=full"
KINDS = {
    "1f1b": (*TWO, *RANDOM[:1], "train.clip=0.05"),
    "gpipe and accumulation": (*TWO, "parallel.pipeline.schedule=gpipe", "train.accumulate=2", "data.batch_size=32"),
    "tied": (*TIED, "parallel.pipeline.cuts={leave: 1}", "optimizer.target=torch.optim.AdamW", "train.clip=0.01"),
    "one rank per stage": (*TIED, "world_size=2", "parallel.pipeline.micro_batches=3", "data.batch_size=12"),
    "interleaved": (*INTERLEAVED, "train.accumulate=2", "data.batch_size=32"),
    "zero bubble": BUBBLE,
    "zero bubble of virtual stages, recomputed": (*BUBBLES, "world_size=2", LAYERS),
    "synthesised, three stages that hold one weight": (
        *(*STACK, "world_size=3", "parallel.pipeline.stages=3", "parallel.pipeline.cuts={layers.1: 1, layers.2: 2}"),
        *("parallel.pipeline.schedule=auto", "parallel.pipeline.micro_batches=4"),
    ),
    "V, accumulated": (*V, "train.accumulate=2", "data.batch_size=32", "world_size=2"),
    "interleaved, offloaded": (*INTERLEAVED, "world_size=2", "parallel.offload.activations.to=host"),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_one_process_agrees(start, kind):
    ended = start(*KINDS[kind], "train.precision=fp64", "verify.steps=2", verb="verify")
    assert ended.verdict["passed"] and ended.value <= 1e-10


def test_groups_share_weights_that_their_stages_use_in_different_orders(start):
    """The stages of one group use the weights of layers 0 and 2 first, those of the other the weights of 1 and 3."""
    words = (*INTERLEAVED, "model.args.inner_tied=true", "world_size=2", "train.precision=fp64")
    ended = start(*words, verb="verify")
    assert ended.verdict["passed"] and ended.value <= 1e-10


ZERO_KINDS = {
    "interleaved, recomputed": (*INTERLEAVED, LAYERS),
    "V": (*V, "train.accumulate=2", "data.batch_size=32"),
    "zero bubble": (*BUBBLE, "train.accumulate=2", "data.batch_size=32"),
    "one rank per stage": (*STACK, "world_size=2"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "precision"),
    [
        pytest.param(
            ZERO_KINDS[kind],
            precision,
            id=f"{precision}-{kind}",
            marks=[pytest.mark.slow] * (precision == "bf16" or kind != "zero bubble"),
        )
        for precision in ("fp32", "bf16")
        for kind in ZERO_KINDS
    ],
)
def test_zero_in_every_stage(start, words, precision):
    ended = start(*words, "parallel.zero.stage=1", f"train.precision={precision}", "verify.steps=3", verb="verify")
    assert ended.verdict["passed"]
    assert max(ended.verdict["weight_max_rel_diff"].values()) <= (1e-6 if precision == "fp32" else 1e-2)


NOTHING = (
    *(*SMALL, "parallel=data_parallel", "model.target=networks.Scaled", "model.args.hidden=15"),
    *("parallel.pipeline.stages=2", "parallel.pipeline.cuts={net: 1}"),
)
UNEVEN = {
    "padding": (*TWO, "model.args.hidden=15"),
    "nothing on a rank": NOTHING,
    "nothing on a rank, accumulated, offloaded": (
        *(*NOTHING, "train.accumulate=2", "data.batch_size=32", "parallel.offload.optimizer=host"),
    ),
    "virtual stages": (*INTERLEAVED, "model.args.width=5"),
    "slices": (
        *(*SMALL, "parallel=auto", "parallel.strategies.inner.matmul=[[1,1],[1,2]]", "world_size=8"),
        *("parallel.pipeline=2", "parallel.mesh={dp: 2, tp: 2}", "model.args.hidden=18"),
    ),
}
"""What a stage holds does not divide by its ranks, of which some hold nothing of a parameter."""


@pytest.mark.parametrize("kind", [pytest.param(one, marks=[pytest.mark.slow] * (one != "padding")) for one in UNEVEN])
def test_zero_of_a_stage_that_does_not_divide(start, kind):
    """With plain SGD a wrong norm is a wrong step; the norms are well above the clipping threshold."""
    sgd = ("optimizer.target=torch.optim.SGD", "optimizer.args={lr: 10.0}", "train.clip=0.01")
    ended = start(*UNEVEN[kind], *sgd, "parallel.zero.stage=1", "verify.steps=2", verb="verify")
    assert ended.verdict["passed"]
    assert max(ended.verdict["weight_max_rel_diff"].values()) <= 1e-6


def test_low_precision_is_updated_from_masters(start):
    ended = start(*TIED, "parallel.pipeline.cuts={leave: 1}", "train.precision=bf16", "verify.steps=2", verb="verify")
    assert ended.verdict["passed"]
    assert max(ended.verdict["weight_max_rel_diff"].values()) == 0


def test_plan_reports_stages_and_the_bytes_sent(start):
    ended = start(*TWO, "train.steps=3", "train.log_every=100", "parallel.dump_ir=true")
    pipeline = ended.plan["pipeline"]
    assert {operator["name"]: operator["stage"] for operator in ended.plan["operators"]}["outer"] == 1
    assert ended.plan["parameters"]["inner.weight"]["stages"] == [0]
    assert (pipeline["stages"], pipeline["micro_batches"], pipeline["schedule"]) == (2, 4, "1f1b")
    predicted = pipeline["communication"][0]
    assert predicted["send"] == 4 * 2 * 16 * 4  # micro-batches x rows per rank x columns x bytes
    norm = -(-2 * 3 // 4) * 8  # measured in the last step, over four ranks
    assert ended.results[-1]["sent"] == {kind: 3 * n + norm * (kind == "all_reduce") for kind, n in predicted.items()}
    text = [
        (ended.folder / "ir" / f"rank_{rank}" / "step_parallel_end.ir").read_text(encoding="utf-8") for rank in range(4)
    ]
    assert "stage 0 of 2" in text[1] and "inner.weight" in text[1] and "outer.weight" not in text[1]
    assert "stage 1 of 2" in text[2] and "outer.weight" in text[2] and "inner.weight" not in text[2]


def test_plan_reports_a_v(start):
    """The first and the last stage, which hold one weight, are those of the same ranks: nothing is added over groups,
    and the stages in the tip of the V hand on what others send."""
    plan = start(*V, verb="plan").plan
    pipeline = plan["pipeline"]
    assert (pipeline["stages"], pipeline["virtual_stages"], pipeline["groups"]) == (2, 2, [0, 1, 1, 0])
    assert pipeline["held"] == [4, 4] and pipeline["schedule"] == "zbv"
    placed = {operator["name"]: (operator["stage"], operator["group"]) for operator in plan["operators"]}
    assert placed["layers.0.0"] == (0, 0) and placed["layers.2.0"] == (2, 1) and placed["layers.3.0"] == (3, 0)
    sent = 4 * 2 * 2 * 12 * 4  # micro-batches x (a value and a gradient) x rows x columns x 4, from either group
    assert [one["send"] for one in pipeline["communication"]] == [sent, sent]


def test_auto_takes_the_faster_placement(start):
    """With two stages per rank; every schedule in a V keeps the memory of the one dealt out round robin."""
    ended = start(*DEALT, "parallel.pipeline.virtual_stages=2", "parallel.pipeline.schedule=auto", verb="plan")
    assert ended.plan["pipeline"]["groups"] == [0, 1, 1, 0]
    assert ended.plan["search"]["cost"] == pytest.approx(ended.plan["cost"]["total"])


@pytest.mark.slow
def test_synthesised_with_virtual_stages(start):
    """With accumulation, recomputation and ZeRO; the cost is that of the schedule."""
    words = (
        *(*DEALT, "parallel.pipeline.virtual_stages=2"),
        *("parallel.pipeline.schedule=auto", "parallel.pipeline.micro_batches=4", "train.accumulate=2"),
        *("data.batch_size=32", LAYERS, "parallel.zero.stage=1"),
    )
    ended = start(*words, "verify.steps=2", verb="verify")
    assert ended.verdict["passed"]
    assert max(ended.verdict["weight_max_rel_diff"].values()) <= 1e-6
    pipeline = ended.plan["pipeline"]
    assert pipeline["schedule"] == "auto" and len(pipeline["actions"]) == 2 and len(pipeline["seconds"]) == 4
    assert ended.plan["search"]["cost"] == pytest.approx(ended.plan["cost"]["total"])


def test_plan_reports_virtual_stages(start):
    ended = start(*INTERLEAVED, "train.steps=2", "train.log_every=100", "parallel.dump_ir=true")
    pipeline = ended.plan["pipeline"]
    assert (pipeline["stages"], pipeline["virtual_stages"], pipeline["held"]) == (2, 2, [5, 3])
    assert 1 / 9 <= pipeline["bubble"] < 1
    placed = {operator["name"]: (operator["stage"], operator["group"]) for operator in ended.plan["operators"]}
    assert placed["layers.0.0"] == (0, 0) and placed["layers.2.0"] == (2, 0) and placed["layers.3.0"] == (3, 1)
    assert ended.plan["parameters"]["layers.0.0.weight"]["stages"] == [0, 3]
    predicted = pipeline["communication"][0]
    assert predicted["send"] == 4 * (2 + 1) * 2 * 12 * 4  # micro-batches x (values and gradients) x rows x columns x 4
    norm = -(-2 * 3 // 4) * 8  # the clipping norm, in every step
    assert ended.results[-1]["sent"] == {
        kind: 2 * n + 2 * norm * (kind == "all_reduce") for kind, n in predicted.items()
    }
    folder = ended.folder / "ir" / "rank_1"
    assert "stage 0 of 4" in (folder / "step_parallel_end.ir").read_text(encoding="utf-8")
    assert "stage 2 of 4" in (folder / "step_parallel_end_2.ir").read_text(encoding="utf-8")


@pytest.mark.slow
def test_recompute_in_a_pipeline_stores_less(start):
    plans = [start(*INTERLEAVED, *words, "train.steps=1", folder=str(len(words))).plan for words in ((), (LAYERS,))]
    (plain, less) = plans
    assert plain["recompute"] is None and less["recompute"]["modules"] == [f"layers.{n}" for n in range(4)]
    assert less["recompute"]["stored_bytes"] < less["recompute"]["stored_bytes_without"]
    for ours, theirs in zip(less["pipeline"]["memory"], plain["pipeline"]["memory"], strict=True):
        assert ours["activations"] < theirs["activations"]


def stored(folder):
    path = checkpoints.newest(folder / "checkpoints")
    opened = checkpoints.read(path)
    tensors = {key: opened.read(key) for key in opened.tensors}
    return tensors


LEARNED = (
    *(*SMALL, "parallel=data_parallel", "model.target=networks.TwoHeads", "loss.target=networks.WeighedLoss"),
    "parallel.pipeline.stages=2",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "trained"), [((*TWO, *RANDOM), "outer.weight"), (LEARNED, "loss.balance")], ids=["model", "and loss"]
)
def test_a_run_goes_on_bit_for_bit(start, words, trained):
    words = (*words, "optimizer.target=torch.optim.AdamW", "checkpoint.every=2")
    uninterrupted = start(*words, "train.steps=4", folder="uninterrupted")
    start(*words, "train.steps=2", folder="parts")
    parts = start(*words, "train.steps=4", "train.resume=auto", folder="parts")
    assert parts.value == uninterrupted.value
    ours, truth = stored(parts.folder), stored(uninterrupted.folder)
    assert ours.keys() == truth.keys() and any(key.startswith(f"model/{trained}") for key in truth)
    assert [key for key in truth if not torch.equal(ours[key], truth[key])] == []


@pytest.mark.slow
def test_schedules_train_to_the_same_bits(start):
    cuts, steps = "parallel.pipeline.cuts={layers.2: 1}", ("train.steps=2", "checkpoint.every=2")
    ended = [
        start(*STACK, cuts, *steps, f"parallel.pipeline.schedule={kind}", folder=kind).folder
        for kind in ("gpipe", "1f1b", "zero_bubble")
    ]
    (truth, *others) = map(stored, ended)
    weights = [key for key in truth if key.startswith("model/")]
    assert weights
    for found in others:
        assert [key for key in weights if not torch.equal(found[key], truth[key])] == []


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(INTERLEAVED, id="interleaved", marks=pytest.mark.slow),
        pytest.param(BUBBLES, id="zero bubble", marks=pytest.mark.slow),
        pytest.param(V, id="V", marks=pytest.mark.slow),
    ],
)
def test_a_sharded_run_goes_on_bit_for_bit(start, words):
    words = (*words, "parallel.zero.stage=1", "checkpoint.every=2")
    uninterrupted = start(*words, "train.steps=4", folder="uninterrupted")
    start(*words, "train.steps=2", folder="parts")
    parts = start(*words, "train.steps=4", "train.resume=auto", folder="parts")
    assert parts.value == uninterrupted.value
    ours, truth = stored(parts.folder), stored(uninterrupted.folder)
    assert ours.keys() == truth.keys()
    assert [key for key in truth if not torch.equal(ours[key], truth[key])] == []


EVALUATED = ("evaluate.args={rows: 50, seed: 1}", "evaluate.batch_size=12", "evaluate.every=1", "train.steps=2")
MODELS = {
    "virtual stages": (*INTERLEAVED, "evaluate.metric=accuracy", "parallel.zero.stage=1"),
    "V": (*V, "evaluate.metric=accuracy"),
    "written buffers": (*TWO, "model.args.norm=true", "evaluate.metric=accuracy"),
    "two results and a loss with weights": (
        *(*SMALL, "parallel=data_parallel", "model.target=networks.TwoHeads", "loss.target=networks.WeighedLoss"),
        *(
            "parallel.pipeline.stages=2",
            "parallel.pipeline.cuts={second: 1, loss: 1}",
            "evaluate.metric=networks.disagreement",
        ),
    ),
    "a buffer that training reads where it was written": (
        *(*SMALL, "parallel=data_parallel", "model.target=networks.Centred", "parallel.pipeline.stages=2"),
        *("parallel.pipeline.cuts={second: 1}", "world_size=2", "evaluate.metric=accuracy"),
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "model", [pytest.param(one, marks=[pytest.mark.slow] * (one in ("virtual stages", "V"))) for one in MODELS]
)
def test_evaluation_runs_through_the_stages(start, model):
    words = (*MODELS[model], *EVALUATED, "train.precision=fp64" * ("zero" not in str(MODELS[model])))
    words = tuple(word for word in words if word)
    ours = start(*words, folder="ours").evaluations
    alone = [word for word in words if not word.startswith(("parallel", "world_size"))]
    truth = start(*alone, "parallel=stand_alone", "world_size=1", "train.accumulate=4", folder="alone").evaluations
    assert list(ours) == [1, 2]
    assert ours == {step: pytest.approx(values, rel=1e-5) for step, values in truth.items()}


@pytest.mark.slow
@pytest.mark.parametrize("words", [("world_size=2",), ("parallel.zero.stage=1",)], ids=["plain", "sharded"])
def test_stages_are_compiled(start, words):
    ended = start(*INTERLEAVED, *words, "train.compile=true", "verify.steps=2", verb="verify")
    assert ended.verdict["passed"]


CUTS = "parallel.pipeline.cuts"
BAD = [
    (("parallel.pipeline.micro_batches=1",), ("micro_batches = 1 is less than parallel.pipeline.stages = 2",)),
    (("parallel.pipeline.micro_batches=3",), ("data.batch_size = 16", "micro_batches = 3", "a multiple of 3")),
    (("world_size=5",), ("world_size = 5", "parallel.pipeline.stages = 2", "a multiple of 2")),
    (("parallel.pipeline.stages=1",), ("parallel.pipeline.stages", "2")),
    ((f"{CUTS}.outer=2",), ("outer = 2", "stages 0 to 1")),
    (
        ("parallel.pipeline.virtual_stages=2",),
        (
            "schedule = '1f1b' does not go with parallel.pipeline.virtual_stages = 2",
            "interleaved_1f1b, zero_bubble or zbv",
        ),
    ),
    (
        ("parallel.pipeline.schedule=interleaved_1f1b", "parallel.pipeline.virtual_stages=1"),
        ("'interleaved_1f1b' does not go with parallel.pipeline.virtual_stages = 1", "virtual_stages=2 or more"),
    ),
    (
        ("parallel.pipeline.schedule=zbv", "parallel.pipeline.virtual_stages=3"),
        ("'zbv' does not go with parallel.pipeline.virtual_stages = 3", "two stages per rank", "virtual_stages=2"),
    ),
    (
        ("parallel.pipeline.schedule=zero_bubble", "parallel.pipeline.micro_batches=5", "data.batch_size=20"),
        ("micro_batches = 5", "in 2 groups", "a multiple of parallel.pipeline.stages = 2"),
    ),
    (
        ("parallel.pipeline.schedule=interleaved_1f1b", f"{CUTS}.outer=4"),
        ("outer = 4", "stages x virtual_stages = 2 x 2 = 4 has the stages 0 to 3"),
    ),
    (
        ("parallel.pipeline.schedule=interleaved_1f1b", "parallel.pipeline.virtual_stages=9", f"{CUTS}=auto"),
        ("2 x 9 = 18, but the model has only", "operators; take fewer stages"),
    ),
    (("parallel.pipeline.schedule=interleaved_1f1b",), ("leave stage 2 of", "give it a module")),
    (
        ("parallel.zero.stage=2",),
        ("parallel.pipeline.stages = 2 does not go with parallel.zero.stage = 2", "every micro-batch", "stages=null"),
    ),
    (
        ("train.compile=true", "parallel.pipeline.schedule=zero_bubble"),
        ("train.compile = true", "schedule = 'zero_bubble'", "1f1b or interleaved_1f1b"),
    ),
    (("parallel.mode=stand_alone", "world_size=1"), ("parallel.mode = 'stand_alone'", "stages=null")),
    (("train.precision=fp16", "parallel.zero={stage: 1, engine: deepspeed}"), ("'fp16'", "parallel.zero.engine=auto")),
    (("parallel.pipeline.stages=null",), ("parallel.pipeline.stages = null", "set parallel.pipeline.stages=N")),
    (
        ("parallel.comm_fusion.all_reduce={mode: index, config: [1]}",),
        ("all_reduce.mode = 'index'", "choose mode auto or size"),
    ),
    (("parallel.mode=auto", "parallel.mesh={dp: 4}"), ("4 devices", "world_size / parallel.pipeline.stages = 2")),
    ((f"~{CUTS}.outer", f"+{CUTS}.outr=1"), ("'outr' is no module", "Did you mean 'outer'?")),
    ((f"+{CUTS}.inner=1", f"{CUTS}.outer=0"), ("outer = 0 comes before what it uses", "in stage 1")),
    (("data.batch_size=12",), ("a micro-batch has 3 samples", "parallel.pipeline.micro_batches")),
]


@pytest.mark.few(4)
@pytest.mark.parametrize(("words", "texts"), BAD, ids=[words[0] for words, _ in BAD])
def test_refused(command, left, words, texts):
    done = command("plan", *TWO, *words)
    assert done.code == 2
    (paragraph,) = done.paragraphs
    assert [text for text in texts if text not in paragraph] == []
    assert left() == []


def test_nested_cuts_are_one_path():
    section = {
        "stages": 2,
        "virtual_stages": None,
        "micro_batches": None,
        "schedule": "1f1b",
        "cuts": {"layers": {"2": 1}, "a.b": 0},
    }
    read = Pipeline.model_validate(section)
    with pytest.raises(ValidationError, match="names no module; write auto"):
        Pipeline.model_validate(section | {"cuts": {}})
    assert read.cuts == {"layers.2": 1, "a.b": 0} and read.parts == 4
