"""Recipe unet_tiles on small pictures with other features: equal to one device, in the memory that was predicted."""

import json

import pytest

TILES = ("+recipe=unet_tiles", "data.args.height=64", "data.args.width=32", "train.log_every=1")


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("parallel.recompute.operators=full",),
        ("train.accumulate=2",),
        ("world_size=8", "parallel.pipeline.stages=2", "parallel.pipeline.micro_batches=2"),
    ],
    ids=" ".join,
)
def test_tiles_equal_one_device(start, overrides):
    assert start(*TILES, "train.steps=2", *overrides, verb="verify").value < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_tiles_with_zero(start, stage):
    run = start(*TILES, "train.precision=fp32", f"parallel.zero.stage={stage}", "train.steps=2", verb="verify")
    assert run.verdict["passed"]


@pytest.mark.slow
@pytest.mark.parametrize("operators", ["none", "full"])
def test_memory_of_tiles_is_predicted(start, operators):
    run = start(*TILES, "train.measure_memory=true", f"parallel.recompute.operators={operators}", "train.steps=3")
    content = json.loads((run.folder / "memory.json").read_text(encoding="utf-8"))
    measured = max(one["peak"] for one in content["measured"])
    assert content["predicted"]["peak"] == pytest.approx(measured, rel=0.002)


@pytest.mark.slow
def test_the_picture_itself_has_no_gradient_to_exchange(start):
    run = start(*TILES, "train.steps=2")
    first = next(one for one in run.plan["operators"] if one["name"].startswith("first.conv1"))
    assert [bool(one["backward"]) for one in first["redistributions"] if one["forward"]] == [False]
