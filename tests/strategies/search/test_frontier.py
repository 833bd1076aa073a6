"""One search for many limits of memory: what it keeps changes nothing but the time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from strategies.core.errors import StrategyError
from strategies.search.exact import Exact, search
from strategies.search.finding import Finding
from strategies.search.frontier import Frontier
from strategies.search.kept import plan_bytes
from strategies.search.options import Menu
from strategies.search.prices import Pricing
from strategies.search.problem import Problem
from strategies.search.transfers import Transfers
from tests.strategies.search.test_network import NODES, llama, problem_of


@cache
def made(*sizes: int) -> Problem:
    return problem_of(llama(6), *sizes)


def frontier_of(problem: Problem) -> Frontier:
    return Frontier(Finding(problem, Menu(problem, Transfers(problem.mesh, NODES)), 1e-12))


@pytest.mark.parametrize(
    ("sizes", "shares"),
    [
        ((8,), (0.8, 0.95, 0.9)),
        ((2, 4), (0.95, 0.9, 0.8)),
        pytest.param((2, 2, 2), (0.8, 0.95, 0.9), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_limits_one_after_another_find_what_each_finds_alone(monkeypatch, sizes, shares):
    problem, solved = made(*sizes), []
    cheapest = Finding.cheapest

    def counted(self, *given, **named):
        solved.append(1)
        return cheapest(self, *given, **named)

    monkeypatch.setattr(Finding, "cheapest", counted)
    free = search(problem, NODES).bytes
    solved.clear()
    alone = {share: search(replace(problem, memory=share * free), NODES) for share in shares}
    apart = len(solved)
    solved.clear()
    kept, pricing = Exact(problem, NODES), Pricing(problem, NODES)
    for share in shares:
        found, other = kept.within(share * free), alone[share]
        assert found.bytes == pytest.approx(plan_bytes(problem, found.assignments)) and found.bytes <= share * free
        assert found.cost == pytest.approx(pricing.total(found.assignments, found.tensors))
        assert max(found.lower_bound, other.lower_bound) <= min(found.cost, other.cost)
        assert found.cost <= other.cost * (1 + (0.01 if len(sizes) > 2 else 1e-6))
    assert len(solved) < apart
    assert kept.within(None).bytes == free


def test_a_plan_is_mixed_of_two_though_variables_are_numbered_anew():
    problem = made(8)
    plain, other = frontier_of(problem), frontier_of(problem)
    limit = 0.8 * plain.free().bytes
    other.free()
    shared = [ref for ref, uses in problem.graph.users.items() if len(uses) == 2]
    other.finding.building = other.finding._build(frozenset(shared[2:6]), other.finding.building)
    assert len(other.finding.building.network.sizes) > len(plain.finding.building.network.sizes)
    found, again = plain.within(limit), other.within(limit)
    assert again.cost == pytest.approx(found.cost) and again.bytes == pytest.approx(found.bytes)
    assert found.cost < min(one.found.cost for one in plain.points if one.found.bytes <= limit)


def test_a_bound_holds_for_every_limit():
    problem = made(2, 4)
    frontier = frontier_of(problem)
    free = frontier.free()
    frontier.within(0.85 * free.bytes)
    for share in (0.99, 0.9, 0.8):
        least = frontier.least(share * free.bytes)
        assert free.cost * (1 - 1e-9) <= least <= search(replace(problem, memory=share * free.bytes), NODES).cost


def test_what_no_plan_keeps_is_refused_at_once(monkeypatch):
    frontier, prices = frontier_of(made(8)), []
    cheapest = Finding.cheapest

    def told(self, pressure, *given, **named):
        prices.append(pressure)
        return cheapest(self, pressure, *given, **named)

    monkeypatch.setattr(Finding, "cheapest", told)
    free = frontier.free().bytes
    for share in (0.01, 0.02):
        with pytest.raises(StrategyError, match="no plan was found that keeps it"):
            frontier.within(share * free)
    assert len(prices) == 3  # free, the first price, and where nothing but memory counts
    smallest = frontier.smallest[0].found.bytes
    assert 0.02 * free < smallest < free
    assert frontier.within(smallest).bytes == smallest


def test_what_no_plan_keeps_is_refused_and_nothing_is_forgotten():
    problem = made(2, 4)
    exact, free = Exact(problem, NODES), search(problem, NODES)
    with pytest.raises(StrategyError, match=r"no plan was found that keeps it: the smallest needs"):
        exact.within(0.01 * free.bytes)
    found = exact.within(0.9 * free.bytes)
    assert found.bytes <= 0.9 * free.bytes and found.gap < 0.01
