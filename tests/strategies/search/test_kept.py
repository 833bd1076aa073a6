"""What a rank keeps: the same bytes in every search, and limits of them kept by recursive programming."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strategies.core.errors import StrategyError
from strategies.core.mesh import Mesh
from strategies.core.request import Request
from strategies.planner.planner import make_plan
from strategies.search.exact import search
from strategies.search.kept import plan_bytes
from strategies.search.prices import Pricing
from strategies.search.problem import Problem
from strategies.search.recursive import bisect
from tests.strategies.search.problems import gpt, node, problem

SQUARE = Mesh((("a", 2), ("b", 2)))


@pytest.fixture(scope="module")
def made() -> Problem:
    return problem(gpt(1), SQUARE)


@pytest.mark.parametrize("stage", (0, 3))
@pytest.mark.parametrize("states", [0.0, 2.0])
def test_the_exact_search_counts_the_same(made: Problem, stage: int, states: float) -> None:
    asked = replace(made, stage=stage, states=states)
    found = search(asked, node(4))
    assert found.bytes == pytest.approx(plan_bytes(asked, found.assignments))


def test_tied_weights_are_counted_once() -> None:
    asked = problem(gpt(1), Mesh((("a", 2),)))
    found = search(asked, node(2))
    assert found.bytes == pytest.approx(plan_bytes(asked, found.assignments))


def test_a_limit_is_kept_at_little_more_than_the_least_price(made: Problem) -> None:
    free = plan_bytes(made, bisect(made, node(4)))
    limited = replace(made, memory=0.93 * free)
    chosen = bisect(limited, node(4))
    assert plan_bytes(limited, chosen) <= 0.93 * free
    assert Pricing(made, node(4)).total(chosen) <= 1.05 * search(limited, node(4)).cost


def test_fewer_states_leave_room_for_a_faster_plan(made: Problem) -> None:
    """What SGD keeps fits where Adam's states do not."""
    limit = 0.9 * plan_bytes(made, bisect(made, node(4)))
    adam, sgd = (replace(made, states=states, memory=limit) for states in (2.0, 0.0))
    free = replace(made, states=0.0)
    assert Pricing(free, node(4)).total(bisect(sgd, node(4))) < Pricing(free, node(4)).total(bisect(adam, node(4)))


def test_a_limit_that_nothing_keeps_is_told() -> None:
    asked = Request("auto", 4, "recursive_programming", memory_limit=2**20)
    with pytest.raises(StrategyError, match=r"memory_limit = 1 MiB per rank, but .* the smallest needs .* GiB"):
        make_plan(gpt(1), asked, node(4))
    plan = make_plan(gpt(1), replace(asked, memory_limit=None), node(4))
    assert plan.search["bytes"] > 2**20
