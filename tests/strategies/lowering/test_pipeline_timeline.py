"""The times of a schedule's passes, by hand."""

from __future__ import annotations

import pytest

from strategies.lowering.pipeline_schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Action, make_schedule
from strategies.lowering.pipeline_timeline import Span, StageTimes, bubble, makespan, timeline


def test_a_pass_begins_when_what_it_needs_is_there() -> None:
    times = [StageTimes(1.0, 2.0, 3.0), StageTimes(10.0, 20.0, 30.0)]
    first = (Action(FORWARD, 0, 0), Action(INPUT, 0, 0), Action(WEIGHT, 0, 0))
    second = (Action(FORWARD, 0, 1), Action(INPUT, 0, 1), Action(WEIGHT, 0, 1))
    assert timeline((first, second), times) == (
        (Span(first[0], 0, 1), Span(first[1], 31, 33), Span(first[2], 33, 36)),
        (Span(second[0], 1, 11), Span(second[1], 11, 31), Span(second[2], 31, 61)),
    )
    joined = (Action(FORWARD, 0, 1), Action(BACKWARD, 0, 1))
    assert timeline((first, joined), times)[0][1] == Span(first[1], 61, 63)


def test_makespan_and_bubble() -> None:
    times = [StageTimes(1.0, 2.0, 3.0), StageTimes(2.0, 2.0, 2.0)]
    schedule = make_schedule("1f1b", 2, 2)
    assert makespan(schedule, times) == 18  # 1, then 2 + 4 and 2 + 4 of stage 1, then 5 of stage 0
    assert bubble(schedule, times) == pytest.approx(1 - 24 / 36)


def test_groups_that_wait_for_one_another_have_no_timeline() -> None:
    early = (Action(BACKWARD, 0, 0), Action(FORWARD, 0, 0))
    with pytest.raises(ValueError, match="wait for one another"):
        makespan((early, (Action(FORWARD, 0, 1), Action(BACKWARD, 0, 1))), [StageTimes(1.0, 1.0, 1.0)] * 2)
