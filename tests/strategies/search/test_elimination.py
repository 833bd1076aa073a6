"""The minimum assignment by elimination, against enumeration."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest

from strategies.search.dual_bound import minimum
from strategies.search.elimination import Seconds


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


def test_where_tables_would_grow_too_large_candidates_of_least_reduced_cost_suffice() -> None:
    for seed in range(40):
        sizes, tables = random_tables(seed, 8)
        tables = {key: table for key, table in tables.items() if key == tuple(sorted(key))}
        exact, found = minimum(sizes, tables, 200_000), minimum(sizes, tables, 6)
        assert seconds(tables, found) == pytest.approx(seconds(tables, exact))


def test_a_long_line_takes_work_that_is_linear() -> None:
    rng = np.random.default_rng(0)
    sizes = [4] * 3000
    tables: dict[tuple[int, ...], Seconds] = {(v,): rng.random(4) for v in range(3000)}
    tables |= {(v, v + 1): rng.random((4, 4)) for v in range(2999)}
    least = tables[(0,)]
    for v in range(2999):  # Viterbi's recursion, forward
        least = (least[:, None] + tables[v, v + 1]).min(0) + tables[(v + 1,)]
    assert seconds(tables, minimum(sizes, tables, 200_000)) == pytest.approx(float(least.min()))


def test_a_variable_with_one_candidate_may_touch_more_variables_than_an_array_has_dims() -> None:
    tables: dict[tuple[int, ...], Seconds] = {(0, v): np.full((1, 1), float(v)) for v in range(1, 100)}
    assert minimum([1] * 100, tables, 200_000) == [0] * 100


def test_a_grid_that_is_too_wide_is_decided_well() -> None:
    """Of 12 x 60 variables, whose tables grow to 4**12 entries."""
    rng, number = np.random.default_rng(0), np.arange(12 * 60).reshape(12, 60)
    edges = [
        *zip(number[:-1].flat, number[1:].flat, strict=True),
        *zip(number[:, :-1].flat, number[:, 1:].flat, strict=True),
    ]
    tables: dict[tuple[int, ...], Seconds] = {(int(a), int(b)): rng.random((4, 4)) for a, b in edges}
    found = minimum([4] * 720, tables, 200)
    average = np.mean([seconds(tables, [int(one) for one in rng.integers(4, size=720)]) for _ in range(20)])
    assert seconds(tables, found) < 0.55 * average
