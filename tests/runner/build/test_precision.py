"""fp16 with loss scaling, autocast and bf16: verified against one process in the same precision; all ranks skip the
steps whose gradients overflow."""

import pytest
from composing import compose_config
from small import MODES, SMALL

from runner.errors import ConfigError

HALF = "train.precision=fp16"
SUMMED = ("loss.args.reduction=sum", "train.steps=8")  # gradients beyond 2, so that a scale of 2**15 overflows
CASES = {
    "fp16, stage 0": (*MODES["semi_auto"], HALF, "train.accumulate=2", "train.clip=0.1"),
    "fp16, stage 1": (*MODES["semi_auto"], HALF, "parallel.zero.stage=1"),
    "fp16, stage 2": (*MODES["data_parallel"], HALF, "parallel.zero.stage=2", "train.accumulate=2"),
    "fp16, stage 3": (*MODES["semi_auto"], HALF, "parallel.zero.stage=3", "train.clip=0.1"),
    "bf16": (*MODES["semi_auto"], "train.precision=bf16"),
    "autocast": (*MODES["semi_auto"], "train.precision=bf16_autocast", "train.accumulate=2", "train.clip=0.1"),
    "autocast, stage 3": (*MODES["data_parallel"], "train.precision=bf16_autocast", "parallel.zero.stage=3"),
}
QUICK = ("fp16, stage 0", "autocast")


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_verified(start, case):
    words = ("model.args.dropout=0.25", "verify.steps=2")
    verdict = start(*SMALL, *words, *CASES[case], verb="verify").verdict
    assert verdict["passed"] and verdict["tolerance"] == 2e-2


def scales(ended):
    return [(record["loss_scale"], record["skipped_steps"]) for record in ended.records]


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_steps_that_overflow_are_left_out(start, stage, capfd):
    """A skipped step halves the scale and records no gradient norm."""
    ended = start(*SMALL, *SUMMED, HALF, *MODES["data_parallel"], f"parallel.zero.stage={stage}", "train.log_every=1")
    found = scales(ended)
    last = found[-1][1]
    assert 0 < last < 8
    assert all(scale == 2.0 ** (15 - skipped) for scale, skipped in found)
    before = [0, *(skipped for _, skipped in found)]
    for record, was in zip(ended.records, before[:-1], strict=True):
        assert (record["grad_norm"] is None) == (record["skipped_steps"] > was)
    assert ended.losses[-1] != ended.losses[0]
    assert f"overflowed in {last} of 8 steps" in capfd.readouterr().out


def test_a_constant_scale_stays(start):
    words = (*SUMMED, HALF, "train.loss_scale=16", "parallel.reduce_precision=own")
    assert scales(start(*SMALL, *words, *MODES["semi_auto"])) == [(16.0, 0)] * 8
    assert "loss_scale" not in start(*SMALL, *MODES["stand_alone"], "train.steps=1", "world_size=1").records[0]


def test_bytes_of_wide_sums_are_as_predicted(start):
    words = ("train.precision=bf16", "parallel.zero.stage=0", "train.log_every=100")
    wide, narrow = (
        start(*SMALL, *MODES["semi_auto"], *words, f"parallel.reduce_precision={how}", folder=how)
        for how in ("fp32", "own")
    )
    for ended in (wide, narrow):
        predicted, sent = ended.plan["communication"], ended.results[-1]["sent"]
        norm = 2 * 6 * (4 - 1) // 3 * 2  # of the last step: all-reduce of a double on 4 ranks sends 2 (n - 1) / n of it
        assert {kind: sent[kind] - 6 * count for kind, count in predicted.items()}.keys() == sent.keys()
        assert all(0 <= sent[kind] - 6 * count <= norm for kind, count in predicted.items())
    assert sum(wide.plan["communication"].values()) > sum(narrow.plan["communication"].values())


def test_a_scale_is_for_fp16(command):
    done = command(*SMALL, "train.loss_scale=8", *MODES["data_parallel"])
    assert done.code == 2 and len(done.paragraphs) == 1
    assert "[MW205]" in done.err and "train.loss_scale = 8" in done.err and "train.precision = 'fp32'" in done.err


def test_missing_fp16_is_reported_before_anything_starts():
    from runner.planning.prepare import prepare

    with pytest.raises(ConfigError, match=r"train\.precision = fp16 cannot be used with this model on a CPU"):
        prepare(compose_config(*SMALL, HALF, "model.target=networks.Inverse", *MODES["data_parallel"]), None)
