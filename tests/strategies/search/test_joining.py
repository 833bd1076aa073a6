"""On meshes of many axes: a plan of joined axes costs what it says, and nothing is below the bound."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.rules.sharding import Assignment
from strategies.search import exact
from strategies.search.finding import Finding
from strategies.search.joining import joinings, least
from strategies.search.options import Menu
from strategies.search.problem import Problem
from strategies.search.transfers import Transfers
from tests.strategies.search.problems import line, nodes, problem
from tests.strategies.search.test_exact import CLUSTER, executed_seconds, problem_of

MESH = Mesh((("a", 2), ("b", 2), ("c", 2), ("d", 2)))


def test_a_plan_of_joined_axes_costs_what_its_program_costs_and_no_plan_is_below_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exact, "MOST_AXES", 2)
    mesh, joined = Mesh(MESH.axes[:3]), 0
    for seed in range(16):
        small = problem_of(seed, mesh)
        found = exact.search(small, CLUSTER, 1e-12)
        every = Finding(small, Menu(small, Transfers(mesh, CLUSTER)), 1e-12).cheapest(0.0)
        assert found.cost == pytest.approx(executed_seconds(small, found, 0.0), rel=1e-9), seed
        assert found.lower_bound <= every.cost * (1 + 1e-12), seed
        assert every.cost <= found.cost * (1 + 1e-9), seed
        joined += any(True for _ in joinings(small, CLUSTER))
    assert joined >= 5


def test_the_bound_is_what_one_device_as_fast_as_all_takes() -> None:
    """A configured operator takes its own time instead."""
    asked = problem(line(6), MESH)
    bound = least(asked, nodes(2))
    assert bound == pytest.approx(least(replace(asked, mesh=Mesh((("a", 16),))), nodes(2)))
    whole: dict[str, Assignment] = {operator.id: {} for operator in asked.graph.operators}
    assert least(replace(asked, fixed=whole), nodes(2)) > 10 * bound


def test_every_joined_mesh_ends_where_nodes_end() -> None:
    graph = line(6)
    found = [joined.runs for joined in joinings(problem(graph, MESH), nodes(2))]
    assert (("a",), ("b", "c", "d")) in found
    assert all(runs[0] == ("a",) and len(runs) <= 3 for runs in found)


def test_configured_layouts_keep_axes_apart() -> None:
    asked = problem(line(6), MESH)

    def meshes(one: Problem) -> list[tuple[tuple[str, ...], ...]]:
        return [joined.runs for joined in joinings(one, nodes(2))]

    apart = replace(asked, inputs={"0": Layout((("a", "b"), ()))})
    assert meshes(apart) == [(("a",), ("b",), ("c", "d"))]
    last = replace(asked, fixed={asked.graph.operators[0].id: {asked.shardings["linear0"].factors[0]: ("d",)}})
    assert meshes(last) == [(("a",), ("b", "c"), ("d",))]
    between = replace(asked, inputs={"0": Layout((("c",), ()))})
    assert meshes(between) == []
