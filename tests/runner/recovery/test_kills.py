"""A sample of `python -m benchmarks.kills`, which kills processes of real commands at random moments."""

import random
from collections import Counter

import pytest

from benchmarks.kills import KINDS, PHASES, drill, random_blows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "plans", "phases"),
    [
        (1, ("ZeRO 1, 2 ranks",), ("saving",)),
        (
            40,
            ("ZeRO 3, 2 ranks", "pipeline of 2 stages, 2 ranks", "saved in the background, 2 ranks"),
            tuple(PHASES),
        ),
    ],
)
def test_whatever_is_killed_the_weights_are_the_same(kills, plans, phases):
    result = drill(kills, 3, 20.0, plans, phases)
    assert result["kills"] >= kills
    assert result["wrong"] == []


def test_phases_that_were_hit_least_come_first():
    hit = Counter({phase: 3 for phase in PHASES if phase not in ("saving", "start")})
    assert [blow.phase for blow in random_blows(random.Random(0), hit, [*PHASES], 4)] == [
        "start",
        "start",
        "saving",
        "saving",
    ]
    every = [blow for seed in range(50) for blow in random_blows(random.Random(seed), {}, [*PHASES], len(PHASES))]
    assert Counter(blow.phase for blow in every) == {phase: 50 for phase in PHASES}
    assert {blow.kind for blow in every} == {*KINDS}
    assert random_blows(random.Random(5), {}, [*PHASES], 9) == random_blows(random.Random(5), {}, [*PHASES], 9)
