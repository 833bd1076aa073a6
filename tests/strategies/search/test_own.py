"""What a parameter takes by itself, for one micro-batch of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strategies.graph import Ref
from strategies.layout import Layout
from strategies.search.own import Own
from strategies.search.problem import Problem
from tests.strategies.search.test_network import NODES, llama, problem_of

TURNS = 4


@pytest.fixture(scope="module")
def problem() -> Problem:
    return problem_of(llama(2), 8)


def seconds(problem: Problem, stage: int, turns: int, sliced: bool = False) -> float:
    """Of the largest parameter, whole on all ranks or cut among them."""
    source = max(problem.graph.of_kind("parameter"), key=lambda one: one.spec.elements)
    axes = problem.mesh.names
    whole = Layout.replicated(2) if stage else Layout(((), ()), frozenset(axes))
    layout = Layout((axes, ())) if sliced else whole
    assert Ref(source.id) in problem.trained
    return Own(replace(problem, stage=stage, turns=turns), NODES).parameter_seconds(layout, source.spec)


@pytest.mark.parametrize("stage", [0, 1])
def test_what_is_done_once_per_step_counts_for_its_part(problem: Problem, stage: int) -> None:
    assert seconds(problem, stage, TURNS) == pytest.approx(seconds(problem, stage, 1) / TURNS)


@pytest.mark.parametrize("stage", [2, 3])
def test_what_zero_sends_for_every_micro_batch_counts_whole(problem: Problem, stage: int) -> None:
    one, many = seconds(problem, stage, 1), [seconds(problem, stage, turns) for turns in (TURNS, 10**9)]
    assert one > many[0] > many[1] > 0.2 * one
    assert (many[0] - many[1]) * TURNS == pytest.approx(one - many[1])  # the rest is once per step


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_parameter_that_is_cut_is_only_updated(problem: Problem, stage: int) -> None:
    assert seconds(problem, stage, TURNS, sliced=True) == pytest.approx(seconds(problem, 0, 1, sliced=True) / TURNS)
    assert seconds(problem, stage, TURNS, sliced=True) < seconds(problem, stage, TURNS)
