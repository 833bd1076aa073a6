"""parallel.copies in a config: errors before anything starts, and the content of the plan."""

from __future__ import annotations

import json
from unittest.mock import Mock

import pytest

from runner.planning import lowering

GPT = "+recipe=gpt"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (
            ["+recipe=data_parallel", "parallel.mode=stand_alone", "parallel.copies=2"],
            ("parallel.mode = 'stand_alone'", "or parallel.copies=1."),
        ),
        (["+recipe=hybrid_matmul", "parallel.copies=2"], ("parallel.mode = 'hybrid'",)),
        ([GPT, "parallel.copies=0"], ("parallel.copies = 0",)),
        (
            [GPT, "parallel.copies=3"],
            ("parallel.copies = 3 divides the rows of a micro-batch, but there are 16 (data.batch_size = 16 in 1",),
        ),
        (
            [GPT, "parallel.copies=8"],
            ("parallel.copies = 8 leaves 2 rows of a micro-batch to each copy", "models/"),
        ),
        (
            ["+recipe=resnet", "parallel.copies=2"],
            ("bn1.batch_norm (batch_norm_training, models/resnet.py:", "mixes the rows of the batch"),
        ),
    ],
)
def test_what_cannot_be_is_refused(command, words, texts):
    done = command("plan", *words)
    assert done.code == 2
    assert [text for text in texts if text not in done.err] == []


def test_the_plan_lists_the_batch_splits(command, monkeypatch, tmp_path):
    monkeypatch.setattr(lowering, "capture", capture := Mock(wraps=lowering.capture))
    done = command("explain", "+recipe=gpt_multi_copy", f"hydra.run.dir={tmp_path}/run", "parallel.dump_ir=true")
    assert done.code == 0, done.err
    assert capture.call_count == 1  # for all plans that the search compares
    assert (
        "batch splits: 2 of 8 rows of a micro-batch, 50 operators for each; once for all: arange, positions, loss"
        in done.out
    )
    assert "operand 0, copy 1, backward: all_reduce over tp" in done.out
    plan = json.loads((tmp_path / "run" / "plan.json").read_text(encoding="utf-8"))
    assert (plan["copies"]["count"], plan["copies"]["rows"]) == (2, 8)
    (up,) = (one for one in plan["operators"] if one["name"] == "layers.0.feed_forward.up_proj")
    assert up["shapes"][0] == [16, 64, 64]  # the model's operator, for the full batch
    assert [one["copy"] for one in up["redistributions"]] == [0, 1]
    end = (tmp_path / "run" / "ir" / "rank_0" / "step_parallel_end.ir").read_text(encoding="utf-8")
    assert "of layers.0.feed_forward.up_proj~1: " in end and " = start(" in end


@pytest.mark.slow
def test_bytes_do_not_depend_on_the_copies(command, tmp_path):
    sent = []
    for copies in (1, 2):
        run = tmp_path / str(copies)
        assert command("plan", "+recipe=megatron_tp", f"parallel.copies={copies}", f"hydra.run.dir={run}").code == 0
        sent.append(json.loads((run / "plan.json").read_text(encoding="utf-8"))["communication"])
    assert sent[0] == sent[1]
