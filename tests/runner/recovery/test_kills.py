"""A sample of `python -m benchmarks.kills`, which kills processes of real commands at random moments."""

import random

import pytest

from benchmarks.kills import AT_ONCE, PHASES, drawn, drill


@pytest.mark.parametrize(
    ("kills", "plans"),
    [
        (1, ("ZeRO 1, 2 ranks",)),
        pytest.param(
            40, ("ZeRO 3, 2 ranks", "pipeline of 2 stages, 2 ranks", "ZeRO 2, 2 ranks"), marks=pytest.mark.slow
        ),
    ],
)
def test_whatever_is_killed_the_weights_are_the_same(kills, plans):
    result = drill(kills, 3, 4.0, plans)
    assert result["kills"] >= kills
    assert result["wrong"] == []


def test_the_same_seed_draws_the_same_kills():
    first, again = ([drawn(random.Random(5)) for _ in range(2)] for _ in range(2))
    assert first == again
    every = [one for seed in range(200) for one in drawn(random.Random(seed))]
    assert {one.phase for one in every} == {*PHASES, AT_ONCE}
    assert {one.number.name for one in every} == {"SIGKILL", "SIGSTOP", "SIGTERM"}
    assert {one.victim for one in every} == {"command", "fork", "server"}
