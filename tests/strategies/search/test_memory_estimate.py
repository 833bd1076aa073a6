"""The memory estimate of a rank: equal in every search, and its limits respected by recursive programming."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strategies.core.errors import StrategyError
from strategies.core.mesh import Mesh
from strategies.core.request import Request
from strategies.cost.plan_cost import PlanCost
from strategies.cost.problem import Problem
from strategies.memory.estimate import plan_bytes
from strategies.planner.planner import make_plan
from strategies.search.dynamic_programming import search
from strategies.search.recursive_programming import recursive_search
from tests.strategies.search.problems import gpt, node, problem

SQUARE = Mesh((("a", 2), ("b", 2)))


@pytest.fixture(scope="module")
def made() -> Problem:
    return problem(gpt(1), SQUARE)


@pytest.mark.parametrize("stage", (0, 3))
@pytest.mark.parametrize("states", [0.0, 2.0])
def test_the_exact_search_counts_the_same(made: Problem, stage: int, states: float) -> None:
    wanted = replace(made, stage=stage, optimizer_state_factor=states)
    found = search(wanted, node(4))
    assert found.bytes == pytest.approx(plan_bytes(wanted, found.assignments))


def test_tied_weights_are_counted_once() -> None:
    wanted = problem(gpt(1), Mesh((("a", 2),)))
    found = search(wanted, node(2))
    assert found.bytes == pytest.approx(plan_bytes(wanted, found.assignments))


@pytest.mark.slow
def test_a_limit_is_kept_at_little_more_than_the_least_cost(made: Problem) -> None:
    free = plan_bytes(made, recursive_search(made, node(4)).assignments)
    limited = replace(made, memory=0.93 * free)
    chosen = recursive_search(limited, node(4)).assignments
    assert plan_bytes(limited, chosen) <= 0.93 * free
    assert PlanCost(made, node(4)).total(chosen) <= 1.05 * search(limited, node(4)).cost


@pytest.mark.slow
def test_fewer_states_leave_room_for_a_faster_plan(made: Problem) -> None:
    """SGD's state fits where Adam's does not."""
    limit = 0.9 * plan_bytes(made, recursive_search(made, node(4)).assignments)
    adam, sgd = (replace(made, optimizer_state_factor=states, memory=limit) for states in (2.0, 0.0))
    free = replace(made, optimizer_state_factor=0.0)
    assert PlanCost(free, node(4)).total(recursive_search(sgd, node(4)).assignments) < PlanCost(free, node(4)).total(
        recursive_search(adam, node(4)).assignments
    )


def test_a_limit_that_no_plan_fits_is_reported() -> None:
    limited = Request("auto", 4, "recursive_programming", memory_limit=2**20)
    with pytest.raises(StrategyError, match=r"memory_limit = 1 MiB per rank, but .* the smallest needs .* GiB"):
        make_plan(gpt(1), limited, node(4))
    plan = make_plan(gpt(1), replace(limited, memory_limit=None), node(4))
    assert plan.search["bytes"] > 2**20
