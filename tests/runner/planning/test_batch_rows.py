"""Uneven machines: how many rows each rank gets, refusals, and that ranks with different rows train as one
device does."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from composing import compose_config
from small import ALONE, DOUBLE, SMALL

from runner.planning.batch_rows import divided
from runner.run_folder.metrics import records

THREE = ("parallel=data_parallel", "world_size=3", "data.batch_size=12")
DEVICES = ("cluster.machine.levels.gpu.size=3", "cluster.machine.launch=0")
NORM = "+model.args.norm=true"
SLOWER = "cluster.groups=[{devices: 2}, {devices: 1, speed: 0.5}]"


@pytest.mark.parametrize("total", [3, 7, 12])
@pytest.mark.parametrize(
    "lines",
    [((1, 1), (1, 1), (2, 2)), ((5, 1), (1, 3), (1, 0.1)), ((1, 0), (1, 0), (1, 0)), ((0.1, 9), (2, 1), (3, 1))],
)
def test_the_slowest_rank_is_as_fast_as_it_can_be(lines: tuple[tuple[float, float], ...], total: int) -> None:
    def slowest(rows: tuple[int, ...]) -> float:
        return max(first + (count - 1) * more for (first, more), count in zip(lines, rows, strict=True))

    for most in ((total,) * 3, (total, 3, total)):
        every = product(*(range(1, limit + 1) for limit in most))
        best = min(slowest(rows) for rows in every if sum(rows) == total)
        rows = divided(total, lines, most)
        assert sum(rows) == total
        assert all(1 <= count <= limit for count, limit in zip(rows, most, strict=True))
        assert slowest(rows) == best


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("parallel.batch_rows=[5, 5, 2]",), marks=pytest.mark.slow),
        pytest.param(("parallel.batch_rows=[5, 6, 1]", NORM), marks=pytest.mark.slow),
        pytest.param((SLOWER, NORM, "train.accumulate=2", "data.batch_size=24"), marks=pytest.mark.slow),
        pytest.param((SLOWER, "train.accumulate=2", "data.batch_size=24", "train.clip=0.5"), marks=pytest.mark.slow),
        pytest.param(("parallel.batch_rows=[1, 10, 1]", "optimizer.target=torch.optim.AdamW"), marks=pytest.mark.slow),
    ],
)
def test_uneven_rows_equal_one_device(words: tuple[str, ...], start: Callable[..., Any]) -> None:
    ended = start(*SMALL, *THREE, *words, DOUBLE, "verify.steps=2", verb="verify")
    assert ended.value < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_uneven_rows_with_zero(stage: int, start: Callable[..., Any]) -> None:
    words = (f"parallel.zero.stage={stage}", "parallel.batch_rows=[5, 5, 2]", "verify.steps=2")
    assert start(*SMALL, *THREE, *words, verb="verify").verdict["passed"]


def test_rows_follow_the_speeds_and_the_plan_says_what_each_kind_needs(start: Callable[..., Any]) -> None:
    words = ("data.batch_size=60", SLOWER, "cluster=one_gpu", *DEVICES)
    content = json.loads((start(*SMALL, *THREE, *words, verb="plan").folder / "plan.json").read_text(encoding="utf-8"))
    fast, slow = content["kinds"][0], content["kinds"][-1]
    assert slow["ranks"] == [2] and sum(len(kind["ranks"]) for kind in content["kinds"]) == 3
    assert (fast["rows"], slow["rows"]) == (content["batch_rows"][0], content["batch_rows"][2])
    assert sum(content["batch_rows"]) == 60
    assert content["cost"]["total"] == max(kind["cost"]["total"] for kind in content["kinds"])
    assert fast["cost"]["compute"] == pytest.approx(slow["cost"]["compute"], rel=0.05)
    assert fast["memory"]["peak"] > slow["memory"]["peak"]


@pytest.mark.slow
def test_batches_that_the_ranks_do_not_divide_have_equal_slices(start: Callable[..., Any]) -> None:
    """Evaluations, and the short last batch of an epoch."""
    words = ("data.batch_size=30", "data.drop_last=false", "evaluate.every=2", "evaluate.args={rows: 17, seed: 1}")
    common = (*SMALL, *words, NORM, DOUBLE, "train.steps=3", "checkpoint.at_end=false", "evaluate.batch_size=10")
    uneven = start(*common, "parallel=data_parallel", "world_size=3", "parallel.batch_rows=[17, 12, 1]")
    alone = start(*common, *ALONE, folder="alone")
    ours, theirs = ([*records(one.folder)] for one in (uneven, alone))
    assert [one["loss"] for one in ours if "loss" in one] == pytest.approx(
        [one["loss"] for one in theirs if "loss" in one], rel=1e-12
    )
    measured = [[one["evaluation"]["loss"] for one in own if "evaluation" in one] for own in (ours, theirs)]
    assert len(measured[0]) == 2
    assert measured[0] == pytest.approx(measured[1], rel=1e-12)


@pytest.mark.slow
def test_no_kind_gets_more_rows_than_its_memory_is_large_enough_for(
    command: Callable[..., Any], tmp_path: Path
) -> None:
    def planned(memory: float) -> dict[str, Any]:
        groups = "cluster.groups=[{devices: 2, like: one_gpu, speed: 0.01}, {devices: 1}]"
        one_gpu = ("cluster=one_gpu", *DEVICES, f"cluster.machine.memory={memory}")
        done = command("plan", *SMALL, *THREE, "data.batch_size=60", groups, *one_gpu, f"hydra.run.dir={memory}")
        assert done.code == 0, done.err
        content: dict[str, Any] = json.loads((tmp_path / str(memory) / "plan.json").read_text(encoding="utf-8"))
        return content

    free = planned(1e10)
    assert free["batch_rows"][2] > free["batch_rows"][0]
    limit = float(free["kinds"][-1]["memory"]["peak"] * 7 // 10)
    bound = planned(limit)
    assert free["batch_rows"][2] > bound["batch_rows"][2] > 1
    assert bound["kinds"][-1]["memory"]["peak"] <= limit == bound["kinds"][-1]["memory_limit"]
    assert sum(bound["batch_rows"]) == 60


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("MW501", ("cluster.groups=[{devices: 3}]", "cluster=one_gpu", "cluster.machine.levels.gpu.size=3",
                   "cluster.machine.memory=1000")),
        ("MW412", ("parallel.batch_rows=[5, 5, 3]", "data.batch_size=13")),
        ("MW205", ("parallel.batch_rows=[5, 5, 3]",)),
        ("MW205", ("parallel.batch_rows=[6, 6]",)),
        ("MW205", ("cluster.groups=[{devices: 2}]",)),
        ("MW205", ("cluster.groups=[{devices: 3}]", "data.batch_size=2")),
        ("MW205", (SLOWER, "parallel.batch_rows=[5, 5, 2]")),
        ("MW205", (SLOWER, "parallel.copies=2")),
        ("MW205", (SLOWER, "train.compile=true")),
        ("MW205", (SLOWER, "parallel.memory_limit=1GB")),
        ("MW205", (SLOWER, "parallel.zero.stage=auto")),
        ("MW205", (SLOWER, "parallel.pipeline.stages=auto", "data.batch_size=18")),
        ("MW106", ("cluster.groups=[{devices: 3, like: cray}]",)),
    ],
)  # fmt: skip
def test_what_is_refused(code: str, words: tuple[str, ...], command: Callable[..., Any]) -> None:
    done = command("plan", *SMALL, *THREE, *words)
    assert done.code == 2
    assert len(done.paragraphs) == 1 and f"[{code}]" in done.err, done.err


def test_groups_say_how_many_ranks_there_are() -> None:
    assert compose_config(*SMALL, *THREE, "world_size=null", SLOWER).world_size == 3


@pytest.mark.slow
def test_explain_shows_the_slices_of_every_rank(command: Callable[..., Any]) -> None:
    done = command("explain", *SMALL, *THREE, "parallel.batch_rows=[5, 5, 2]", "--slices", "inner")
    assert done.code == 0, done.err
    assert [line.split()[1] for line in done.out.splitlines() if line.split()[:1] in (["0"], ["1"], ["2"])] == [
        "0:5",
        "5:10",
        "10:12",
    ]
