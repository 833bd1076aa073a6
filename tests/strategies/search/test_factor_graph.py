"""Elimination against enumeration and a mixed-integer program; bounds against costs; memory limits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

from models.gpt import GPT
from models.llama import Llama
from strategies.capture import Objective, capture
from strategies.core.errors import StrategyError
from strategies.core.graph import OperatorGraph, TensorSpec
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.cost.cluster import Cluster, Level, Link
from strategies.cost.problem import Problem
from strategies.cost.resharding_matrix import ReshardingCosts
from strategies.rules import rule_of
from strategies.search import elimination
from strategies.search.cost_graph import CostGraph
from strategies.search.dynamic_programming import search
from strategies.search.elimination import Elimination, Factor, FactorGraph, FactorTable, Memo, constant
from strategies.search.strategy_space import StrategySpace
from tests.strategies.search.integer_program import evaluated, integer_optimum

NODES = Cluster(
    "nodes",
    (Level("node", 8, Link(4e10, 1e-5)), Level("device", 8, Link(3e11, 5e-6))),
    {"float32": 5e13, "bfloat16": 4e14},
    80 * 2**30,
    2.5e12,
    3e-6,
)


def total(graph: FactorGraph, indices: Sequence[int]) -> float:
    """Seconds of an assignment, by the candidate of every variable."""
    return float(sum(one.seconds[tuple(indices[v] for v in one.variables)] for one in graph.factors))


class Loss(nn.Module):
    def forward(self, scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten())


def graph_of(model: nn.Module, rows: int, length: int) -> OperatorGraph:
    tokens = torch.zeros(rows, length, dtype=torch.long, device="meta")
    return capture(Objective(model, Loss(), ("0", "1"), ("1",)), (tokens, tokens), training=True).graph


def llama(layers: int) -> OperatorGraph:
    with torch.device("meta"):
        return graph_of(Llama(32000, 1024, 1024, layers, 16, 8, 2816), 16, 1024)


def gpt(layers: int) -> OperatorGraph:
    with torch.device("meta"):
        return graph_of(GPT(50304, 1024, 768, layers, 12), 16, 1024)


def problem_of(graph: OperatorGraph, *sizes: int) -> Problem:
    mesh = Mesh(tuple(zip("abcdef", sizes, strict=False)))
    inputs = {s.name: Layout((("a",), *((),) * (len(s.spec.shape) - 1))) for s in graph.of_kind("input")}
    return Problem(graph, mesh, {o.id: rule_of(o, graph) for o in graph.operators}, inputs, {}, {})


def random_network(rng: random.Random, blocks: int) -> FactorGraph:
    """Blocks of three variables, each connected to the block before; the first variable is connected to all."""
    numbers = np.random.default_rng(rng.getrandbits(30))
    graph, sizes = FactorGraph(), [rng.randint(1, 4) for _ in range(3)]
    graph.add(rng.randint(1, 3))
    first = graph.sizes[0]
    cells = {
        name: FactorTable(lambda shape=shape: numbers.random(shape))  # type: ignore[misc]
        for name, shape in {
            "own": (sizes[0],),
            "back": (sizes[2], sizes[0]),
            "all": (first, sizes[1]),
            "step": (sizes[0], sizes[1]),
            "three": (sizes[0], sizes[1], sizes[2]),
        }.items()
    }
    for block in range(blocks):
        a, b, c = (graph.add(size) for size in sizes)
        graph.factors += [Factor((a,), cells["own"]), Factor((0, b), cells["all"]), Factor((a, b), cells["step"])]
        graph.factors.append(Factor((a, b, c), cells["three"]))
        if block:
            graph.factors.append(Factor((a - 1, a), cells["back"]))
    last = graph.add(2)
    graph.factors.append(constant((last - 1, last), numbers.random((sizes[2], 2))))
    return graph


def test_elimination_equals_enumeration() -> None:
    for seed in range(200):
        graph = random_network(random.Random(seed), 2)
        indices, seconds = Elimination(dict(enumerate(graph.sizes)), graph.factors).solve()
        least = min(total(graph, one) for one in product(*map(range, graph.sizes)))
        assert seconds == pytest.approx(least)
        assert total(graph, [indices[v] for v in range(len(graph.sizes))]) == pytest.approx(least)


def test_layers_with_the_same_tables_share_minima() -> None:
    """The minimum is that of tables that are equal but not the same, where every variable has a minimum of its own."""
    problem = problem_of(gpt(6), 2, 4)
    graph = CostGraph(problem, StrategySpace(problem, ReshardingCosts(problem.mesh, NODES))).factors
    sizes = dict(enumerate(graph.sizes))
    shared = Elimination(sizes, graph.factors)
    apart = Elimination(sizes, [constant(one.variables, one.seconds.copy()) for one in graph.factors])
    indices, seconds = shared.solve()
    assert seconds == pytest.approx(apart.solve()[1])
    assert total(graph, [indices[v] for v in sizes]) == pytest.approx(seconds)
    assert len(apart.minima) == len(sizes) and len(shared.minima) < 0.6 * len(sizes)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("make", "layers", "sizes"),
    [
        *(
            pytest.param(llama, layers, sizes, marks=[pytest.mark.slow] * (layers > 2))
            for layers in (2, 8)
            for sizes in ((8,), (2, 4))
        ),
        *(
            pytest.param(gpt, layers, sizes, marks=[pytest.mark.slow] * (layers > 2))
            for layers in (2, 12)
            for sizes in ((8,), (2, 4))
        ),
    ],
)
def test_an_integer_program_finds_nothing_better(make: type, layers: int, sizes: tuple[int, ...]) -> None:
    problem = problem_of(make(layers), *sizes)
    found = search(problem, NODES)
    assert found.gap <= 1e-9
    assert integer_optimum(evaluated(problem, NODES)) == pytest.approx(found.cost, rel=1e-6)


@pytest.mark.few(2)
@pytest.mark.parametrize("sizes", [(8,), (2, 4), (8, 8), (2, 2, 2)])
def test_bounds_are_below_costs(sizes: tuple[int, ...]) -> None:
    mesh = Mesh(tuple(zip("abc", sizes, strict=False)))
    spec = TensorSpec((64, 1024, 512), "bfloat16")
    places = np.array(list(product((-2, -1, 0, 1, 2), repeat=len(sizes))))
    not_partial = np.array(list(product((-1, 0, 1, 2), repeat=len(sizes))))
    bounded, priced = ReshardingCosts(mesh, NODES, at_once=0), ReshardingCosts(mesh, NODES, at_once=10**9)
    low = bounded.seconds(bounded.table(places, 3), bounded.table(not_partial, 3), spec)
    real = priced.seconds(priced.table(places, 3), priced.table(not_partial, 3), spec)
    assert (low <= real * (1 + 1e-12)).all()
    assert (low[real > 0] > 0).all() and (low == real).mean() > 0.05
    before, after = bounded.table(places, 3), bounded.table(not_partial, 3)
    for row in range(0, len(before), 7):
        for column in range(0, len(after), 5):
            bounded.evaluate(before, after, spec, row, column)
            assert bounded.seconds(before, after, spec)[row, column] == pytest.approx(real[row, column], rel=1e-12)


def test_a_limit_of_memory_is_kept() -> None:
    problem = problem_of(llama(6), 2, 4)
    free = search(problem, NODES)
    least = free.cost
    for share in (0.9, 0.7):
        found = search(replace(problem, memory=share * free.bytes), NODES)
        assert found.bytes <= share * free.bytes
        assert found.cost >= least
        assert found.lower_bound <= found.cost and found.gap < 0.05
        least = found.cost
    assert search(replace(problem, memory=2 * free.bytes), NODES).cost == free.cost
    with pytest.raises(StrategyError, match=r"parallel.memory_limit .* no plan was found that keeps it"):
        search(replace(problem, memory=1e6), NODES)


def test_no_plan_within_a_limit_is_below_the_bound() -> None:
    problem = problem_of(llama(1), 2, 4)
    graph = CostGraph(problem, StrategySpace(problem, ReshardingCosts(problem.mesh, NODES)))
    free, rng = search(problem, NODES), random.Random(0)
    limit = 0.9 * free.bytes
    found = search(replace(problem, memory=limit), NODES)
    small = {graph.variables[id]: int(candidates.bytes.argmin()) for id, candidates in graph.candidates.items()}
    kept = 0
    for _ in range(300):
        indices = [
            small[v] if v in small and rng.random() < 0.9 else rng.randrange(size)
            for v, size in enumerate(graph.factors.sizes)
        ]
        if graph.bytes(indices) <= limit:
            kept += 1
            graph.evaluate(indices)
            assert graph.cost(indices) >= found.lower_bound
    assert kept > 10


def changed(graph: FactorGraph, rng: np.random.Generator, share: float) -> None:
    """Replaces some factors with other numbers."""
    for table in {id(one.table): one.table for one in graph.factors}.values():
        if rng.random() < share:
            shape = table.seconds.shape
            table.make = lambda shape=shape: rng.random(shape)  # type: ignore[misc]
            table.refresh()
            assert table.seconds.shape == shape


def test_a_graph_is_solved_again_when_its_seconds_change() -> None:
    for seed in range(30):
        graph, rng = random_network(random.Random(seed), 3 + seed % 9), np.random.default_rng(seed)
        sizes = dict(enumerate(graph.sizes))
        again = Elimination(sizes, graph.factors)
        for share in (0.0, 0.3, 1.0, 0.3):
            changed(graph, rng, share)
            indices, least = again.solve()
            assert least == pytest.approx(Elimination(sizes, graph.factors).solve()[1])
            assert total(graph, [indices[v] for v in sizes]) == pytest.approx(least)


def test_a_graph_reuses_minima_of_another_with_the_same_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    least = elimination.minimised
    monkeypatch.setattr(elimination, "minimised", lambda parts: (made.append(len(parts)), least(parts))[1])
    graph, rng = random_network(random.Random(5), 12), np.random.default_rng(5)
    for share in (0.0, 0.4):
        changed(graph, rng, share)
        sizes, memo = dict(enumerate(graph.sizes)), Memo()
        alone, sums = Elimination(sizes, graph.factors).solve(memo), len(made)
        made.clear()
        again = Elimination(sizes, graph.factors).solve(memo)
        assert sums and not made and again == alone
        made.clear()


def test_equal_sums_are_reused_where_their_dims_match() -> None:
    """Two pairs of equal tables around 0 and 3, once turned: their sums differ."""
    numbers = np.random.default_rng(0)
    first, second = (constant((0, 1), numbers.random((3, 3))).table for _ in range(2))
    graph = FactorGraph([3] * 4)
    graph.factors += [Factor((0, 1), first), Factor((0, 2), second), Factor((1, 3), first), Factor((2, 3), second)]
    indices, seconds = Elimination(dict(enumerate(graph.sizes)), graph.factors).solve()
    least = min(total(graph, one) for one in product(range(3), repeat=4))
    assert seconds == pytest.approx(least) == total(graph, [indices[v] for v in range(4)])
