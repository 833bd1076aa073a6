"""Search budgets, for made-up ranks whose bytes are different functions of the search's estimate."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from runner.planning.memory_limit import CLOSE, FLATTEST, USUAL, SearchBudget

LIMIT = 60
RANKS: dict[str, Callable[[float], float]] = {
    "the same": lambda kept: kept,
    "flatter": lambda kept: 30 + 0.6 * kept,
    "bent": lambda kept: 20 + 0.6 * kept + 0.001 * kept**2,
    "hardly": lambda kept: 52 + 0.1 * kept,
}


@pytest.mark.parametrize("rank", RANKS.values(), ids=RANKS)
def test_few_budgets_lead_to_a_plan_close_below_the_limit(rank):
    budgets, seen = SearchBudget(LIMIT, 1.0), [(100.0, round(rank(100)))]
    while (budget := budgets.next(seen)) is not None:
        assert budget not in dict(seen)
        seen.append((float(budget), round(rank(budget))))
    assert len(seen) <= 6
    best = max(size for _, size in seen if size <= LIMIT)
    assert best >= CLOSE * LIMIT


def test_the_slope_of_earlier_plans_is_used_for_the_next_choice():
    budgets = SearchBudget(LIMIT, 0.5)
    assert budgets.slope == USUAL * 0.5
    assert budgets.next([(200.0, 90)]) == int(200 - 30 / (USUAL * 0.5))
    budgets.next([(200.0, 90), (160.0, 78)])
    assert budgets.slope == pytest.approx(0.3)
    assert budgets.next([(200.0, 81)]) == int(200 - 21 / 0.3)
    budgets.next([(200.0, 90), (160.0, 89)])
    assert budgets.slope == FLATTEST * 0.5


def test_there_is_no_room_below_nothing_nor_beside_what_is_near_the_limit():
    assert SearchBudget(LIMIT, 1.0).next([(20.0, 90)]) is None
    assert SearchBudget(LIMIT, 1.0).next([(100.0, 90), (50.0, 59)]) is None
    assert SearchBudget(LIMIT, 1.0).next([(100.0, 90), (50.0, 50)]) == 62
    assert SearchBudget(LIMIT, 1.0).next([(100.0, 60)]) is None
