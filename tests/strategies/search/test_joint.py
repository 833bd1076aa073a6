"""Joint optimisation against brute force, on synthetic costs."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from strategies.core.errors import StrategyError
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import Plan
from strategies.search.joint import Bound, Choice, Priced, decide

EMPTY = Plan(Mesh((("d", 2),)), {}, {"x": Layout(())}, {})
CHOICES = [Choice(s, z, 2 * s if s > 1 else 1, way) for s in (1, 2, 4) for z in (0, 1) for way in ("none", "full")]


def table(seed: int) -> tuple[dict[Choice, Bound], dict[Choice, tuple[float, int]]]:
    rng = random.Random(seed)
    true = {choice: (rng.uniform(1, 3), rng.randrange(10, 100)) for choice in CHOICES}
    return {
        choice: Bound(rng.uniform(0.3, 1) * time, rng.uniform(0, 1) * size) for choice, (time, size) in true.items()
    }, true


@pytest.mark.parametrize("seed", range(40))
def test_no_choice_within_the_limit_is_faster(seed):
    bounds, true = table(seed)
    limit, evaluated, rng = 50, [], random.Random(seed)

    def look(choice: Choice) -> Iterator[Priced]:
        """The fastest plan, and perhaps a slower one that is the first to fit the limit."""
        seconds, size = true[choice]
        smaller = size <= limit and rng.random() < 0.5
        faster = rng.uniform(bounds[choice].seconds, seconds) if smaller else seconds
        yield Priced(EMPTY, faster, None)
        evaluated.append(choice)
        yield Priced(EMPTY, faster, size + 100 * smaller)
        if smaller:
            yield Priced(EMPTY, seconds, None)
            yield Priced(EMPTY, seconds, size)

    fitting = sorted((seconds, choice) for choice, (seconds, size) in true.items() if size <= limit)
    decision = decide(bounds, limit, look)
    assert (decision.priced.seconds, decision.choice) == fitting[0]
    assert decision.tried + decision.pruned == len(CHOICES)
    assert all(bounds[choice].seconds <= fitting[0][0] for choice in evaluated)
    if decision.runner_up is not None:
        choice, priced = decision.runner_up
        assert choice != decision.choice and fitting[0][0] <= priced.seconds <= true[choice][0]
        assert priced.bytes is None or (true[choice] == (priced.seconds, priced.bytes) and priced.bytes <= limit)
        total = decision.to_json()["runner_up"]
        assert (total["stages"], total["zero"], total["fits"]) == (choice.stages, choice.zero, priced.bytes is not None)


def test_bounds_avoid_most_cost_evaluations():
    true = {choice: 1.0 + number for number, choice in enumerate(CHOICES)}
    decision = decide({c: Bound(0.9 * t, 0) for c, t in true.items()}, 1, lambda c: iter([Priced(EMPTY, true[c], 1)]))
    assert (decision.choice, decision.tried, decision.pruned) == (CHOICES[0], 1, len(CHOICES) - 1)


def test_rejected_candidates_are_skipped_and_reported_if_all_are():
    def look(choice: Choice) -> Iterator[Priced]:
        if choice.stages > 1:
            raise StrategyError("MW431", f"no {choice.stages} stages")
        yield Priced(EMPTY, 2.0, 1)

    assert decide({choice: Bound(0, 0) for choice in CHOICES}, 1, look).refused == 8
    with pytest.raises(StrategyError, match="no 2 stages"):
        decide({choice: Bound(0, 0) for choice in CHOICES if choice.stages > 1}, 1, look)


def test_nothing_fits_reports_the_smallest_need():
    sizes = {choice: 1000 + number for number, choice in enumerate(CHOICES)}
    with pytest.raises(
        StrategyError, match=r"fits into 10 B .* of 12 choices the smallest needs 1000 B or more \(ZeRO 0, no"
    ):
        decide({choice: Bound(0, 0) for choice in CHOICES}, 10, lambda c: iter([Priced(EMPTY, 1.0, sizes[c])]))
