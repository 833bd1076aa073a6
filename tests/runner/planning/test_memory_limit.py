"""Search budgets and recompute selection, for made-up ranks whose bytes are different functions of what is saved; the
knapsack of layers and modes against all candidates."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import pytest

from runner.planning.memory_limit import (
    CLOSE,
    FLATTEST,
    USUAL,
    Mode,
    RecomputedLayers,
    RecomputeSelection,
    SearchBudget,
    pareto_front,
)

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


KINDS: dict[str, dict[Mode, tuple[float, float]]] = {
    "a": {"full": (3.0, 10), "selective": (1.0, 4)},
    "b": {"full": (2.0, 9)},
    "c": {"full": (5.0, 11), "selective": (2.5, 7)},
}
COUNTS = {"a": 3, "b": 2, "c": 2}


def test_no_other_selection_saves_as_much_in_less_time():
    layers = {f"{kind}.{number}": KINDS[kind] for kind, count in COUNTS.items() for number in range(count)}
    front = pareto_front(layers)
    every = [
        tuple(map(sum, zip(*chosen, strict=True)))
        for chosen in itertools.product(*([(0.0, 0.0), *by_mode.values()] for by_mode in layers.values()))
    ]
    for lacking in range(1, int(max(saves for _, saves in every)) + 1):
        selected = next(one for one in front if one.saves >= lacking)
        assert selected.seconds == pytest.approx(min(seconds for seconds, saves in every if saves >= lacking))
        saved = [layers[path][mode][1] for mode, paths in selected.paths.items() for path in paths]
        assert sum(saved) == selected.saves
    assert front[0].paths == {"full": (), "selective": ()}
    assert front[-1].paths == {"full": tuple(layers), "selective": ()}


def test_first_layers_come_first():
    front = pareto_front({f"a.{number}": KINDS["a"] for number in range(3)})
    assert [one.paths["selective"] for one in front[:3]] == [(), ("a.0",), ("a.0", "a.1")]
    assert {"full": ("a.0", "a.1"), "selective": ("a.2",)} in [one.paths for one in front]


def equal_layers(group: int, count: int) -> list[RecomputedLayers]:
    """The front of a group whose layers all cost and save the same."""
    return pareto_front({f"{group}.{layer}": {"full": (1.0, 1.0)} for layer in range(count)})


def select(sizes: Sequence[Sequence[int]], measured: bool = True, guess: float = 1.0) -> tuple[list[int], int]:
    """For groups with `sizes` by the number of recomputed layers: that number per group, and the number of trials."""
    fronts = [equal_layers(group, len(one) - 1) for group, one in enumerate(sizes)]
    most = [round(guess * one[0]) for one in sizes]
    selection = RecomputeSelection([LIMIT] * len(fronts), fronts, most, [one[-1] for one in sizes], measured=measured)
    counts, tried, enough = [-1], 0, False
    while (layers := selection.next()) is not None:
        counts, tried = count(layers, len(sizes)), tried + 1
        enough = selection.update([one[count] for one, count in zip(sizes, counts, strict=True)])
    assert enough
    return counts, tried


def count(layers: Mapping[str, Mode], groups: int) -> list[int]:
    return [sum(path.startswith(f"{group}.") for path in layers) for group in range(groups)]


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
    least = [next(count for count, size in enumerate(one) if size <= LIMIT) for one in sizes]
    for measured, guess in ((True, 1.0), (False, 0.9), (False, 1.1)):
        counts, tried = select(sizes, measured, guess)
        assert counts == least
        assert tried <= 7


def test_the_lower_bound_is_no_more_than_is_selected():
    sizes = [falling(100, 5, 16), falling(80, 5, 16), falling(50, 5, 16)]
    fronts = [equal_layers(group, 16) for group in range(3)]
    first = RecomputeSelection([LIMIT] * len(fronts), fronts, [100, 80, 50], [one[-1] for one in sizes], measured=True)
    assert count(first.lower_bound, 3) == [7, 3, 0] and select(sizes)[0] == [8, 4, 0]
    more = RecomputeSelection([LIMIT], [equal_layers(0, 40)], [100], [20], measured=True)  # 20 by interpolation
    assert count(more.lower_bound, 1) == [17]


def test_a_layer_of_two_groups_leaves_none_too_small():
    """Both groups have layer b: recomputing it frees less than the second group expects, so it needs more layers."""
    fronts = [pareto_front({path: {"full": (1.0, 1.0)} for path in paths}) for paths in ("ab", "bc")]
    selection = RecomputeSelection([LIMIT] * len(fronts), fronts, [70, 50], [50, 40], measured=True)
    assert selection.next() == {"a": "full"}
    assert not selection.update([58, 61])
    assert selection.next() == {"a": "full", "b": "full"}
    assert selection.update([50, 55]) and selection.next() is None


def test_nothing_is_selected_where_all_layers_are_too_few():
    selection = RecomputeSelection([LIMIT], [equal_layers(0, 2)], [90], [60], measured=True)
    seen = []
    while (layers := selection.next()) is not None:
        seen.append(len(layers))
        assert not selection.update([80])
    assert seen == [1, 2]
