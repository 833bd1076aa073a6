"""Pipelines and other equal slices on devices of several kinds: stages as long as their devices are fast, recompute
where memory is short, and the cost of the slowest device elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from small import DOUBLE, MODES, SMALL

TWO = ("world_size=2", "parallel=data_parallel", "parallel.pipeline.stages=2", "parallel.pipeline.micro_batches=4")
SLOWER = "cluster.groups=[{devices: 1}, {devices: 1, speed: 0.5}]"
THREE = ("parallel.pipeline.stages=3", "world_size=3",
         "cluster.groups=[{devices: 1}, {devices: 1, speed: 0.3}, {devices: 1}]")  # fmt: skip
GPT = ("model.target=models.gpt.GPT", "loss.target=models.losses.NextTokenLoss", "data.target=runner.data.text.Windows",
       "train.steps=2", "optimizer.target=torch.optim.AdamW", "parallel=data_parallel")  # fmt: skip
KINDS = "cluster.groups=[{devices: 8, like: dgx_h100}, {devices: 8, like: a100}]"


def gpt(layers: int, width: int, length: int) -> tuple[str, ...]:
    sizes = f"{{vocabulary: 256, length: {length}, width: {width}, layers: {layers}, heads: 4}}"
    return (*GPT, f"model.args={sizes}", f"data.args={{length: {length}, train: true}}")


def planned(start: Callable[..., Any], *words: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((start(*words, verb="plan").folder / "plan.json").read_text(encoding="utf-8"))
    return content


def stages_of_layers(content: dict[str, Any]) -> dict[str, int]:
    stages = {".".join(one["module"].split(".")[:2]): one["stage"] for one in content["operators"]}
    return {path: stage for path, stage in stages.items() if path.startswith("layers.")}


@pytest.mark.slow
def test_the_faster_kind_has_the_longer_stage_and_the_step_is_shorter(start: Callable[..., Any]) -> None:
    words = (*gpt(12, 1024, 256), "world_size=16", "cluster=dgx_h100", "cluster.nodes=2", "data.batch_size=128",
             "train.precision=bf16", "parallel.pipeline.stages=2", "parallel.pipeline.micro_batches=8")  # fmt: skip
    equal = stages_of_layers(planned(start, *words))
    assert list(equal.values()).count(0) == 6
    content = planned(start, *words, KINDS)
    own = stages_of_layers(content)
    assert list(own.values()).count(0) > 6
    cuts = ", ".join(f"{path}: {stage}" for path, stage in (equal | {"norm": 1, "head": 1}).items())
    even = planned(start, *words, KINDS, f"parallel.pipeline.cuts={{{cuts}}}")
    assert content["cost"]["total"] < 0.95 * even["cost"]["total"]
    first, second = ({one: sum(times.values()) for one, times in enumerate(plan["pipeline"]["seconds"])}
                     for plan in (even, content))  # fmt: skip
    assert first[1] > 1.2 * first[0] and max(second.values()) < first[1]
    assert content["pipeline"]["clusters"] == ["dgx_h100", "a100"]
    turned = planned(start, *words, "cluster.groups=[{devices: 8, like: a100}, {devices: 8, like: dgx_h100}]")
    assert list(stages_of_layers(turned).values()).count(1) > 6


def test_stages_follow_the_speed_of_their_ranks(start: Callable[..., Any]) -> None:
    words = (*gpt(4, 16, 8), *TWO, "data.batch_size=8", "cluster=one_gpu", "cluster.machine.levels.gpu.size=2")
    content = planned(start, *words, SLOWER)
    assert list(stages_of_layers(content).values()) == [0, 0, 0, 1]
    assert content["pipeline"]["clusters"] == ["one_gpu", "one_gpu x 0.5"]
    assert content["pipeline"]["memory_limits"][0] == content["pipeline"]["memory_limits"][1]


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("parallel.pipeline.schedule=auto",), THREE])
def test_stages_by_speed_equal_one_device(words: tuple[str, ...], start: Callable[..., Any]) -> None:
    ended = start(*gpt(4, 16, 8), *TWO, "data.batch_size=8", SLOWER, *words, DOUBLE, "verify.steps=2", verb="verify")
    assert ended.value < 1e-10


@pytest.mark.slow
def test_only_stages_whose_devices_are_too_small_recompute(start: Callable[..., Any]) -> None:
    words = (*gpt(8, 64, 64), *TWO, "data.batch_size=64", "cluster=one_gpu", "cluster.machine.levels.gpu.size=2",
             "cluster.groups=[{devices: 1, like: one_gpu}, {devices: 1}]")  # fmt: skip
    free = planned(start, *words)
    limit = int(free["pipeline"]["memory"][1]["peak"] * 0.8)
    content = planned(start, *words, f"cluster.machine.memory={limit}", "parallel.recompute=auto")
    layers = stages_of_layers(content)
    assert {layers[path] for path in content["recompute"]["modules"]} == {1}
    peaks = [one["peak"] for one in content["pipeline"]["memory"]]
    assert peaks[1] <= limit < peaks[0] and content["pipeline"]["memory_limits"][1] == limit
    assert content["prediction"]["binding"] != "memory"


def test_equal_slices_cost_as_much_as_on_the_slowest_device(start: Callable[..., Any]) -> None:
    words = (*SMALL, *MODES["semi_auto"], "parallel.mesh={dp: 2, tp: 2}")
    costs = [
        planned(start, *words, f"cluster.groups=[{groups}]")["cost"]["total"]
        for groups in ("{devices: 3}, {devices: 1, speed: 0.5}", "{devices: 4, speed: 0.5}", "{devices: 4}")
    ]
    assert costs[0] == costs[1] > costs[2]


@pytest.mark.parametrize(
    "words",
    [
        ("parallel=stand_alone", "world_size=1", "cluster.groups=[{devices: 1}]"),
        ("parallel.pipeline.stages=auto", SLOWER),
        ("parallel.pipeline.stages=2", "parallel.batch_rows=[8, 8]"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], command: Callable[..., Any]) -> None:
    done = command("plan", *SMALL, "world_size=2", "parallel=data_parallel", *words)
    assert done.code == 2
    assert len(done.paragraphs) == 1 and "[MW205]" in done.err, done.err
