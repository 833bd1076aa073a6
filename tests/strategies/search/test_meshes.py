"""The mesh where nobody named one: aligned factorisations, a bound that holds, and the best beside its runner-up."""

from __future__ import annotations

import math

import torch
from torch import nn

from models.ffn import FFN
from strategies.mesh import Mesh
from strategies.planner import make_plan
from strategies.request import Request
from strategies.search import meshes
from strategies.search.classes import classes
from strategies.search.direct import direct_seconds
from strategies.search.meshes import choose, factorisations, least, told_apart
from strategies.search.prices import Pricing
from strategies.search.recursive import in_rounds
from tests.strategies.search.problems import gpt, llama, node, nodes, prime_mesh, problem, shaped


def sizes(mesh: Mesh, factors: meshes.Factors) -> tuple[int, ...]:
    return tuple(mesh.product(run) for run in factors)


def test_factorisations_end_where_nodes_end() -> None:
    mesh = prime_mesh(16)
    found = [sizes(mesh, factors) for factors in factorisations(mesh, nodes(2))]
    assert found == [(2, 2, 2, 2), (2, 8), (2, 2, 4), (2, 4, 2)]
    one = [sizes(prime_mesh(8), factors) for factors in factorisations(prime_mesh(8), node(8))]
    assert one == [(2, 2, 2), (8,), (2, 4), (4, 2)]


def test_of_very_many_ranks_only_the_levels_are_tried_beside_the_finest() -> None:
    mesh = prime_mesh(16384)
    assert [sizes(mesh, factors) for factors in factorisations(mesh, nodes(2048))] == [(2,) * 14, (2048, 8)]


def test_the_bound_holds() -> None:
    for graph in (gpt(2), llama(2)):
        made = problem(graph, prime_mesh(16))
        pricing, alike = Pricing(made, nodes(2), direct_seconds), classes(made)
        for factors in factorisations(made.mesh, nodes(2)):
            assert 0 < least(pricing, alike, factors) <= in_rounds(pricing, alike, factors).seconds


def test_the_best_and_its_runner_up() -> None:
    made, machine = problem(gpt(2), prime_mesh(16)), nodes(2)
    found = choose(made, machine)
    assert found.runner_up is not None and found.runner_up.mesh != found.best.mesh
    assert found.best.seconds <= found.runner_up.seconds
    assert found.searched + found.left_out == len(list(factorisations(made.mesh, machine)))
    pricing, alike = Pricing(made, machine, direct_seconds), classes(made)
    every = [in_rounds(pricing, alike, factors).seconds for factors in factorisations(made.mesh, machine)]
    assert math.isclose(found.best.seconds, min(every))
    assert found.best.mesh == told_apart(made.mesh, found.assignments)


def test_what_cannot_be_among_the_best_two_is_left_out() -> None:
    """All dims are odd multiples of 4: an axis of 8 slices nothing, and a quarter of the work takes too long."""
    with torch.device("meta"):
        batch = torch.zeros(4 * 1001, 4 * 1001)
        graph = shaped(FFN([4 * 1001, 4 * 3001, 4 * 3001, 4 * 1001]), nn.MSELoss(), batch, batch.clone())
    made, machine = problem(graph, prime_mesh(32)), nodes(4)
    found = choose(made, machine)
    assert found.left_out and found.runner_up is not None
    pricing, alike = Pricing(made, machine, direct_seconds), classes(made)
    totals = sorted(in_rounds(pricing, alike, factors).seconds for factors in factorisations(made.mesh, machine))
    assert [found.best.seconds, found.runner_up.seconds] == totals[:2]  # as if nothing had been left out


def test_axes_that_nothing_tells_apart_are_one() -> None:
    mesh = Mesh((("a", 2), ("b", 2), ("c", 3)))
    assert told_apart(mesh, {"x": {"m": ("a", "b")}, "y": {"n": ("a", "b"), "k": ("c",)}}) == (4, 3)
    assert told_apart(mesh, {"x": {"m": ("a", "b")}, "y": {"n": ("a",)}}) == (2, 2, 3)
    assert told_apart(mesh, {"x": {"m": ("b", "a")}}) == (2, 2, 3)
    assert told_apart(mesh, {"x": {}}) == (12,)


def test_plans_tell_the_mesh_only_where_nobody_named_one() -> None:
    graph, machine = gpt(2), nodes(2)
    told = make_plan(graph, Request("auto", 16, "recursive_programming"), machine).search
    assert math.prod(told["mesh"]["mesh"]) == 16 and told["runner_up"]["seconds"] >= told["mesh"]["seconds"]
    named = make_plan(graph, Request("auto", 16, "recursive_programming", mesh=(("dp", 2), ("tp", 8))), machine)
    assert "mesh" not in named.search and [name for name, _ in named.mesh.axes] == ["dp", "tp"]
