"""Elimination and folding against enumeration and a mixed-integer program; bounds against prices; limits of memory."""

from __future__ import annotations

import random
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
from strategies.rules import rule_of
from strategies.search.cells import Cell, Network, Table, table
from strategies.search.elimination import eliminate
from strategies.search.exact import search
from strategies.search.folding import Folded
from strategies.search.network import Building
from strategies.search.options import Menu
from strategies.search.problem import Problem
from strategies.search.transfers import Transfers
from tests.strategies.search.integer_program import integer_optimum, settled

NODES = Cluster(
    "nodes",
    (Level("node", 8, Link(4e10, 1e-5)), Level("device", 8, Link(3e11, 5e-6))),
    {"float32": 5e13, "bfloat16": 4e14},
    80 * 2**30,
    2.5e12,
    3e-6,
)


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


def random_network(rng: random.Random, blocks: int) -> Network:
    """Blocks of three variables, each touching the block before; the first variable is touched by all."""
    numbers = np.random.default_rng(rng.getrandbits(30))
    network, sizes = Network(), [rng.randint(1, 4) for _ in range(3)]
    network.add(rng.randint(1, 3))
    first = network.sizes[0]
    cells = {
        name: Cell(lambda shape=shape: numbers.random(shape))  # type: ignore[misc]
        for name, shape in {
            "own": (sizes[0],),
            "back": (sizes[2], sizes[0]),
            "all": (first, sizes[1]),
            "step": (sizes[0], sizes[1]),
            "three": (sizes[0], sizes[1], sizes[2]),
        }.items()
    }
    for block in range(blocks):
        a, b, c = (network.add(size) for size in sizes)
        network.tables += [Table((a,), cells["own"]), Table((0, b), cells["all"]), Table((a, b), cells["step"])]
        network.tables.append(Table((a, b, c), cells["three"]))
        if block:
            network.tables.append(Table((a - 1, a), cells["back"]))
    last = network.add(2)
    network.tables.append(table((last - 1, last), numbers.random((sizes[2], 2))))
    return network


def test_elimination_finds_what_enumeration_finds() -> None:
    for seed in range(200):
        network = random_network(random.Random(seed), 2)
        rest = eliminate(dict(enumerate(network.sizes)), network.tables)
        picks: dict[int, int] = {}
        rest.complete(picks)
        least = min(network.cost(one) for one in product(*map(range, network.sizes)))
        assert float(rest.table.seconds) == pytest.approx(least)
        assert network.cost([picks[v] for v in range(len(network.sizes))]) == pytest.approx(least)


def test_folding_changes_nothing() -> None:
    folded_any = 0
    for seed in range(60):
        network = random_network(random.Random(seed), 3 + seed % 14)
        folded = Folded(network)
        folded_any += bool(folded.runs)
        picks, least = folded.solve()
        assert least == pytest.approx(float(eliminate(dict(enumerate(network.sizes)), network.tables).table.seconds))
        assert network.cost(picks) == pytest.approx(least)
    assert folded_any > 40


@pytest.mark.parametrize(
    ("make", "layers", "sizes"),
    [
        *((llama, layers, sizes) for layers in (2, 8) for sizes in ((8,), (2, 4))),
        *((gpt, layers, sizes) for layers in (2, 12) for sizes in ((8,), (2, 4))),
    ],
)
def test_an_integer_program_finds_nothing_better(make: type, layers: int, sizes: tuple[int, ...]) -> None:
    problem = problem_of(make(layers), *sizes)
    found = search(problem, NODES)
    assert found.gap <= 1e-9
    assert integer_optimum(settled(problem, NODES)) == pytest.approx(found.cost, rel=1e-6)


@pytest.mark.parametrize("sizes", [(8,), (2, 4), (8, 8), (2, 2, 2)])
def test_bounds_are_below_prices(sizes: tuple[int, ...]) -> None:
    mesh = Mesh(tuple(zip("abc", sizes, strict=False)))
    spec = TensorSpec((64, 1024, 512), "bfloat16")
    places = np.array(list(product((-2, -1, 0, 1, 2), repeat=len(sizes))))
    whole = np.array(list(product((-1, 0, 1, 2), repeat=len(sizes))))
    bounded, priced = Transfers(mesh, NODES, few=0), Transfers(mesh, NODES, few=10**9)
    low = bounded.seconds(bounded.rows(places, 3), bounded.rows(whole, 3), spec)
    real = priced.seconds(priced.rows(places, 3), priced.rows(whole, 3), spec)
    assert (low <= real * (1 + 1e-12)).all()
    assert (low[real > 0] > 0).all() and (low == real).mean() > 0.05
    before, after = bounded.rows(places, 3), bounded.rows(whole, 3)
    for row in range(0, len(before), 7):
        for column in range(0, len(after), 5):
            bounded.settle(before, after, spec, row, column)
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
    building = Building(problem, Menu(problem, Transfers(problem.mesh, NODES)))
    free, rng = search(problem, NODES), random.Random(0)
    limit = 0.9 * free.bytes
    found = search(replace(problem, memory=limit), NODES)
    small = {building.variables[id]: int(choices.bytes.argmin()) for id, choices in building.choices.items()}
    kept = 0
    for _ in range(300):
        picks = [
            small[v] if v in small and rng.random() < 0.9 else rng.randrange(size)
            for v, size in enumerate(building.network.sizes)
        ]
        if building.bytes(picks) <= limit:
            kept += 1
            building.settle(picks)
            assert building.cost(picks) >= found.lower_bound
    assert kept > 10
