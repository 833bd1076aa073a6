"""No solution costs less than its dual bound, and reduced-cost fixing keeps the minimum."""

from __future__ import annotations

import random
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from models.losses import NextTokenLoss
from strategies.core.graph import Ref
from strategies.core.mesh import Mesh
from strategies.cost.plan_cost import PlanCost
from strategies.search.cost_graph import JointUses
from strategies.search.dual_bound import DualBound, ReducedCostFixing
from strategies.search.dynamic_programming import PlanSearch, search
from strategies.search.elimination import Elimination, Factor, FactorGraph, constant, elimination_effort
from tests.strategies.search.problems import nodes, problem, shaped, tokens
from tests.strategies.search.test_dynamic_programming import CLUSTER, MESHES, problem_of
from tests.strategies.search.test_factor_graph import total


def random_graph(seed: int) -> FactorGraph:
    """Seven variables, tables over random pairs and threes of them, some with impossible entries, and two values that
    several of them use."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    graph = FactorGraph()
    for _ in range(7):
        graph.add(rng.choice([1, 2, 3, 4]))
    for size in (1, 1, 2, 2, 2, 2, 2, 2, 3):
        chosen = tuple(sorted(rng.sample(range(7), size)))
        seconds = numbers.random([graph.sizes[v] for v in chosen])
        if size > 1:
            seconds[numbers.random(seconds.shape) < 0.1] = np.inf
        graph.factors.append(constant(chosen, seconds))
    for given in (True, False):
        chosen = tuple(sorted(rng.sample(range(7), 3 + given)))
        graph.factors.append(Factor(chosen, joint_uses(rng, [graph.sizes[v] for v in chosen], given)))
    return graph


def joint_uses(rng: random.Random, sizes: list[int], given: bool) -> JointUses:
    """A value with random costs: its options have some of three layouts, those of its uses need some of four."""
    costs = np.random.default_rng(rng.getrandbits(30)).random((3 if given else 1, 4))
    before = np.array([rng.randrange(3) for _ in range(sizes[0])]) if given else None
    wanted = [np.array([rng.randrange(4) for _ in range(size)]) for size in sizes[given:]]
    return JointUses(lambda: costs, before, wanted)


@pytest.mark.parametrize("given", [True, False])
def test_uses_that_agree_pay_once(given: bool) -> None:
    """Against the cost by definition, and the messages of such a factor against those of the dense factor."""
    for seed in range(60):
        rng, numbers = random.Random(seed), np.random.default_rng(seed)
        sizes = [rng.randint(1, 5) for _ in range(rng.randint(1, 4) + given)]
        table = joint_uses(rng, sizes, given)
        for indices in product(*map(range, sizes)):
            row = 0 if table.given is None else table.given.of_candidate[indices[0]]
            wanted = {int(one.of_candidate[index]) for one, index in zip(table.wanted, indices[given:], strict=True)}
            assert table.seconds[indices] == pytest.approx(sum(table.costs[row, layout] for layout in wanted))
        moved = [numbers.random(size) for size in sizes]
        dense = constant(tuple(range(len(sizes))), table.seconds).table
        for place in (None, *range(len(sizes))):
            assert table.least(moved, place) == pytest.approx(dense.least(moved, place))


def test_no_solution_costs_less_than_the_messages_say() -> None:
    tight = 0
    for seed in range(80):
        graph = random_graph(seed)
        costs = {indices: total(graph, indices) for indices in product(*map(range, graph.sizes))}
        dual = DualBound(graph)
        lower = dual.bound()
        for indices, seconds in costs.items():
            assert seconds >= lower - 1e-9, seed
            for v, index in enumerate(indices):
                assert seconds >= dual.before + dual.reduced_costs[v][index] - 1e-9, seed
        tight += lower >= min(costs.values()) * (1 - 1e-6)
    assert tight > 20


@pytest.mark.few(1)
@pytest.mark.parametrize("cheap", [1, 2**3, 2**5, 2**18])
@pytest.mark.parametrize("efforts", [(2**3,), (2**6,), (2**3, 2**20)])
def test_a_solver_graph_returns_its_optimum_or_less(
    efforts: tuple[int, ...], cheap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With enough effort it is the optimum, and where all variables are cheap to eliminate; with less it stays a bound.
    Higher costs raise it."""
    monkeypatch.setattr("strategies.search.dual_bound.EFFORTS", efforts)
    monkeypatch.setattr("strategies.search.dual_bound.CHEAP", cheap)
    exact = 0
    for seed in range(80):
        graph = random_graph(seed)
        solver = ReducedCostFixing(graph)
        for _ in range(2):
            _, least = Elimination(dict(enumerate(graph.sizes)), graph.factors).solve()
            indices, lower = solver.solve()
            assert lower <= least + 1e-9 <= total(graph, indices) + 2e-9, seed
            exact += total(graph, indices) <= lower + 1e-9
            assert total(graph, solver.again()[0]) == pytest.approx(total(graph, indices)), seed
            for one in graph.factors[:6]:
                higher = one.seconds + 0.5 * np.random.default_rng(seed).random(one.seconds.shape)
                one.table.make = partial(np.asarray, higher)
                one.table.refresh()
    assert exact == 160 if max(*efforts, cheap) > 2**10 else 20 < exact < 160


def test_effort_is_that_of_elimination() -> None:
    """A chain of three and a triangle; variables with one option do not count."""
    assert elimination_effort({0: 2, 1: 3, 2: 5}, {(0, 1), (1, 2)}, 1e9) == 2 * 3 + 3 * 5 + 5
    assert elimination_effort({0: 2, 1: 3, 2: 5}, {(0, 1), (1, 2), (0, 2)}, 1e9) == 2 * 3 * 5 + 15 + 5
    assert elimination_effort({0: 2, 1: 3, 2: 5}, {(0, 1), (1, 2), (0, 2)}, 10) > 10


@pytest.mark.slow
def test_wide_networks_have_the_same_optimum_with_values_that_are_shared() -> None:
    tied = 0
    for seed in range(30):
        made = problem_of(seed, MESHES[seed % len(MESHES)], (4, 10))
        tied += any(len(made.graph.users[Ref(one.id)]) > 1 for one in made.graph.of_kind("parameter"))
        best = search(made, CLUSTER)
        plans = PlanSearch(made, CLUSTER, 1e-12, wide=True)
        found = plans.cheapest(0.0, 1e-12).solution
        assert found.gap <= 1e-9, seed
        assert found.cost == pytest.approx(best.cost, rel=1e-9), seed
        for one in plans.graph.factors.factors:
            assert list(one.variables) == sorted(one.variables)
    assert tied > 3


class Tied(nn.Module):
    """Logits [b, s, v] by the embedding, once more."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.tokens(x), self.tokens.weight)


def test_tied_weights_are_certified_on_three_axes() -> None:
    with torch.device("meta"):
        net = Tied(50304, 768).bfloat16()
    made, machine = (
        problem(shaped(net, NextTokenLoss(), *tokens(64, 1024)), Mesh((("a", 2), ("b", 4), ("c", 2)))),
        nodes(2),
    )
    found = search(made, machine)
    assert found.gap <= 0.01
    assert found.cost == pytest.approx(PlanCost(made, machine).total(found.assignments, found.tensors))
