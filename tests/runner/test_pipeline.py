"""Pipelines on real ranks: one process agrees, bytes are those predicted, runs go on bit for bit, bad ones are told."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from small import MODES, SMALL

from runner import checkpoint
from runner.sections.pipeline import Pipeline

TWO = (*SMALL, *MODES["data_parallel"], "parallel.pipeline.cuts={outer: 1}", "parallel.pipeline.stages=2")
TIED = (*SMALL, "parallel=data_parallel", "model.target=networks.Tied", "parallel.pipeline.stages=2")
RANDOM = ("model.args.dropout=0.3", "model.args.norm=true", "train.random=exact")
KINDS = {
    "1f1b": (*TWO, *RANDOM[:1], "train.clip=0.05"),
    "gpipe and accumulation": (*TWO, "parallel.pipeline.schedule=gpipe", "train.accumulate=2", "data.batch_size=32"),
    "tied": (*TIED, "parallel.pipeline.cuts={leave: 1}", "optimizer.target=torch.optim.AdamW", "train.clip=0.01"),
    "one rank per stage": (*TIED, "world_size=2", "parallel.pipeline.micro_batches=3", "data.batch_size=12"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_agrees(start, kind):
    ended = start(*KINDS[kind], "train.precision=fp64", "verify.steps=2", verb="verify")
    assert ended.verdict["passed"] and ended.value <= 1e-10


def test_low_precision_is_updated_from_masters(start):
    ended = start(*TIED, "parallel.pipeline.cuts={leave: 1}", "train.precision=bf16", "verify.steps=2", verb="verify")
    assert ended.verdict["passed"]
    assert max(ended.verdict["weight_max_rel_diff"].values()) == 0


def test_plan_tells_stages_and_the_bytes_sent(start):
    ended = start(*TWO, "train.steps=3", "train.log_every=100", "parallel.dump_ir=true")
    pipeline = ended.plan["pipeline"]
    assert {operator["name"]: operator["stage"] for operator in ended.plan["operators"]}["outer"] == 1
    assert ended.plan["parameters"]["inner.weight"]["stages"] == [0]
    assert (pipeline["stages"], pipeline["micro_batches"], pipeline["schedule"]) == (2, 4, "1f1b")
    predicted = pipeline["communication"][0]
    assert predicted["send"] == 4 * 2 * 16 * 4  # micro-batches x rows of a rank x columns x bytes
    norm = -(-2 * 3 // 4) * 8  # measured in the last step, over four ranks
    assert ended.results[-1]["sent"] == {kind: 3 * n + norm * (kind == "all_reduce") for kind, n in predicted.items()}
    text = [(ended.folder / "ir" / f"rank_{rank}" / "step_parallel_end.ir").read_text() for rank in range(4)]
    assert "stage 0 of 2" in text[1] and "inner.weight" in text[1] and "outer.weight" not in text[1]
    assert "stage 1 of 2" in text[2] and "outer.weight" in text[2] and "inner.weight" not in text[2]


def stored(folder):
    path = checkpoint.newest(folder / "checkpoints")
    tensors = {key: torch.empty(size, dtype=dtype) for key, (size, dtype) in checkpoint._stored(path).items()}
    checkpoint._read(path, tensors)
    return tensors


def test_a_run_goes_on_bit_for_bit(start):
    words = (*TWO, *RANDOM, "optimizer.target=torch.optim.AdamW", "checkpoint.every=2")
    whole = start(*words, "train.steps=4", folder="whole")
    start(*words, "train.steps=2", folder="parts")
    parts = start(*words, "train.steps=4", "train.resume=auto", folder="parts")
    assert parts.value == whole.value
    ours, truth = stored(parts.folder), stored(whole.folder)
    assert ours.keys() == truth.keys() and any(key.startswith("model/outer.weight") for key in truth)
    assert [key for key in truth if not torch.equal(ours[key], truth[key])] == []


CUTS = "parallel.pipeline.cuts"
BAD = [
    (("parallel.pipeline.micro_batches=1",), ("micro_batches = 1 is less than parallel.pipeline.stages = 2",)),
    (("parallel.pipeline.micro_batches=3",), ("data.batch_size = 16", "micro_batches = 3", "a multiple of 3")),
    (("world_size=5",), ("world_size = 5", "parallel.pipeline.stages = 2", "a multiple of 2")),
    (("parallel.pipeline.stages=1",), ("parallel.pipeline.stages", "2")),
    ((f"{CUTS}.outer=2",), ("outer = 2", "stages 0 to 1")),
    (("parallel.pipeline.schedule=zero_bubble",), ("comes later", "1f1b or gpipe")),
    (("parallel.zero.stage=1",), ("parallel.zero.stage = 0 only", "parallel.pipeline.stages=null")),
    (("train.compile=true",), ("train.compile = true", "parallel.pipeline.stages = 2")),
    (("evaluate.metric=accuracy",), ("evaluate.metric=null", "parallel.pipeline.stages = 2")),
    (("parallel.mode=stand_alone", "world_size=1"), ("parallel.mode = 'stand_alone'", "stages=null")),
    (("parallel.pipeline.stages=null",), ("parallel.pipeline.cuts is given", "stages=N")),
    (
        ("parallel.comm_fusion.all_reduce={mode: index, config: [1]}",),
        ("all_reduce.mode = 'index'", "choose mode auto or size"),
    ),
    (("parallel.mode=auto", "parallel.mesh={dp: 4}"), ("4 devices", "world_size / parallel.pipeline.stages = 2")),
    ((f"~{CUTS}.outer", f"+{CUTS}.outr=1"), ("'outr' is no module", "Did you mean 'outer'?")),
    ((f"+{CUTS}.inner=1", f"{CUTS}.outer=0"), ("outer = 0 comes before what it uses", "in stage 1")),
    (("data.batch_size=12",), ("a micro-batch has 3 samples", "parallel.pipeline.micro_batches")),
]


@pytest.mark.parametrize(("words", "told"), BAD, ids=[words[0] for words, _ in BAD])
def test_refused(command, left, words, told):
    done = command("plan", *TWO, *words)
    assert done.code == 2
    (paragraph,) = done.paragraphs
    assert [text for text in told if text not in paragraph] == []
    assert left() == []


def test_nested_cuts_are_one_path():
    section = {"stages": 2, "micro_batches": None, "schedule": "1f1b", "cuts": {"layers": {"2": 1}, "a.b": 0}}
    read = Pipeline.model_validate(section)
    with pytest.raises(ValidationError, match="names no module; write auto"):
        Pipeline.model_validate(section | {"cuts": {}})
    assert read.cuts == {"layers.2": 1, "a.b": 0} and read.parts == 4
