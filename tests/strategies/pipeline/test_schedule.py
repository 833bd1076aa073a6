"""Schedules: complete, free of waiting in circles, with the known bubble and number of activations."""

from __future__ import annotations

import pytest

from strategies.errors import StrategyError
from strategies.pipeline.schedule import KINDS, Action, bubble, held, in_one_process, make_schedule

SIZES = [(2, 2), (2, 5), (3, 3), (4, 8), (4, 4)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_every_micro_batch_runs_both_ways_once_in_order(kind: str, stages: int, micro_batches: int) -> None:
    for actions in make_schedule(kind, stages, micro_batches):
        for way in ("forward", "backward"):
            assert [a.micro_batch for a in actions if a.way == way] == list(range(micro_batches))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_bubble_of_equal_stages(kind: str, stages: int, micro_batches: int) -> None:
    found = bubble(make_schedule(kind, stages, micro_batches), [2.0] * stages)
    assert found == pytest.approx((stages - 1) / (micro_batches + stages - 1))


def test_bubble_of_unequal_stages() -> None:
    schedule = make_schedule("gpipe", 2, 2)
    # 1 + 2 x 3 forward and 2 x 6 + 2 backward make 21; both are busy for 2 x 3 and 2 x 9 of 42
    assert bubble(schedule, [1.0, 3.0]) == pytest.approx(1 - 24 / 42)


def test_activations_held() -> None:
    assert [held(actions) for actions in make_schedule("gpipe", 4, 8)] == [8, 8, 8, 8]
    assert [held(actions) for actions in make_schedule("1f1b", 4, 8)] == [4, 3, 2, 1]


def test_stages_that_wait_for_one_another() -> None:
    early = (Action("backward", 0), Action("forward", 0))
    with pytest.raises(ValueError, match="wait for one another"):
        in_one_process((early, (Action("forward", 0), Action("backward", 0))))


def test_unknown_schedule() -> None:
    with pytest.raises(StrategyError, match="Did you mean '1f1b'"):
        make_schedule("1f1", 2, 2)
