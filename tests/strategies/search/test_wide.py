"""Meshes of very many axes: what is told in a cheaper way is what it was, or below; and plans are certified."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from models.ffn import FFN
from strategies.core.mesh import Mesh
from strategies.search import elimination, messages, networks, ways
from strategies.search.alike import Alike
from strategies.search.choosing import Exactly, choose
from strategies.search.coarse import Coarse, shared
from strategies.search.counted import members
from strategies.search.exact import search
from strategies.search.folding import Folded
from strategies.search.groups import Classes, Groups
from strategies.search.narrowing import Narrowed
from strategies.search.network import Building
from strategies.search.options import Menu
from strategies.search.problem import Problem
from strategies.search.shortened import BLOCKS, Shortened
from strategies.search.transfers import Transfers
from strategies.search.ways import Ways, levels_of
from tests.strategies.search.problems import llama, nodes, prime_mesh, problem, shaped
from tests.strategies.search.test_coarse import MESHES, whole
from tests.strategies.search.test_exact import problem_of

FOUR = Mesh(tuple((axis, 2) for axis in "abcd"))
"""Two axes among nodes and two within them."""


@pytest.mark.parametrize(("mesh", "cluster"), MESHES[:2])
def test_ways_are_known_as_far_as_they_are_asked_for(
    mesh: Mesh, cluster: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, size, same = random.Random(5), 1e8, []
    every = Ways(mesh, cluster, levels_of(mesh, cluster), 3)
    assert len(every.states) > ways.NEAREST
    monkeypatch.setattr(ways, "FEW", 0)
    few = Ways(mesh, cluster, levels_of(mesh, cluster), 3)
    for _ in range(6):
        start, end = rng.randrange(len(every.states)), int(rng.choice(every.total))
        told = every.seconds(start, size)
        if start == end or not np.isfinite(told[end]):
            continue
        found, upto = few.until(start, size, end, 0.0)
        assert found[end] < upto and (found <= np.minimum(told, upto) * (1 + 1e-12)).all()
        same.append(found[end] == pytest.approx(told[end]))
    assert len(same) >= 4 and any(same)


def grouped(asked: Problem, cluster: object) -> Groups:
    transfers = Transfers(asked.mesh, cluster)
    return Groups(Classes(asked, transfers, Alike(transfers, levels_of(asked.mesh, cluster))))


def test_what_is_counted_costs_what_single_assignments_cost() -> None:
    cluster = nodes(4, 4)
    asked = problem(llama(1, batch=16), FOUR)
    classes, menu = grouped(asked, cluster).classes, Menu(asked, Transfers(FOUR, cluster))
    compared = 0
    for operator in asked.graph.operators:
        few, every = classes.of(operator), menu.of(operator)
        places = {tuple(sorted(one.items())): place for place, one in enumerate(every.assignments)}
        at = [places[tuple(sorted(few.assignments[place].items()))] for place in range(len(few))]
        np.testing.assert_allclose(few.own, every.own[at], rtol=1e-12)
        np.testing.assert_allclose(few.bytes, every.bytes[at], rtol=1e-12)
        assert len(set(at)) == len(at)
        compared += len(at)
    assert compared > 1000


def test_members_of_a_class() -> None:
    levels = [np.arange(4), np.arange(4, 6)]
    row = np.array([-1, 0, 0, 1, 1, 2])
    every, runs = members(row, levels, 24), members(row, levels, 23)
    assert len({tuple(one) for one in every.tolist()}) == len(every) == 12 * 2
    assert len(runs) == 6 * 2 and {tuple(one) for one in runs.tolist()} < {tuple(one) for one in every.tolist()}
    assert all(sorted(one[:4]) == [-1, 0, 0, 1] for one in every.tolist())


def test_a_short_network_stands_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its solution is one of the whole network, and its messages bound that."""
    cluster = nodes(4, 4)
    building = Building(problem(llama(8, batch=16), FOUR), grouped(problem(llama(8, batch=16), FOUR), cluster))
    short = Shortened(building.network)
    layers = len(building.network.sizes) - len(short.network.sizes)
    assert layers > 20 * (8 - BLOCKS - 1)
    assert [short.network.sizes[home] for home in short.home] == building.network.sizes
    best = Folded(building.network).solve()[1]
    solver = Narrowed(short.network)
    picks, bound = solver.solve()
    assert bound < best <= building.network.cost(short.expanded(picks)) * (1 + 1e-12)
    cold, warm = Narrowed(building.network).messages, Narrowed(building.network).messages
    warm.spread(solver.messages, short.home)
    monkeypatch.setattr(messages, "SWEEPS", 1)
    monkeypatch.setattr(messages, "MOST_SWEEPS", 1)
    assert max(cold.bound(), 0.99 * best) < warm.bound() <= best * (1 + 1e-12)


@pytest.mark.parametrize("most", [networks.MOST, 0.0])
def test_narrowed_groups_bound_every_plan(most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tables are too wide from the beginning; with and without the effort to look into groups."""
    monkeypatch.setattr(elimination, "LARGEST", 64)
    monkeypatch.setattr(networks, "MOST", most)
    machine, compared, best = nodes(4, 2), 0, 0
    for seed in range(16):
        asked = problem_of(seed, Mesh(tuple((axis, 2) for axis in "abc")))
        if shared(asked):
            continue
        found = Coarse(asked, Transfers(asked.mesh, machine), 1e-9).cheapest()
        first = networks.Networks(asked, grouped(asked, machine), 0.0)
        first.build(frozenset())
        bound = first.solve()[1]
        with monkeypatch.context() as wide:
            wide.setattr(elimination, "LARGEST", 2**24)
            least = whole(asked, machine)
        assert max(bound, found.lower_bound) <= least * (1 + 1e-12) and least <= found.cost * (1 + 1e-9), seed
        compared, best = compared + 1, best + (found.cost <= least * (1 + 1e-9))
    assert compared >= 8 and (not most or best >= 0.8 * compared)


def test_nine_axes_are_certified() -> None:
    with torch.device("meta"):
        batch = torch.zeros(4096, 8192)
        graph = shaped(FFN([8192, 32768, 8192]), nn.MSELoss(), batch, batch.clone())
    asked, cluster = problem(graph, prime_mesh(512)), nodes(64)
    found = choose(asked, cluster, Exactly(asked, cluster))
    assert found.answer.seconds <= found.bound * 1.01
    assert found.runner_up is None or found.answer.seconds <= found.runner_up.seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "batch", "gap"), [(2, 4096, 0.01), (8, 4096, 0.01), (2, 512, 0.015), (8, 512, 0.03)]
)
def test_a_llama_on_512_devices_is_certified(layers: int, batch: int, gap: float) -> None:
    """Within 1 %; where each device has one sequence alone, the bound is less close."""
    assert search(problem(llama(layers, batch=batch), prime_mesh(512)), nodes(64)).gap <= gap
