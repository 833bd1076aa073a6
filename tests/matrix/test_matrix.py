"""The architectures against eager torch: each under one plan per test run, in rotation; all of them in the slow
tests; a few on real processes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from strategies.runtime import initial_weights as weights
from tests.matrix.__main__ import main
from tests.matrix.coverage import LISTED, Row, markdown, row
from tests.matrix.plans import MODES, Mode, plan_for, seeds
from tests.matrix.runs import (
    BOTH,
    DROPOUT,
    TOLERANCE,
    Precision,
    Subject,
    matrix_run,
    own_rounding,
    run,
    subject,
    worst,
)
from tests.matrix.zoo import ARCHITECTURES, FURTHER, Architecture
from tests.ranks import start_ranks
from tests.strategies.on_ranks import Case
from tests.strategies.threads import Trees

os.environ.setdefault("HF_HUB_OFFLINE", "1")
BY_NAME = {one.name: one for one in (*ARCHITECTURES, *FURTHER)}
VARIANTS: tuple[tuple[Mode, float, Precision], ...] = tuple(
    (mode, dropout, precision)
    for precision in ("fp64", "fp32")
    for dropout in (DROPOUT, 0.0)
    for mode in ("random", "auto", "data_parallel")
)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Ignores deprecation warnings of other packages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _said(_: str) -> None:
    """Takes the progress of `row`; the assertion that follows shows the failure."""


def test_there_are_32() -> None:
    assert len(ARCHITECTURES) == 32
    assert len(BY_NAME) == 32 + len(FURTHER)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "turn",
    [pytest.param(turn, marks=[pytest.mark.slow] * (turn % 2)) for turn in range(len(ARCHITECTURES))],
    ids=lambda turn: ARCHITECTURES[turn].name,
)
def test_one_way_each(turn: int) -> None:
    """Each architecture runs the next of the twelve plans; every fourth also runs its generated modules."""
    architecture, (mode, dropout, precision) = ARCHITECTURES[turn], VARIANTS[turn % len(VARIANTS)]
    kinds = BOTH if turn % 4 == 0 else BOTH[:1]
    done = matrix_run(subject(architecture, dropout, precision), mode, dropout, kinds=kinds)
    if precision == "fp32" and not done.passed:
        done = done.widened(own_rounding(architecture, dropout))
    assert done.passed, f"{mode}, dropout {dropout}, {precision}: {done.error or done.differences}"


NAMES: tuple[tuple[str, Mode], ...] = (
    ("names", "random"),
    ("names", "data_parallel"),
    *((name, "data_parallel") for name in ("roberta", "electra", "deberta", "swinv2", "llava")),
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), NAMES)
def test_generated_modules_of_any_names(name: str, mode: Mode) -> None:
    """Children called `self`, `forward`, `class` or with a quote, tensors called like builtins, a model in a model."""
    done = matrix_run(subject(BY_NAME[name], 0.0, "fp64"), mode, 0.0, world=2, kinds=(Trees,))
    assert done.passed, done.error or done.differences


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_NAME)
def test_every_way(name: str) -> None:
    found = row(BY_NAME[name], 4, _said)
    assert not found.error
    assert [(r.mode, r.dropout, r.precision, r.error or r.differences) for r in found.runs if not r.passed] == []
    assert found.fallback.flops <= LISTED or name in FALLS_BACK


FALLS_BACK: frozenset[str] = frozenset()
"""Architectures that docs/coverage.md lists with an operator that runs on replicated tensors."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "resnet", "mixtral", "t5"])
@pytest.mark.parametrize("mode", MODES)
def test_eight_ranks(name: str, mode: Mode) -> None:
    one = subject(BY_NAME[name], 0.0, "fp64")
    assert run(one, plan_for(one.graph, mode, 8)).worst <= TOLERANCE["fp64"]


@pytest.mark.slow
def test_a_wrong_gradient_is_seen() -> None:
    """The comparison detects an error of one millionth in one weight's gradient."""
    one = subject(BY_NAME["lstm"], 0.0, "fp64")
    plan = plan_for(one.graph, "data_parallel")
    assert run(one, plan).worst <= TOLERANCE["fp64"]
    off = {**one.gradients, "out.weight": one.gradients["out.weight"] * (1 + 1e-6)}
    spoiled = run(Subject(one.name, one.precision, one.graph, one.values, one.loss, off, one.buffers), plan)
    assert spoiled.gradient[1] == "out.weight"
    assert spoiled.worst > TOLERANCE["fp64"]


def test_configured_products_alternate_columns_and_rows() -> None:
    graph = subject(BY_NAME["gpt2"], 0.0, "fp64").graph
    wanted = seeds(graph, 4)  # of products bias + x @ weight [k, n]
    weights_cut = [strategy.inputs[2] for strategy in wanted.values() if strategy.inputs]
    assert weights_cut == [(1, 4), (4, 1)] * (len(wanted) // 2)
    assert len(wanted) >= 4
    plan = plan_for(graph, "auto")
    origins = [planned.origin for planned in plan.operators.values()]
    assert origins.count("configured") == len(wanted)
    assert "propagated" in origins


@pytest.mark.slow
def test_the_command_writes_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "coverage.md"
    assert main(["--only", "lstm", "--write", str(page)]) == 0
    assert "1 of 1 agree" in capsys.readouterr().out
    lines = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| lstm |")]
    assert len(lines) == 1
    assert lines[0].count("e-") == 12
    assert "**" not in lines[0]


def test_a_refused_model_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    def build(_: float) -> object:
        raise ValueError("no such width")

    found: Row = row(Architecture("odd", "none", build), 2, _said)  # type: ignore[arg-type]
    assert not found.passed
    assert "* odd: ValueError: no such width" in markdown([found], [], 2)


REAL = (("mixtral", "random"), ("lstm", "random"))
MORE_REAL = (("gpt2", "auto"), ("resnet", "data_parallel"))


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [REAL, pytest.param(MORE_REAL, marks=pytest.mark.slow)], ids=["random", "others"])
def test_real_processes(tmp_path: Path, chosen: tuple[tuple[str, str], ...]) -> None:
    """The same step on four communicating processes."""
    subjects, cases = [], []
    for name, mode in chosen:
        one = subject(BY_NAME[name], 0.0, "fp32")
        file, plan = tmp_path / f"{name}.pt", plan_for(one.graph, mode)
        inputs = {source.name for source in one.graph.of_kind("input")}
        weights.write(file, {key: value for key, value in one.values.items() if key not in inputs})
        subjects.append(one)
        cases.append(Case(one.graph, plan, file, {key: one.values[key] for key in inputs}))
    entry = "tests.strategies.on_ranks:steps"
    results = start_ranks(entry, cases, 4, tmp_path, timeout=240.0)
    for one, result in zip(subjects, results, strict=True):
        assert abs(result.loss - one.loss) <= TOLERANCE["fp32"] * abs(one.loss)
        assert result.gradients.keys() == one.gradients.keys()
        assert worst(result.gradients, one.gradients, "fp32")[0] <= TOLERANCE["fp32"]
        assert result.predicted == result.sent
