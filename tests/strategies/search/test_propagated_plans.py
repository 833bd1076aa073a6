"""The result of propagation: the propagated plan, or the one re-optimised by cost, and both costs."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import nn

from models.quickstart import Net
from strategies.core.request import OperatorStrategy, Request
from strategies.cost.cluster import Cluster, Level, Link
from strategies.cost.link_seconds import LinkSeconds
from strategies.cost.plan_cost import PlanCost
from strategies.cost.problem import Problem
from strategies.memory.estimate import plan_bytes
from strategies.planner.planner import make_plan
from strategies.rules.sharding import Assignment
from strategies.search.dynamic_programming import search
from strategies.search.sharding_propagation import DEARER, Propagated, Propagation
from tests.strategies.search.problems import gpt, node, prime_mesh, problem, propagated, shaped

SLOW = Cluster("slow", (Level("rank", 8, Link(1e8, 1e-4)),), {"float32": 1e9}, 2**30, 1e9, 1e-6)
"""Launch overhead exceeds the compute time of a small net."""


def quickstart(*products: str) -> Problem:
    with torch.device("meta"):
        graph = shaped(Net(), nn.MSELoss(), torch.zeros(16, 32), torch.zeros(16, 16))
    made = problem(graph, prime_mesh(4))
    return problem(graph, made.mesh, {name: {"m": ("d0",), "k": ("d1",)} for name in products})


def found(made: Problem, machine: Cluster = SLOW) -> Propagated:
    return propagated(made, machine)


def seconds(made: Problem, one: Propagated, machine: Cluster = SLOW) -> float:
    return PlanCost(made, machine).total(one.assignments)


def test_a_small_net_keeps_the_propagated_plan_and_reports_its_cost() -> None:
    made = quickstart("matmul")
    one = found(made)
    reached = Propagation(made, LinkSeconds(made.mesh, SLOW)).run()
    assert reached.items() <= one.assignments.items() and reached.keys() == one.reached and not one.by_cost
    assert math.isclose(seconds(made, one), one.propagated_cost) and one.cheapest_cost < 0.8 * one.propagated_cost
    assert one.to_json() == {"followed": one.propagated_cost, "cheapest": one.cheapest_cost, "by_price": False}


def test_where_all_products_are_configured_the_plan_is_re_optimised_by_cost() -> None:
    made = quickstart("matmul", "matmul2")
    one = found(made)
    assert one.by_cost and math.isclose(seconds(made, one), one.cheapest_cost)
    assert math.isclose(one.cheapest_cost, search(made, SLOW).cost) and one.cheapest_cost < one.propagated_cost
    for name in ("matmul", "matmul2"):
        assert one.assignments[made.graph.by_name[name].id] == made.fixed[made.graph.by_name[name].id]


def test_on_many_devices_a_plan_of_twice_the_cost_is_not_used() -> None:
    """Computing a slice of so small a net takes less time than sending it."""
    graph, wide = quickstart().graph, prime_mesh(64)
    made = problem(graph, wide, {"matmul": {"m": ("d0",), "k": ("d1",)}})
    machine = replace(SLOW, levels=(Level("rank", 64, Link(1e8, 1e-4)),))
    one = found(made, machine)
    assert one.by_cost and DEARER * one.cheapest_cost < one.propagated_cost
    assert one.assignments[graph.by_name["matmul"].id] == made.fixed[graph.by_name["matmul"].id]


def test_a_model_with_layers_takes_the_cheapest_plan() -> None:
    graph, mesh = gpt(2), prime_mesh(4)
    names = [operator.name for operator in graph.operators if operator.name.endswith("q_proj")]
    rows: Assignment = {"batch0": ("d0", "d1")}
    made, machine = problem(graph, mesh, dict.fromkeys(names, rows)), node(4)
    one = found(made, machine)
    assert one.cheapest_cost <= one.propagated_cost and math.isclose(seconds(made, one, machine), one.cheapest_cost)


def test_on_two_axes_the_cheapest_plan_is_exact_and_has_layouts_of_shared_parameters() -> None:
    graph, machine = gpt(2), node(4)  # the embedding is the head, too
    made = problem(graph, prime_mesh(4), {one.name: {} for one in graph.operators if one.op == "layer_norm"})
    one, exact = found(made, machine), search(made, machine)
    assert one.by_cost and one.solution.tensors and math.isclose(one.cheapest_cost, exact.cost)
    assert math.isclose(PlanCost(made, machine).total(one.assignments, one.solution.tensors), exact.cost)


def test_where_no_plan_keeps_the_memory_the_smallest_that_was_found_is_taken() -> None:
    made = quickstart("matmul", "matmul2").within(1.0)
    one = found(made)
    assert plan_bytes(made, one.assignments) <= plan_bytes(made, one.both[0].assignments)


def test_a_plan_reports_both_costs() -> None:
    graph = quickstart().graph
    request = Request("auto", 4, strategies={"matmul": OperatorStrategy(((2, 2), (2, 1)), None)})
    total = make_plan(graph, request, SLOW).search["propagation"]
    assert total["cheapest"] < total["followed"] and total["by_price"] is False
