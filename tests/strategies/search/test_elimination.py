"""The minimum assignment by elimination, against enumeration."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

from strategies.search import elimination
from strategies.search.elimination import Elimination, Seconds, minimum


def random_tables(seed: int, variables: int = 6) -> tuple[list[int], dict[tuple[int, ...], Seconds]]:
    """Random tables over one, two and three variables."""
    rng = np.random.default_rng(seed)
    sizes = [int(size) for size in rng.integers(1, 4, variables)]
    tables: dict[tuple[int, ...], Seconds] = {}
    for width, share in ((1, 1.0), (2, 0.5), (3, 0.15)):
        for key in combinations(range(variables), width):
            if rng.random() < share:
                order = tuple(int(v) for v in rng.permutation(key))
                tables[order] = rng.random([sizes[v] for v in order])
    return sizes, tables


def seconds(tables: dict[tuple[int, ...], Seconds], values: list[int]) -> float:
    return sum(float(table[tuple(values[v] for v in key)]) for key, table in tables.items())


@pytest.mark.parametrize("seed", range(40))
def test_equals_trying_everything(seed: int) -> None:
    sizes, tables = random_tables(seed)
    best = min(seconds(tables, list(values)) for values in product(*map(range, sizes)))
    assert seconds(tables, minimum(sizes, tables, 200_000)) == pytest.approx(best, abs=1e-12)


def test_where_tables_would_grow_too_large_the_choice_is_legal_and_better_than_random() -> None:
    gaps = []
    for seed in range(40):
        sizes, tables = random_tables(seed, 8)
        exact = seconds(tables, minimum(sizes, tables, 200_000))
        found = minimum(sizes, tables, 6)
        assert all(0 <= value < size for value, size in zip(found, sizes, strict=True))
        rng = np.random.default_rng(seed)
        average = np.mean([seconds(tables, [int(rng.integers(size)) for size in sizes]) for _ in range(50)])
        assert exact - 1e-12 <= seconds(tables, found)
        gaps.append((seconds(tables, found) - exact) / max(average - exact, 1e-12))
    assert 0 < np.mean(gaps) < 0.4  # greedy choices fix some candidates early


def test_a_long_line_takes_work_that_is_linear() -> None:
    rng = np.random.default_rng(0)
    sizes = [4] * 3000
    tables: dict[tuple[int, ...], Seconds] = {(v,): rng.random(4) for v in range(3000)}
    tables |= {(v, v + 1): rng.random((4, 4)) for v in range(2999)}
    least = tables[(0,)]
    for v in range(2999):  # Viterbi's recursion, forward
        least = (least[:, None] + tables[v, v + 1]).min(0) + tables[(v + 1,)]
    assert seconds(tables, minimum(sizes, tables, 200_000)) == pytest.approx(float(least.min()))


def test_all_variables_that_must_be_fixed_are_found_in_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid of 12 x 60, whose tables grow to 4**12 entries: 100 and more variables are fixed."""
    plans: list[Elimination] = []

    def counted(*args: Any, **kwargs: Any) -> Elimination:
        plans.append(Elimination(*args, **kwargs))
        return plans[-1]

    monkeypatch.setattr(elimination, "Elimination", counted)
    rng, number = np.random.default_rng(0), np.arange(12 * 60).reshape(12, 60)
    edges = [
        *zip(number[1:].flat, number[:-1].flat, strict=True),
        *zip(number[:, 1:].flat, number[:, :-1].flat, strict=True),
    ]
    tables: dict[tuple[int, ...], Seconds] = {(int(a), int(b)): rng.random((4, 4)) for a, b in edges}
    found = minimum([4] * 720, tables, 200)
    assert len(plans[0].fixed) > 50 and len(plans) <= 4
    average = np.mean([seconds(tables, [int(one) for one in rng.integers(4, size=720)]) for _ in range(20)])
    assert seconds(tables, found) < 0.55 * average
