"""Factorisations that end where levels end, a bound that holds, and what a mesh tells apart."""

from __future__ import annotations

from strategies.core.mesh import Mesh
from strategies.search import meshes
from strategies.search.classes import classes
from strategies.search.direct import direct_seconds
from strategies.search.meshes import factorisations, least, refines, told_apart
from strategies.search.prices import Pricing
from strategies.search.recursive import in_rounds
from tests.strategies.search.problems import gpt, llama, node, nodes, prime_mesh, problem


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


def test_axes_that_nothing_tells_apart_are_one() -> None:
    mesh = Mesh((("a", 2), ("idle", 1), ("b", 2), ("c", 3)))
    assert told_apart(mesh, {"x": {"m": ("a", "b")}, "y": {"n": ("a", "b"), "k": ("c",)}}) == (("a", "b"), ("c",))
    assert told_apart(mesh, {"x": {"m": ("a", "b")}, "y": {"n": ("a",)}}) == (("a",), ("b",), ("c",))
    assert told_apart(mesh, {"x": {"m": ("b", "a")}}) == (("a",), ("b",), ("c",))
    assert told_apart(mesh, {"x": {}}) == (("a", "b", "c"),)


def test_a_finer_mesh_has_every_end_of_a_coarser_one() -> None:
    fine, middle, other = (("a",), ("b",), ("c",)), (("a", "b"), ("c",)), (("a",), ("b", "c"))
    assert refines(fine, middle) and refines(middle, middle) and refines(middle, (("a", "b", "c"),))
    assert not refines(middle, fine) and not refines(middle, other) and not refines(other, middle)
