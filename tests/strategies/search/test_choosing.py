"""The mesh where nobody named one: the best beside its runner-up, in one way for both searches that price."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from models.ffn import FFN
from models.quickstart import Net
from strategies.core.mesh import Mesh
from strategies.core.request import OperatorStrategy, Request
from strategies.cost.cluster import Cluster, Level, Link
from strategies.planner.planner import make_plan
from strategies.search import choosing
from strategies.search.choosing import Answer, Exactly, Halving, choose
from strategies.search.classes import classes
from strategies.search.direct import direct_seconds
from strategies.search.exact import search
from strategies.search.meshes import Factors, factorisations, refines, told_apart
from strategies.search.prices import Pricing
from strategies.search.problem import Problem
from strategies.search.recursive import in_rounds
from tests.strategies.search.problems import gpt, nodes, prime_mesh, problem, shaped


def sizes(mesh: Mesh, factors: Factors) -> tuple[int, ...]:
    return tuple(mesh.product(run) for run in factors)


def test_the_best_and_its_runner_up() -> None:
    made, machine = problem(gpt(2), prime_mesh(16)), nodes(2)
    found = choose(made, machine, Halving(made, machine))
    assert found.runner_up is not None and found.runner_up.mesh != found.best.mesh
    assert found.best.seconds <= found.runner_up.seconds
    assert found.known + found.left_out == len(list(factorisations(made.mesh, machine)))
    pricing, alike = Pricing(made, machine, direct_seconds), classes(made)
    every = [in_rounds(pricing, alike, factors).seconds for factors in factorisations(made.mesh, machine)]
    assert math.isclose(found.best.seconds, min(every))
    assert found.best.mesh == sizes(made.mesh, told_apart(made.mesh, found.answer.assignments))


def test_what_cannot_be_among_the_best_two_is_left_out() -> None:
    """All dims are odd multiples of 4: an axis of 8 slices nothing, and a quarter of the work takes too long."""
    with torch.device("meta"):
        batch = torch.zeros(4 * 1001, 4 * 1001)
        graph = shaped(FFN([4 * 1001, 4 * 3001, 4 * 3001, 4 * 1001]), nn.MSELoss(), batch, batch.clone())
    made, machine = problem(graph, prime_mesh(32)), nodes(4)
    found = choose(made, machine, Halving(made, machine))
    assert found.left_out and found.runner_up is not None
    pricing, alike = Pricing(made, machine, direct_seconds), classes(made)
    totals = sorted(in_rounds(pricing, alike, factors).seconds for factors in factorisations(made.mesh, machine))
    assert [found.best.seconds, found.runner_up.seconds] == totals[:2]  # as if nothing had been left out


def slow() -> tuple[Problem, Cluster]:
    """A small net on two nodes of four slow devices, where a call costs more than any work."""
    with torch.device("meta"):
        graph = shaped(Net(), nn.MSELoss(), torch.zeros(16, 32), torch.zeros(16, 16))
    levels = (Level("node", 2, Link(1e8, 1e-4)), Level("rank", 4, Link(1e9, 1e-5)))
    return problem(graph, prime_mesh(8)), Cluster("slow", levels, {"float32": 1e9}, 2**30, 1e9, 1e-6)


@pytest.mark.parametrize("algorithm", ["dynamic_programming", "recursive_programming"])
def test_both_searches_choose_in_the_same_way(algorithm: str) -> None:
    """On an open mesh both tell the best mesh, its runner-up and how many there were; on a named one neither does."""
    made, machine = slow()
    told = make_plan(made.graph, Request("auto", 8, algorithm), machine).search
    assert math.prod(told["mesh"]["mesh"]) == 8
    assert told["meshes"] + told["left_out"] == len(list(factorisations(made.mesh, machine)))
    assert told["runner_up"]["seconds"] >= told["mesh"]["seconds"]
    assert told["runner_up"]["mesh"] != told["mesh"]["mesh"]
    named = make_plan(made.graph, Request("auto", 8, algorithm, mesh=(("dp", 2), ("tp", 4))), machine)
    assert "mesh" not in named.search and named.mesh.axes == (("dp", 2), ("tp", 4))


def test_without_a_runner_up_an_exact_search_ends_with_the_best() -> None:
    made, machine = slow()
    whole, alone = (
        make_plan(made.graph, Request("auto", 8, "dynamic_programming", runner_up=asked), machine)
        for asked in (True, False)
    )
    assert math.isclose(whole.search["cost"], alone.search["cost"], rel_tol=0.01) and "mesh" not in alone.search


def test_a_configured_strategy_may_cut_a_named_axis() -> None:
    made, machine = slow()
    halves = {"matmul": OperatorStrategy(((2, 1), (1, 1)), None)}
    request = Request("auto", 8, "dynamic_programming", mesh=(("all", 8),), strategies=halves)
    plan = make_plan(made.graph, request, machine)
    assert plan.mesh.names[0] == "all.0" and plan.mesh.size == 8


def test_the_exact_best_is_that_of_the_finest_mesh_and_its_runner_up_that_of_all_others() -> None:
    made, machine = slow()
    counting, exactly = Counting(made, machine), Exactly(made, machine)
    found = choose(made, machine, counting)
    every = {factors: exactly.on(factors) for factors in factorisations(made.mesh, machine)}
    free = search(made, machine)
    assert found.answer.seconds <= free.cost <= found.bound * 1.01
    best = told_apart(made.mesh, found.answer.assignments)
    others = [answer.seconds for factors, answer in every.items() if not refines(factors, best)]
    assert others and found.runner_up is not None and math.isclose(found.runner_up.seconds, min(others))
    assert found.known + found.left_out == len(every)
    assert all(refines(factors, best) for factors in every if factors not in counting.asked)


class Counting(Exactly):
    """Remembers what it was asked for."""

    def __init__(self, problem: Problem, cluster: Cluster) -> None:
        super().__init__(problem, cluster)
        self.asked: list[Factors] = []

    def on(self, factors: Factors) -> Answer:
        self.asked.append(factors)
        return super().on(factors)


def test_a_mesh_that_contains_the_best_one_is_not_searched() -> None:
    """Wide layers on fast links are best with the batch alone sliced: one axis, which every mesh contains."""
    with torch.device("meta"):
        batch = torch.zeros(2**16, 64)
        graph = shaped(FFN([64, 128, 64]), nn.MSELoss(), batch, batch.clone())
    made, machine = problem(graph, prime_mesh(16)), nodes(2)
    counting = Counting(made, machine)
    found = choose(made, machine, counting)
    assert found.best.mesh == (16,) and found.runner_up is None
    assert len(counting.asked) == 1 and found.known == len(list(factorisations(made.mesh, machine)))


class Given:
    """Answers that are written down: seconds and bound by the sizes of the axes."""

    def __init__(self, made: Problem, answers: dict[tuple[int, ...], tuple[float, float]], kept: float = 0.0) -> None:
        self.made, self.answers, self.kept = made, answers, kept
        self.asked: list[tuple[int, ...]] = []

    def factorisations(self) -> list[Factors]:
        return list(factorisations(self.made.mesh, nodes(1)))

    def on(self, factors: Factors) -> Answer:
        asked = sizes(self.made.mesh, factors)
        self.asked.append(asked)
        seconds, bound = self.answers[asked]
        loops = dict(zip("mnk", factors, strict=False))  # the plan tells all axes of the factorisation apart
        return Answer({"x": loops}, seconds, self.kept, bound)

    def finished(self, factors: Factors) -> Answer:
        return Answer({}, self.answers[sizes(self.made.mesh, factors)][0], self.kept)

    def least(self) -> float:
        return 0.0


def test_bounds_of_a_search_leave_out_what_it_refines() -> None:
    made, machine = problem(gpt(1), prime_mesh(8)), nodes(1)
    given = Given(made, {(2, 2, 2): (10.0, 9.0), (2, 4): (11.0, 10.8), (4, 2): (10.5, 9.0), (8,): (10.7, 10.6)})
    found = choose(made, machine, given)
    assert given.asked == [(2, 2, 2), (8,), (2, 4), (4, 2)] and found.left_out == 0
    assert (found.best.mesh, found.runner_up and found.runner_up.mesh) == ((2, 2, 2), (4, 2)) and found.bound == 9.0
    certain = Given(made, {(2, 2, 2): (10.0, 9.99), (8,): (10.7, 10.6), (2, 4): (10.7, 10.6), (4, 2): (10.5, 9.0)})
    found = choose(made, machine, certain)
    assert certain.asked == [(2, 2, 2), (8,), (2, 4), (4, 2)] and found.runner_up and found.runner_up.seconds == 10.5
    bounded = Given(made, {(2, 2, 2): (10.0, 9.0), (8,): (10.0, 10.0), (2, 4): (9.5, 9.5), (4, 2): (9.2, 9.2)})
    found = choose(made, machine, bounded)
    assert (found.best.mesh, found.runner_up and found.runner_up.mesh, found.bound) == ((4, 2), (2, 4), 9.0)


def test_of_very_many_ranks_the_exact_search_takes_coarser_meshes_and_what_rounds_find_on_the_finest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choosing, "MOST_PRIMES", 9)
    with torch.device("meta"):
        batch = torch.zeros(2**16, 4096)
        graph = shaped(FFN([4096, 16384, 4096]), nn.MSELoss(), batch, batch.clone())
    made, machine = problem(graph, prime_mesh(1024)), nodes(128)
    exactly = Exactly(made, machine)
    found = choose(made, machine, exactly)
    assert 0 < found.bound <= found.best.seconds and found.runner_up is not None
    assert found.known + found.left_out == len(exactly.factorisations()) == 10
    assert found.answer.seconds == min(answer.seconds for answer in exactly.found.values())
    rounds = exactly.found[exactly.factorisations()[0]]
    assert math.isclose(rounds.seconds, Pricing(made, machine).total(rounds.assignments))
