"""No solution costs less than the messages say of it, and what narrowing leaves of a network holds its optimum."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from models.losses import NextTokenLoss
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.search.agreeing import Agreeing
from strategies.search.cells import Network, Table, table
from strategies.search.coarse import shared
from strategies.search.elimination import eliminate
from strategies.search.exact import search
from strategies.search.finding import Finding
from strategies.search.halved import halved
from strategies.search.joining import joinings
from strategies.search.messages import Messages
from strategies.search.narrowing import Narrowed, effort
from strategies.search.options import Menu
from strategies.search.prices import Pricing
from strategies.search.problem import Problem
from strategies.search.transfers import Transfers
from tests.strategies.search.problems import node, nodes, prime_mesh, problem, shaped, tokens
from tests.strategies.search.test_exact import CLUSTER, MESHES, problem_of


def drawn(seed: int) -> Network:
    """Seven variables, tables over random pairs and threes of them, some with impossible entries, and two values that
    several of them use."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    network = Network()
    for _ in range(7):
        network.add(rng.choice([1, 2, 3, 4]))
    for size in (1, 1, 2, 2, 2, 2, 2, 2, 3):
        chosen = tuple(sorted(rng.sample(range(7), size)))
        seconds = numbers.random([network.sizes[v] for v in chosen])
        if size > 1:
            seconds[numbers.random(seconds.shape) < 0.1] = np.inf
        network.tables.append(table(chosen, seconds))
    for given in (True, False):
        chosen = tuple(sorted(rng.sample(range(7), 3 + given)))
        network.tables.append(Table(chosen, agreeing(rng, [network.sizes[v] for v in chosen], given)))
    return network


def agreeing(rng: random.Random, sizes: list[int], given: bool) -> Agreeing:
    """A value with random prices: its options have some of three layouts, those of its uses want some of four."""
    prices = np.random.default_rng(rng.getrandbits(30)).random((3 if given else 1, 4))
    before = np.array([rng.randrange(3) for _ in range(sizes[0])]) if given else None
    wanted = [np.array([rng.randrange(4) for _ in range(size)]) for size in sizes[given:]]
    return Agreeing(lambda: prices, before, wanted)


@pytest.mark.parametrize("given", [True, False])
def test_uses_that_agree_pay_once(given: bool) -> None:
    """Against what is paid by definition, and the messages of such a table against those of the table itself."""
    for seed in range(60):
        rng, numbers = random.Random(seed), np.random.default_rng(seed)
        sizes = [rng.randint(1, 5) for _ in range(rng.randint(1, 4) + given)]
        cell = agreeing(rng, sizes, given)
        for picks in product(*map(range, sizes)):
            row = 0 if cell.given is None else cell.given.of_option[picks[0]]
            wanted = {int(one.of_option[pick]) for one, pick in zip(cell.wanted, picks[given:], strict=True)}
            assert cell.seconds[picks] == pytest.approx(sum(cell.prices[row, layout] for layout in wanted))
        moved = [numbers.random(size) for size in sizes]
        dense = table(tuple(range(len(sizes))), cell.seconds).cell
        for place in (None, *range(len(sizes))):
            assert cell.left(moved, place) == pytest.approx(dense.left(moved, place))


def test_no_solution_costs_less_than_the_messages_say() -> None:
    tight = 0
    for seed in range(80):
        network = drawn(seed)
        costs = {picks: network.cost(picks) for picks in product(*map(range, network.sizes))}
        messages = Messages(network)
        lower = messages.bound()
        for picks, seconds in costs.items():
            for v, pick in enumerate(picks):
                assert seconds >= lower + messages.slack[v][pick] - 1e-9, seed
        tight += lower >= min(costs.values()) * (1 - 1e-6)
    assert tight > 20


@pytest.mark.parametrize("efforts", [(2**3,), (2**6,), (2**3, 2**20)])
def test_a_narrowed_network_tells_its_optimum_or_less(
    efforts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With enough effort it is the optimum; with less the bound stays one. Prices that rise raise it."""
    monkeypatch.setattr("strategies.search.narrowing.EFFORTS", efforts)
    exact = 0
    for seed in range(80):
        network = drawn(seed)
        narrowed = Narrowed(network)
        for _ in range(2):
            least = float(eliminate(dict(enumerate(network.sizes)), network.tables).table.seconds)
            picks, lower = narrowed.solve()
            assert lower <= least + 1e-9 <= network.cost(picks) + 2e-9, seed
            exact += network.cost(picks) <= lower + 1e-9
            assert network.cost(narrowed.again()[0]) == pytest.approx(network.cost(picks)), seed
            for one in network.tables[:6]:
                one.cell.made = one.seconds + 0.5 * np.random.default_rng(seed).random(one.seconds.shape)
    assert exact == 160 if max(efforts) > 2**10 else 20 < exact < 160


def test_effort_is_what_elimination_makes() -> None:
    """A chain of three and a triangle; variables with one option are no variables."""
    assert effort({0: 2, 1: 3, 2: 5}, {(0, 1), (1, 2)}, 1e9) == 2 * 3 + 3 * 5 + 5
    assert effort({0: 2, 1: 3, 2: 5}, {(0, 1), (1, 2), (0, 2)}, 1e9) == 2 * 3 * 5 + 15 + 5
    assert effort({0: 2, 1: 3, 2: 5}, {(0, 1), (1, 2), (0, 2)}, 10) > 10


def test_wide_networks_have_the_same_optimum_with_values_that_are_shared() -> None:
    tied = 0
    for seed in range(30):
        made = problem_of(seed, MESHES[seed % len(MESHES)], (4, 10))
        tied += shared(made)
        best = search(made, CLUSTER)
        finding = Finding(made, Menu(made, Transfers(made.mesh, CLUSTER)), 1e-12, wide=True)
        found = finding.cheapest(0.0)
        assert found.gap <= 1e-9, seed
        assert found.cost == pytest.approx(best.cost, rel=1e-9), seed
        for one in finding.building.network.tables:
            assert list(one.variables) == sorted(one.variables)
    assert tied > 3


class Tied(nn.Module):
    """Logits [b, s, v] by the embedding, once more."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.tokens(x), self.tokens.weight)


def test_tied_weights_are_certified_on_four_axes() -> None:
    with torch.device("meta"):
        net = Tied(50304, 768).bfloat16()
    made = problem(shaped(net, NextTokenLoss(), *tokens(64, 1024)), prime_mesh(16))
    assert shared(made)
    found = search(made, nodes(2))
    assert found.gap <= 0.01
    assert found.cost == pytest.approx(Pricing(made, nodes(2)).total(found.assignments, found.tensors))
    joined = [search(one.problem, nodes(2)).cost for one in joinings(made, nodes(2)) if len(one.runs) < 3]
    assert joined and found.cost <= min(joined) * 1.01


def test_neighbours_that_cannot_be_joined_are_left_to_rounds() -> None:
    """Tied weights on five axes, of which the batch takes every other."""
    with torch.device("meta"):
        net = Tied(64, 64)
    mesh = Mesh(tuple((axis, 2) for axis in "abcde"))
    asked = problem(shaped(net, NextTokenLoss(), *tokens(16, 16)), mesh)
    inputs = {name: Layout((("a", "c", "e"), ("b", "d"))) for name in asked.inputs}
    asked = Problem(asked.graph, mesh, asked.shardings, inputs, {}, {})
    found = search(asked, node(32))
    assert found.assignments == halved(asked, node(32)).assignments and 0 < found.lower_bound <= found.cost
