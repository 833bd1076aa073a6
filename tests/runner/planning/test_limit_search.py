"""Rooms for a search, against made-up ranks whose bytes follow the search's own in several ways."""

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
def test_few_rooms_lead_to_a_plan_that_keeps_the_limit_and_no_much_less(rank):
    rooms, seen = SearchBudget(LIMIT, 1.0), [(100.0, round(rank(100)))]
    while (room := rooms.next(seen)) is not None:
        assert room not in dict(seen)
        seen.append((float(room), round(rank(room))))
    assert len(seen) <= 6
    best = max(size for _, size in seen if size <= LIMIT)
    assert best >= CLOSE * LIMIT


def test_what_plans_have_told_is_known_of_the_next_choice():
    rooms = SearchBudget(LIMIT, 0.5)
    assert rooms.slope == USUAL * 0.5
    assert rooms.next([(200.0, 90)]) == int(200 - 30 / (USUAL * 0.5))
    rooms.next([(200.0, 90), (160.0, 78)])
    assert rooms.slope == pytest.approx(0.3)
    assert rooms.next([(200.0, 81)]) == int(200 - 21 / 0.3)
    rooms.next([(200.0, 90), (160.0, 89)])
    assert rooms.slope == FLATTEST * 0.5


def test_there_is_no_room_below_nothing_nor_beside_what_is_near_the_limit():
    assert SearchBudget(LIMIT, 1.0).next([(20.0, 90)]) is None
    assert SearchBudget(LIMIT, 1.0).next([(100.0, 90), (50.0, 59)]) is None
    assert SearchBudget(LIMIT, 1.0).next([(100.0, 90), (50.0, 50)]) == 62
    assert SearchBudget(LIMIT, 1.0).next([(100.0, 60)]) is None
