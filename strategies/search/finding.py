"""The best plan among the options of a menu: solve a network, price what the solution uses, solve it again.

Tables hold lower bounds first: prices that a solution uses are settled, values of which uses disagree get a variable of
their own, until the solution costs what the network says. Each solution is a plan, and each optimum of the network a
lower bound, so both are known at any time.

A limit of memory enters as seconds per byte (a Lagrange multiplier): for any such price, the optimum minus the price of
the limit bounds all plans within the limit from below (M. Held, R. Karp, 1970). The next price is that at which the
plans on both sides of the limit cost the same, until nothing is cheaper there: then the bound is the best one.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from strategies.errors import StrategyError
from strategies.graph import Ref
from strategies.layout import Layout
from strategies.rules.sharding import Assignment
from strategies.search.elimination import TooWide
from strategies.search.folding import Folded
from strategies.search.kept import too_large
from strategies.search.narrowing import Narrowed
from strategies.search.network import Building
from strategies.search.options import Menu
from strategies.search.problem import Problem

PRECISE = 1e-6
"""Of a price, or of what a plan costs at it: what makes no difference."""
ROUNDS = 24
"""Prices of memory that are tried at most."""
WIDE_ROUNDS = 8
"""The same in a wide network, where each takes long."""
AGAIN = 12
"""Solutions of a wide network with one bound."""


@dataclass(frozen=True)
class Found:
    """A plan: assignments by operator id, layouts of parameters with several uses; seconds of a step, and the least
    that any plan takes; bytes that a rank keeps."""

    assignments: Mapping[str, Assignment]
    tensors: Mapping[Ref, Layout]
    cost: float
    lower_bound: float
    bytes: float

    @property
    def gap(self) -> float:
        """How much cheaper, relative to the bound, a plan can be at most."""
        return (self.cost - self.lower_bound) / self.lower_bound if self.lower_bound > 0 else 0.0


class Finding:
    def __init__(self, problem: Problem, menu: Menu, tolerance: float, wide: bool = False) -> None:
        self.problem, self.menu, self.tolerance = problem, menu, tolerance
        self.wide = wide
        """Whether the network is too wide to be eliminated as it is."""
        self.building = self._build(frozenset())
        self.many = len(menu.transfers.axes) > 2
        self.picks: list[int] = []
        """The options of the plan that was found last."""

    def _build(self, split: frozenset[Ref], like: Building | None = None) -> Building:
        with uncollected():
            building = Building(self.problem, self.menu, split, wide=self.wide, like=like)
            network = building.network
            self.solver: Folded | Narrowed = Narrowed(network) if self.wide else Folded(network)
        return building

    def solve(self, prove: bool = True) -> tuple[list[int], float]:
        """The options of a solution, and what every one costs at least. A wide network takes long to `prove` anything:
        else its best options are compared again, and the bound is the last one."""
        if isinstance(self.solver, Narrowed) and not prove:
            return self.solver.again()
        try:
            return self.solver.solve()
        except TooWide:
            self.wide = True
            self.building = self._build(frozenset(), self.building)
            return self.solver.solve()

    def cheapest(self, pressure: float, enough: float = 0.0, most: int | None = None) -> Found:
        """The plan that costs least where a byte costs `pressure` seconds; `lower_bound` includes that price. A plan
        that costs `enough` is the last one, and the best of `most` solutions."""
        self.building.press(pressure)
        best: Found | None = None
        lower = least = 0.0
        solutions, proven = 0, 1  # the latter: how many there were when the bound was found
        while True:
            picks, bound = self.solve(proven > solutions)
            lower = max(lower, bound)
            raised = self.building.settle(picks)
            cost, kept = self.building.cost(picks), self.building.bytes(picks)
            priced = cost + pressure * kept
            if best is None or priced < least:
                least = priced
                assignments, tensors = self.building.assignments(picks), self.building.tensors(picks)
                best = Found(assignments, tensors, cost, lower, kept)
                self.picks = picks
            solutions += 1
            if least - lower <= self.tolerance * lower or least <= enough or solutions == most:
                break
            split = self.building.underpaid(picks) if not raised or self.many else frozenset()
            if not raised and not split and proven == solutions:
                break
            if split:
                self.building = self._build(self.building.split | split, self.building)
            if split or not raised or solutions - proven == AGAIN:
                proven = solutions + 1
        return replace(best, lower_bound=min(lower, least))

    def within(self, limit: float, free: Found, most: int | None = None) -> Found:
        """The cheapest plan found that keeps the limit, of at most so many solutions per price of memory."""
        if free.bytes <= limit:
            return free
        lower, best, price = free.lower_bound, None, free.cost / limit
        large, small = free, free  # the plans next to the limit on either side of it, once there are two
        over, under, building = self.picks, self.picks, self.building
        most = AGAIN if most is None and self.wide else most
        for _ in range(WIDE_ROUNDS if self.wide else ROUNDS):
            found = self.cheapest(price, most=most)
            lower = max(lower, found.lower_bound - price * limit)
            if self.building is not building:  # its variables have other numbers
                over = under = self.picks
                building = self.building
            known = min(one.cost + price * one.bytes for one in (large, small))
            nothing_new = best is not None and found.cost + price * found.bytes >= known * (1 - PRECISE)
            if found.bytes <= limit:
                under, small = self.picks, found
                best = found if best is None or found.cost < best.cost else best
            else:
                over, large = self.picks, found
            if best is None:
                if found.cost < PRECISE * price * found.bytes:
                    break  # the least bytes there are
                price *= 8
                continue
            crossing = (small.cost - large.cost) / (large.bytes - small.bytes)
            done = best.cost - lower <= self.tolerance * lower or nothing_new
            if done or crossing <= 0 or abs(crossing - price) <= PRECISE * price:
                break
            price = crossing
        if best is None:
            raise StrategyError(too_large(limit, found.bytes))
        mixed = self.mixed(over, under, limit)
        best = mixed if mixed is not None and mixed.cost < best.cost else best
        return replace(best, lower_bound=min(lower, best.cost))

    def mixed(self, over: list[int], under: list[int], limit: float) -> Found | None:
        """Repeated layers all change at one price, so the limit may lie between two plans: the cheapest that takes the
        first part of the program from one and the rest from the other, and keeps the limit."""
        best: Found | None = None
        for first, last in ((over, under), (under, over)):
            low, high = 0, len(first)  # how much comes from `first`
            while high - low > 1:
                middle = (low + high) // 2
                picks = [*first[:middle], *last[middle:]]
                self.building.settle(picks)
                cost, kept = self.building.cost(picks), self.building.bytes(picks)
                if kept <= limit and (best is None or cost < best.cost):
                    assignments, tensors = self.building.assignments(picks), self.building.tensors(picks)
                    best = Found(assignments, tensors, cost, 0.0, kept)
                if (kept <= limit) == (first is over):
                    low = middle
                else:
                    high = middle
        return best


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the collector of cycles, which would go through the whole graph many times and find nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
