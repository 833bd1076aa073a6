"""Recompute selection: the fewest layers that keep a limit, for made-up groups whose bytes fall with every layer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from runner.planning.memory_limit import FewestLayers

LIMIT = 60


def found(sizes: Sequence[Sequence[int]], measured: bool = True, guess: float = 1.0) -> tuple[list[int], int]:
    """For groups with `sizes` by the number of recomputed layers: that number per group, and the number of trials."""
    every = [tuple(f"{group}.{layer}" for layer in range(len(one) - 1)) for group, one in enumerate(sizes)]
    most = [round(guess * one[0]) for one in sizes]
    fewest = FewestLayers(LIMIT, every, most, [one[-1] for one in sizes], measured=measured)
    counts, tried, enough = [-1], 0, False
    while (layers := fewest.next()) is not None:
        counts, tried = [sum(name in layers for name in one) for one in every], tried + 1
        enough = fewest.update([one[count] for one, count in zip(sizes, counts, strict=True)])
    assert enough
    return counts, tried


def falling(most: int, by: int, layers: int, bent: int = 0) -> list[int]:
    return [most - by * count + bent * count * (layers - count) for count in range(layers + 1)]


@pytest.mark.parametrize(
    "sizes",
    [
        [falling(100, 5, 16)],
        [falling(100, 5, 16), falling(80, 5, 16), falling(62, 1, 16), falling(50, 1, 16)],
        [falling(110, 15, 4), falling(95, 15, 4), falling(61, 15, 4), falling(59, 15, 4)],
        [falling(100, 4, 32, -1), falling(70, 2, 32)],
        [falling(61, 2, 1), falling(40, 2, 1)],
    ],
    ids=["one", "apart", "short", "bent", "single"],
)
def test_every_group_recomputes_as_few_layers_as_it_needs(sizes):
    fewest = [next(count for count, size in enumerate(one) if size <= LIMIT) for one in sizes]
    for measured, guess in ((True, 1.0), (False, 0.9), (False, 1.1)):
        counts, tried = found(sizes, measured, guess)
        assert counts == fewest
        assert tried <= 7


def test_what_is_surely_among_them_is_no_more_than_is_found():
    sizes = [falling(100, 5, 16), falling(80, 5, 16), falling(50, 5, 16)]
    every = [tuple(f"{group}.{layer}" for layer in range(16)) for group in range(3)]
    first = FewestLayers(LIMIT, every, [100, 80, 50], [one[-1] for one in sizes], measured=True)
    counts, _ = found(sizes)
    own = [sum(name in first.lower_bound for name in one) for one in every]
    assert own == [7, 3, 0] and counts == [8, 4, 0]


def test_a_layer_of_two_groups_leaves_none_too_small():
    """Both groups have layer b: recomputing it frees less than the second group expects, so it needs more layers."""
    fewest = FewestLayers(LIMIT, [("a", "b"), ("b", "c")], [70, 50], [50, 40], measured=True)
    layers = fewest.next()
    assert layers == {"a"}
    assert not fewest.update([58, 61])
    assert fewest.next() == {"a", "b"}
    assert fewest.update([50, 55]) and fewest.next() is None


def test_nothing_is_found_where_all_layers_are_too_few():
    fewest = FewestLayers(LIMIT, [("a", "b")], [90], [60], measured=True)
    seen = []
    while (layers := fewest.next()) is not None:
        seen.append(len(layers))
        assert not fewest.update([80])
    assert seen == [1, 2]
