"""The choice of an open mesh: factorisations within levels, the best and its runner-up, valid bounds."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from models.ffn import FFN
from models.quickstart import Net
from strategies.core.errors import StrategyError
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.request import OperatorStrategy, Request
from strategies.cost.cluster import Cluster, Level, Link
from strategies.cost.plan_cost import PlanCost
from strategies.cost.problem import Problem
from strategies.planner.planner import make_plan
from strategies.rules.sharding import Assignment
from strategies.search.algorithms import dynamic_programming
from strategies.search.dynamic_programming import exact_search, search
from strategies.search.mesh_choice import (
    Factorisation,
    choose,
    coarsened,
    factorisations,
    finest,
    least_work,
    mesh_of,
    refines,
)
from strategies.search.recursive_programming import partitioned, recursive_choice, recursive_search
from strategies.search.solution import Solution
from tests.strategies.search.problems import gpt, line, llama, node, nodes, prime_mesh, problem, shaped
from tests.strategies.search.test_dynamic_programming import CLUSTER, executed_seconds, problem_of

FOUR = Mesh((("a", 2), ("b", 2), ("c", 2), ("d", 2)))


def sizes(mesh: Mesh, runs: Factorisation) -> tuple[int, ...]:
    return tuple(mesh.product(run) for run in runs)


def test_factorisations_have_at_most_three_axes_and_end_where_levels_end() -> None:
    def every(ranks: int, machine: Cluster) -> list[tuple[int, ...]]:
        mesh = prime_mesh(ranks)
        return [sizes(mesh, runs) for runs in factorisations(mesh, machine)]

    assert every(16, nodes(2)) == [(2, 4, 2), (2, 2, 4), (2, 8)]
    assert every(8, node(8)) == [(2, 2, 2), (4, 2), (2, 4), (8,)]
    assert every(512, nodes(64)) == [
        (64, 4, 2), (64, 2, 4), (32, 2, 8), (16, 4, 8), (8, 8, 8), (4, 16, 8), (2, 32, 8), (64, 8),
    ]  # fmt: skip
    deep = Cluster("deep", tuple(Level(str(i), 4, Link(1e9, 0.0)) for i in range(4)), {"float32": 1e9}, 1, 1e9, 0.0)
    assert every(256, deep) == [(16, 4, 4), (4, 16, 4), (4, 4, 16)]
    assert every(1, node(1)) == [()]


def test_the_bound_holds() -> None:
    for graph in (gpt(2), llama(2)):
        made = problem(graph, prime_mesh(16))
        for runs in factorisations(made.mesh, nodes(2)):
            assert 0 < least_work(made, nodes(2), runs) <= partitioned(made, nodes(2), runs).cost


def test_axes_that_always_slice_together_are_one() -> None:
    mesh = Mesh((("a", 2), ("idle", 1), ("b", 2), ("c", 3)))
    assert mesh_of(mesh, {"x": {"m": ("a", "b")}, "y": {"n": ("a", "b"), "k": ("c",)}}) == (("a", "b"), ("c",))
    assert mesh_of(mesh, {"x": {"m": ("a", "b")}, "y": {"n": ("a",)}}) == (("a",), ("b",), ("c",))
    assert mesh_of(mesh, {"x": {"m": ("b", "a")}}) == (("a",), ("b",), ("c",))
    assert mesh_of(mesh, {"x": {}}) == (("a", "b", "c"),)


def test_a_finer_mesh_has_every_end_of_a_coarser_one() -> None:
    fine, middle, other = (("a",), ("b",), ("c",)), (("a", "b"), ("c",)), (("a",), ("b", "c"))
    assert refines(fine, middle) and refines(middle, middle) and refines(middle, (("a", "b", "c"),))
    assert not refines(middle, fine) and not refines(middle, other) and not refines(other, middle)


def test_configured_layouts_keep_axes_separate() -> None:
    made = problem(line(6), FOUR)

    def meshes(one: Problem) -> list[Factorisation]:
        return [runs for runs in factorisations(FOUR, nodes(2)) if coarsened(one, runs) is not None]

    apart = replace(made, inputs={"0": Layout((("a", "b"), ()))})
    assert meshes(apart) == [(("a",), ("b",), ("c", "d"))]
    last = replace(made, fixed={made.graph.operators[0].id: {made.shardings["linear0"].factors[0]: ("d",)}})
    assert meshes(last) == [(("a",), ("b", "c"), ("d",))]
    between = replace(made, inputs={"0": Layout((("c",), ()))})
    assert meshes(between) == [] and exact_search(between, nodes(2), None) is None


def test_a_plan_of_a_coarser_mesh_has_the_cost_of_its_program() -> None:
    mesh, compared = Mesh(FOUR.axes[:3]), 0
    for seed in range(16):
        made = problem_of(seed, mesh)
        best = search(made, CLUSTER, 1e-12)
        for runs in ((("a", "b"), ("c",)), (("a",), ("b", "c"))):
            coarse = coarsened(made, runs)
            if coarse is not None:
                found = coarse.refined(search(coarse.problem, CLUSTER, 1e-12))
                assert best.cost <= found.cost * (1 + 1e-9), seed
                assert executed_seconds(made, found, 0.0) <= found.cost * (1 + 1e-9), seed
                compared += 1
    assert compared > 10


def slow() -> tuple[Problem, Cluster]:
    """A small net on two nodes of four slow devices, where launch overhead dominates."""
    with torch.device("meta"):
        graph = shaped(Net(), nn.MSELoss(), torch.zeros(16, 32), torch.zeros(16, 16))
    levels = (Level("node", 2, Link(1e8, 1e-4)), Level("rank", 4, Link(1e9, 1e-5)))
    return problem(graph, prime_mesh(8)), Cluster("slow", levels, {"float32": 1e9}, 2**30, 1e9, 1e-6)


@pytest.mark.parametrize("algorithm", ["dynamic_programming", "recursive_programming"])
def test_an_open_mesh_has_a_runner_up_and_a_named_one_has_none(algorithm: str) -> None:
    made, machine = slow()
    found = make_plan(made.graph, Request("auto", 8, algorithm), machine).search
    assert math.prod(found["mesh"]["mesh"]) == 8
    assert found["meshes"] + found["left_out"] == len(factorisations(made.mesh, machine))
    assert found["runner_up"]["seconds"] >= found["mesh"]["seconds"]
    assert found["runner_up"]["mesh"] != found["mesh"]["mesh"]
    named = make_plan(made.graph, Request("auto", 8, algorithm, mesh=(("dp", 2), ("tp", 4))), machine)
    assert "mesh" not in named.search and named.mesh.axes == (("dp", 2), ("tp", 4))


def test_a_named_mesh_of_more_axes_has_a_plan_without_a_certificate() -> None:
    made, machine = problem(gpt(1), prime_mesh(16)), nodes(2)
    axes = tuple((f"a{place}", 2) for place in range(4))
    found = make_plan(made.graph, Request("auto", 16, "dynamic_programming", mesh=axes), machine)
    assert found.search["lower_bound"] is None and found.search["gap"] is None
    assert found.search["cost"] == pytest.approx(
        PlanCost(made, machine).total(recursive_search(made, machine).assignments)
    )
    assert exact_search(made, machine, ()) is None


@pytest.mark.slow
def test_on_an_open_mesh_all_prime_axes_are_tried() -> None:
    """Of 16 devices and more there are more prime axes than three; the reported cost is that of the plan."""
    made, machine = problem(gpt(1), prime_mesh(32)), nodes(4)
    exact = exact_search(made, machine, None)
    assert exact is not None
    best, found = exact.within(None), dynamic_programming(made, machine, None)(None)
    assert found.solution.cost <= best.best.cost and found.search["lower_bound"] <= found.solution.cost
    total = PlanCost(made, machine).total(found.solution.assignments, found.solution.tensors)
    assert total <= found.solution.cost * (1 + 1e-9)


def test_on_many_prime_axes_single_ones_are_decided_again() -> None:
    """Three axes cannot cut 16,384 rows and columns as seven can; the reported cost is that of the plan."""
    made, machine = problem(line(6, batch=2**14), prime_mesh(128)), nodes(16)
    exact = exact_search(made, machine, None)
    assert exact is not None
    best, found = exact.within(None).best, dynamic_programming(made, machine, None)(None)
    assert found.solution.cost < 0.99 * best.cost
    assert math.isclose(PlanCost(made, machine).total(found.solution.assignments), found.solution.cost, rel_tol=1e-9)


@pytest.mark.slow
def test_a_configured_strategy_may_cut_a_named_axis() -> None:
    made, machine = slow()
    halves = {"matmul": OperatorStrategy(((2, 1), (1, 1)), None)}
    request = Request("auto", 8, "dynamic_programming", mesh=(("all", 8),), strategies=halves)
    plan = make_plan(made.graph, request, machine)
    assert plan.mesh.names[0] == "all.0" and plan.mesh.size == 8


@pytest.mark.slow
def test_the_exact_choice_is_the_best_of_every_factorisation() -> None:
    for made, machine in (slow(), (problem(gpt(1), prime_mesh(32)), nodes(4))):
        exact = exact_search(made, machine, None)
        assert exact is not None
        chosen = exact.within(None)
        every = {}
        for runs in factorisations(made.mesh, machine):
            coarse = coarsened(made, runs)
            assert coarse is not None
            every[runs] = search(coarse.problem, machine).cost
        assert chosen.best.cost == pytest.approx(min(every.values()), rel=0.01)
        assert chosen.lower_bound <= min(every.values()) and chosen.best.cost <= chosen.lower_bound * 1.01
        best = mesh_of(made.mesh, chosen.best.assignments)
        others = [cost for runs, cost in every.items() if not refines(runs, best)]
        if others:
            assert chosen.second is not None and chosen.second.cost <= min(others) * (1 + 1e-9)
        assert chosen.searched + chosen.pruned == len(every)


def test_the_recursive_choice_is_the_best_of_every_factorisation() -> None:
    made, machine = problem(gpt(2), prime_mesh(16)), nodes(2)
    chosen = recursive_choice(made, machine)
    every = [finest(made.mesh), *factorisations(made.mesh, machine)]
    assert chosen.best.cost == pytest.approx(min(partitioned(made, machine, runs).cost for runs in every))
    assert chosen.second is not None and chosen.best.cost <= chosen.second.cost
    assert mesh_of(made.mesh, chosen.second.assignments) != mesh_of(made.mesh, chosen.best.assignments)


def test_meshes_that_cannot_be_among_the_best_two_are_pruned() -> None:
    """All dims are odd multiples of 4: an axis of 8 shards nothing, and a quarter of the work is too slow."""
    with torch.device("meta"):
        batch = torch.zeros(4 * 1001, 4 * 1001)
        graph = shaped(FFN([4 * 1001, 4 * 3001, 4 * 3001, 4 * 1001]), nn.MSELoss(), batch, batch.clone())
    made, machine = problem(graph, prime_mesh(32)), nodes(4)
    chosen = recursive_choice(made, machine)
    assert chosen.pruned and chosen.second is not None
    every = [finest(made.mesh), *factorisations(made.mesh, machine)]
    costs = sorted(partitioned(made, machine, runs).cost for runs in every)
    assert [chosen.best.cost, chosen.second.cost] == pytest.approx(costs[:2])  # as if nothing had been pruned


class Given:
    """A search with given solutions: cost and bound by the sizes of the axes."""

    def __init__(self, answers: dict[tuple[int, ...], tuple[float, float]], size: float = 0.0) -> None:
        self.answers, self.size = answers, size
        self.searched: list[tuple[int, ...]] = []
        self.enough: list[float] = []

    def __call__(self, runs: Factorisation, enough: float) -> Solution | float:
        axes = sizes(prime_mesh(8), runs)
        self.searched.append(axes)
        self.enough.append(enough)
        cost, bound = self.answers[axes]
        loops: Assignment = dict(zip("mnk", runs, strict=False))  # the plan needs all axes of the factorisation
        return bound if bound >= enough else Solution({"x": loops}, cost, self.size, bound)


def test_bounds_of_a_search_prune_its_refinements() -> None:
    made = problem(gpt(1), prime_mesh(8))
    bounds = dict.fromkeys(factorisations(made.mesh, node(8)), 0.0)
    given = Given({(2, 2, 2): (10.0, 9.0), (4, 2): (10.7, 10.4), (2, 4): (11.0, 10.8), (8,): (10.5, 10.4)})
    chosen = choose(made, bounds, given)
    assert given.searched == [(2, 2, 2), (4, 2), (2, 4), (8,)] and given.enough == [math.inf, math.inf, 10.7, 10.7]
    assert (chosen.best.cost, chosen.second and chosen.second.cost, chosen.lower_bound) == (10.0, 10.5, 9.0)
    assert (chosen.searched, chosen.pruned) == (3, 1)
    bounded = Given({(2, 2, 2): (10.0, 9.1), (8,): (9.8, 9.8), (2, 4): (9.5, 9.5), (4, 2): (9.2, 9.2)})
    chosen = choose(made, bounds, bounded)
    assert (chosen.best.cost, chosen.second and chosen.second.cost) == (9.2, 9.5) and chosen.lower_bound == 9.1


def test_where_no_mesh_keeps_the_limit_the_smallest_need_is_reported() -> None:
    made = problem(gpt(1), prime_mesh(8)).within(100.0)
    bounds = dict.fromkeys(factorisations(made.mesh, node(8)), 0.0)
    with pytest.raises(StrategyError, match="the smallest"):
        choose(made, bounds, Given(dict.fromkeys([(2, 2, 2), (2, 4), (4, 2), (8,)], (1.0, 1.0)), size=101.0))
