"""From classes of layouts to layouts: no price of a class is above that of a member, no plan below the bound, and the
plan that is found costs what its program costs."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from strategies.core.errors import StrategyError
from strategies.core.graph import TensorSpec
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.cost.cluster import Cluster
from strategies.cost.collectives import path_seconds
from strategies.resharding.path import resharding_path
from strategies.search.alike import Alike
from strategies.search.coarse import Coarse, shared
from strategies.search.exact import search
from strategies.search.finding import Finding
from strategies.search.groups import Classes, Groups
from strategies.search.joining import joinings
from strategies.search.options import Menu
from strategies.search.problem import Problem
from strategies.search.transfers import Transfers
from strategies.search.ways import levels_of
from tests.strategies.search.problems import llama, node, nodes, prime_mesh, problem
from tests.strategies.search.test_exact import CLUSTER, executed_seconds, problem_of

MESHES = [
    (Mesh(tuple((axis, 2) for axis in "abcdef")), nodes(8)),
    (Mesh((("a", 2), ("b", 2), ("c", 3), ("d", 2), ("e", 2))), nodes(12, 4)),
    (Mesh(tuple((axis, 2) for axis in "abcd")), node(16)),
    (Mesh((("a", 2), ("b", 3), ("c", 2), ("d", 2))), node(24)),
    (Mesh((("a", 2), ("b", 2), ("c", 2), ("d", 2))), CLUSTER),
]


def drawn(mesh: Mesh, dims: int, partial: bool, rng: random.Random) -> Layout:
    """A random layout whose axes are in the order of the mesh."""
    found: list[list[str]] = [[] for _ in range(dims)]
    open_ = set()
    for axis in mesh.names:
        place = rng.randrange(dims + 1 + partial)
        if place < dims:
            found[place].append(axis)
        elif place > dims:
            open_.add(axis)
    return Layout(tuple(map(tuple, found)), frozenset(open_))


@pytest.mark.parametrize(("mesh", "cluster"), MESHES)
def test_no_class_costs_more_than_its_members(mesh: Mesh, cluster: Cluster) -> None:
    """Neither where its ways are priced nor where all of its members are, for large and small tensors."""
    alike, rng, tight = Alike(Transfers(mesh, cluster), levels_of(mesh, cluster)), random.Random(3), 0
    for turn in range(150):
        dims = 1 + turn % 3
        spec = TensorSpec((12288, *rng.choice([(192, 384), (768, 1536)]))[:dims], "bfloat16")
        before, after = drawn(mesh, dims, turn % 2 == 0, rng), drawn(mesh, dims, False, rng)
        seconds = path_seconds(resharding_path(before, after, spec.shape, mesh), spec.item_bytes, mesh, cluster)
        one, other = alike.rows_of([before]), alike.rows_of([after])
        bound = alike.seconds(one, other, spec)[0, 0]
        alike.settle(one, other, spec, 0, 0)
        way = alike.seconds(one, other, spec)[0, 0]
        if turn % 15 == 0:
            alike.settle_all(one, other, spec, 0, 0)
        least = alike.seconds(one, other, spec)[0, 0]
        assert bound <= way <= least <= seconds * (1 + 1e-9), (before, after, spec)
        tight += bool(way >= 0.9 * seconds)
    assert tight >= 5


def test_a_single_collective_costs_the_class_what_it_costs_its_members() -> None:
    mesh, cluster = MESHES[0]
    alike = Alike(Transfers(mesh, cluster), levels_of(mesh, cluster))
    spec = TensorSpec((64, 4096, 4096), "bfloat16")
    for before, after in [
        (Layout((("a", "b", "c"), (), ()), frozenset("d")), Layout((("a", "b", "c", "d"), (), ()))),
        (Layout((("a", "b", "c"), ("d",), ())), Layout((("a", "b", "c"), (), ("d",)))),
        (Layout((("a", "b", "c", "d"), (), ())), Layout((("a", "b", "c"), (), ()))),
    ]:
        one, other = alike.rows_of([before]), alike.rows_of([after])
        alike.seconds(one, other, spec)
        alike.settle(one, other, spec, 0, 0)
        seconds = path_seconds(resharding_path(before, after, spec.shape, mesh), spec.item_bytes, mesh, cluster)
        assert alike.seconds(one, other, spec)[0, 0] == pytest.approx(seconds, rel=1e-6)


def test_groups_of_classes_are_below_all_their_members() -> None:
    mesh, cluster = MESHES[0]
    asked = problem(llama(2), mesh)
    transfers = Transfers(mesh, cluster)
    groups = Groups(Classes(asked, transfers, Alike(transfers, levels_of(mesh, cluster))))
    operator = next(one for one in asked.graph.operators if one.op == "linear")
    before = groups.of(operator)
    assert len(before) == 35 and len(groups.every[operator.id]) > 1000
    others = {one.id: 0 for one in asked.graph.operators}
    assert groups.look(others | {operator.id: int(np.argmin(before.own))})
    after = groups.of(operator)
    assert len(after) > len(before) and min(after.own) == min(before.own)
    assert after.own.mean() > before.own.mean()


def whole(asked: Problem, cluster: Cluster) -> float:
    """The least cost with every layout as an option."""
    menu = Menu(asked, Transfers(asked.mesh, cluster))
    return Finding(asked, menu, 1e-12).cheapest(0.0).cost


def compare(seeds: range) -> tuple[int, int]:
    """How many small graphs were searched from coarse to fine, and how many of these plans are the best ones."""
    compared = best = 0
    mesh = Mesh(tuple((axis, 2) for axis in "abc"))
    for seed in seeds:
        asked = problem_of(seed, mesh)
        if shared(asked):
            continue
        found = Coarse(asked, Transfers(mesh, CLUSTER), 1e-9).cheapest()
        least = whole(asked, CLUSTER)
        assert found.lower_bound <= least * (1 + 1e-12), seed
        assert least <= found.cost * (1 + 1e-9), seed
        assert found.cost == pytest.approx(executed_seconds(asked, found, 0.0), rel=1e-9), seed
        compared, best = compared + 1, best + (found.cost <= least * (1 + 1e-9))
    return compared, best


def test_small_graphs_from_coarse_to_fine() -> None:
    compared, best = compare(range(24))
    assert compared >= 12 and best >= 0.8 * compared


@pytest.mark.slow
def test_many_small_graphs_from_coarse_to_fine() -> None:
    compared, best = compare(range(100, 400))
    assert compared >= 150 and best >= 0.8 * compared


def test_many_axes_are_certified_and_no_joined_mesh_is_better() -> None:
    mesh, cluster = prime_mesh(16), node(16)
    asked = problem(llama(2), mesh)
    found = search(asked, cluster)
    assert found.gap <= 0.01
    joined = [search(one.problem, cluster) for one in joinings(asked, cluster) if len(one.runs) < 3]
    assert len(joined) >= 3 and all(found.cost <= one.cost * 1.01 for one in joined)


@pytest.mark.slow
def test_six_axes_are_certified() -> None:
    mesh, cluster = MESHES[0]
    assert search(problem(llama(2, batch=64), mesh), cluster).gap <= 0.01


def test_a_limit_of_memory_on_many_axes_is_kept_and_bounded() -> None:
    mesh, cluster = prime_mesh(16), node(16)
    asked = problem(llama(2), mesh)
    free = search(asked, cluster)
    found = search(replace(asked, memory=0.8 * free.bytes), cluster)
    assert found.bytes <= 0.8 * free.bytes and free.cost <= found.cost
    assert found.lower_bound <= found.cost and found.gap < 0.05
    with pytest.raises(StrategyError, match="memory_limit"):
        search(replace(asked, memory=1.0), cluster)
