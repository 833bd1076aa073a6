"""Prices of many pairs of layouts, against chains one by one; and what is solved again when prices have changed."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

from strategies.core.graph import TensorSpec
from strategies.core.mesh import Mesh
from strategies.cost.collectives import path_seconds
from strategies.resharding.path import resharding_path
from strategies.search import elimination
from strategies.search import transfers as pricing
from strategies.search.cells import Network, table
from strategies.search.elimination import Elimination, eliminate
from strategies.search.folding import Folded
from strategies.search.transfers import Rows, Transfers
from tests.strategies.search.test_network import NODES, random_network

MESH = Mesh((("a", 2), ("b", 4)))
SPECS = (
    TensorSpec((64, 1024, 512), "bfloat16"),
    TensorSpec((64, 512, 1024), "float32"),
    TensorSpec((64, 6, 512), "bfloat16"),
)


def rows_of(prices: Transfers) -> tuple[Rows, Rows]:
    """Layouts of tensors of three dims, with partial sums and without."""
    every, whole = (np.array(list(product(range(low, 3), repeat=2))) for low in (-2, -1))
    return prices.rows(every, 3), prices.rows(whole, 3)


def price(prices: Transfers, before: Rows, after: Rows, spec: TensorSpec, row: int, column: int) -> float:
    steps = resharding_path(prices.layout(before, row), prices.layout(after, column), spec.shape, prices.mesh)
    return path_seconds(steps, spec.item_bytes, prices.mesh, NODES)


@pytest.mark.parametrize(
    "mixed", [pricing.mixed, lambda before, after, kinds: np.zeros((len(before), len(after)), int)]
)
def test_settled_pairs_have_the_price_of_their_chain_and_others_less(
    mixed: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pricing, "mixed", mixed)  # where all patterns share one number, they are told apart in full
    prices, rng = Transfers(MESH, NODES, few=0), random.Random(0)
    before, after = rows_of(prices)
    for spec in SPECS:  # those that come later take over what is known
        prices.seconds(before, after, spec)
        for _ in range(20):
            row, column = rng.randrange(len(before)), rng.randrange(len(after))
            prices.settle(before, after, spec, row, column)
    settled = 0
    for spec in SPECS:
        asked, found = prices.asked[prices._key(before, after, spec)], prices.seconds(before, after, spec)
        for row, column in product(range(len(before)), range(len(after))):
            real = price(prices, before, after, spec, row, column)
            if asked.settled[row, column]:
                assert found[row, column] == pytest.approx(real, rel=1e-12)
            else:
                assert found[row, column] <= real * (1 + 1e-12)
        settled += int(asked.settled.sum())
    assert settled > 150


def test_settling_one_pair_settles_all_with_its_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = TensorSpec((64, 1024, 512), "bfloat16"), TensorSpec((64, 512, 1024), "bfloat16")
    for alike in (-1.0, 1e-6):  # not those that are bounded alike, and these too
        monkeypatch.setattr(pricing, "ALIKE", alike)
        prices = Transfers(MESH, NODES, few=0)
        before, after = rows_of(prices)
        bounds = [prices.seconds(before, after, spec) for spec in (first, second)]
        sliced, other = (
            int(np.flatnonzero((before.dims == dims).all(1) & (before.partial == 0))[0])
            for dims in ([0, 3, 0], [0, 0, 3])
        )
        whole = int(np.flatnonzero((after.dims == 0).all(1))[0])
        prices.settle(before, after, first, sliced, whole)
        for bound, spec in zip(bounds, (first, second), strict=True):  # dims behind the first have no order
            settled = prices.asked[prices._key(before, after, spec)].settled
            assert settled[sliced, whole] and settled[other, whole]
            same = np.isclose(bound, bound[sliced, whole], rtol=1e-9)
            line = np.flatnonzero(same[sliced]), np.flatnonzero(same[:, whole])
            assert (
                (settled.sum() == 2)
                if alike < 0
                else (settled[sliced, line[0]].all() and settled[line[1], whole].all())
            )
            assert len(line[0]) + len(line[1]) > 2


def test_bounds_of_exchanges_are_near_their_prices() -> None:
    prices = Transfers(MESH, NODES, few=0)
    before, after = rows_of(prices)
    spec = TensorSpec((64, 2048, 4096), "bfloat16")
    low = prices.seconds(before, after, spec)
    real = np.array([[price(prices, before, after, spec, i, k) for k in range(len(after))] for i in range(len(before))])
    full = np.ix_(
        *[
            (one.dims > 0).any(1) & (prices.counts[one.dims].prod(1) == 8) & (one.partial == 0)
            for one in (before, after)
        ]
    )
    moved = real[full] > 0
    assert moved.sum() > 50 and (low[full] <= real[full] * (1 + 1e-12)).all()
    assert (low[full][moved] / real[full][moved]).mean() > 0.9


def changed(network: Network, rng: np.random.Generator, share: float) -> None:
    """Makes some cells again, with other numbers."""
    for cell in {id(one.cell): one.cell for one in network.tables}.values():
        if rng.random() < share:
            shape = cell.seconds.shape
            cell.make = lambda shape=shape: rng.random(shape)  # type: ignore[misc]
            cell.refresh()
            assert cell.seconds.shape == shape


def test_a_network_is_solved_again_when_its_prices_change() -> None:
    for seed in range(30):
        network, rng = random_network(random.Random(seed), 3 + seed % 9), np.random.default_rng(seed)
        folded, sizes = Folded(network), dict(enumerate(network.sizes))
        whole = Elimination(sizes, network.tables)
        for share in (0.0, 0.3, 1.0, 0.3):
            changed(network, rng, share)
            least = float(eliminate(sizes, network.tables).table.seconds)
            picks, found = folded.solve()
            assert found == pytest.approx(least) and network.cost(picks) == pytest.approx(least)
            rest, completed = whole.solve(), dict[int, int]()
            rest.complete(completed)
            assert float(rest.table.seconds) == pytest.approx(least)
            assert network.cost([completed[v] for v in sizes]) == pytest.approx(least)


def test_a_network_takes_over_what_another_with_the_same_cells_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    least = elimination.minimised
    monkeypatch.setattr(elimination, "minimised", lambda parts: (made.append(len(parts)), least(parts))[1])
    network, rng = random_network(random.Random(5), 12), np.random.default_rng(5)
    for share in (0.0, 0.4):
        changed(network, rng, share)
        fresh = Network(network.sizes, network.tables)
        alone, sums = Folded(fresh).solve(), len(made)
        made.clear()
        again = Folded(Network(network.sizes, network.tables, fresh.known)).solve()
        assert 0 < 2 * len(made) < sums and again == alone
        made.clear()


def test_equal_sums_are_taken_over_where_they_stand_alike() -> None:
    numbers = np.random.default_rng(0)
    first, second = numbers.random((3, 3)), numbers.random((3, 3))
    turned = eliminate({0: 3, 1: 3, 2: 3}, [table((0, 1), first), table((0, 2), second)], kept=(1, 2))
    other = eliminate({0: 3, 1: 3, 2: 3}, [table((1, 0), first), table((0, 2), second)], kept=(1, 2))
    both = eliminate(
        {0: 3, 1: 3, 2: 3, 3: 3},
        [table((0, 1), first), table((0, 2), second), table((1, 3), first), table((3, 2), second)],
        kept=(1, 2),
    )
    assert np.allclose(both.table.seconds, turned.table.seconds + other.table.seconds)
    assert not np.allclose(turned.table.seconds, other.table.seconds)
