"""One search for many memory limits: its caches change nothing but the time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from strategies.core.errors import StrategyError
from strategies.cost.plan_cost import PlanCost
from strategies.cost.problem import Problem
from strategies.memory.estimate import plan_bytes
from strategies.search.dynamic_programming import MemoryBudget, PlanSearch, search
from tests.strategies.search.test_factor_graph import NODES, llama, problem_of


@cache
def made(*sizes: int) -> Problem:
    return problem_of(llama(6), *sizes)


def budget_of(problem: Problem, tolerance: float | None = 1e-12) -> MemoryBudget:
    return MemoryBudget(PlanSearch(problem, NODES, tolerance))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("sizes", "shares"),
    [
        ((8,), (0.8, 0.95, 0.9)),
        ((2, 4), (0.95, 0.9, 0.8)),
        pytest.param((2, 2, 2), (0.8, 0.95, 0.9), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_successive_limits_find_the_plans_of_separate_searches(monkeypatch, sizes, shares):
    problem, solved = made(*sizes), []
    cheapest = PlanSearch.cheapest

    def counted(self, *given, **named):
        solved.append(1)
        return cheapest(self, *given, **named)

    monkeypatch.setattr(PlanSearch, "cheapest", counted)
    free = search(problem, NODES).bytes
    solved.clear()
    alone = {share: search(replace(problem, memory=share * free), NODES) for share in shares}
    apart = len(solved)
    solved.clear()
    again, cost = budget_of(problem, None), PlanCost(problem, NODES)
    for share in shares:
        found, other = again.within(share * free), alone[share]
        assert found.bytes == pytest.approx(plan_bytes(problem, found.assignments)) and found.bytes <= share * free
        assert found.cost == pytest.approx(cost.total(found.assignments, found.tensors))
        assert max(found.lower_bound, other.lower_bound) <= min(found.cost, other.cost)
        assert found.cost <= other.cost * (1 + (0.01 if len(sizes) > 2 else 1e-6))
    assert len(solved) < apart
    assert again.within(None).bytes == free


def test_a_plan_is_mixed_of_two_although_variables_are_renumbered():
    problem = made(8)
    plain, other = budget_of(problem), budget_of(problem)
    limit = 0.8 * plain.within(None).bytes
    other.within(None)
    shared = [ref for ref, uses in problem.graph.users.items() if len(uses) == 2]
    other.solver.graph = other.solver._build(frozenset(shared[2:6]), other.solver.graph)
    assert len(other.solver.graph.factors.sizes) > len(plain.solver.graph.factors.sizes)
    found, again = plain.within(limit), other.within(limit)
    assert again.cost == pytest.approx(found.cost) and again.bytes == pytest.approx(found.bytes)
    assert found.cost < min(one.solution.cost for one in plain.points if one.solution.bytes <= limit)


def test_a_bound_holds_for_every_limit():
    problem = made(2, 4)
    budget = budget_of(problem)
    free = budget.within(None)
    budget.within(0.85 * free.bytes)
    for share in (0.99, 0.9, 0.8):
        least = budget.lower_bound(share * free.bytes)
        assert free.cost * (1 - 1e-9) <= least <= search(replace(problem, memory=share * free.bytes), NODES).cost


def test_an_infeasible_limit_is_refused_at_once(monkeypatch):
    budget, multipliers = budget_of(made(8)), []
    cheapest = PlanSearch.cheapest

    def total(self, multiplier, *given, **named):
        multipliers.append(multiplier)
        return cheapest(self, multiplier, *given, **named)

    monkeypatch.setattr(PlanSearch, "cheapest", total)
    free = budget.within(None).bytes
    for share in (0.01, 0.02):
        with pytest.raises(StrategyError, match="no plan was found that keeps it"):
            budget.within(share * free)
    assert len(multipliers) == 3  # zero, the first, and one at which only memory counts
    smallest = budget.smallest[0].bytes
    assert 0.02 * free < smallest < free
    assert budget.within(smallest).bytes == smallest


def test_an_infeasible_limit_is_refused_and_caches_are_kept():
    problem = made(2, 4)
    budget, free = budget_of(problem, None), search(problem, NODES)
    with pytest.raises(StrategyError, match=r"no plan was found that keeps it: the smallest needs"):
        budget.within(0.01 * free.bytes)
    found = budget.within(0.9 * free.bytes)
    assert found.bytes <= 0.9 * free.bytes and found.gap < 0.01
