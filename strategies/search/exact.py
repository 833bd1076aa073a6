"""Dynamic programming over the operator graph: the plan that costs least, with a certificate.

problem -> network of tables -> repeated layers folded -> elimination -> assignments. Tables hold lower bounds first:
prices that a solution uses are settled, values of which uses disagree get a variable of their own, and the network is
solved again until the solution costs what the network says. Each solution is a plan, and each optimum of the network a
lower bound, so both are known at any time.

A limit of memory enters as seconds per byte (a Lagrange multiplier): for any such price, the optimum minus the price of
the limit bounds all plans within the limit from below (M. Held, R. Karp, 1970). The price is found by bisection.

On meshes of more than `MOST_AXES` axes neighbours are joined: the best plan of all joined meshes is taken, and the gap
is that to what work alone takes on the whole mesh.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from strategies.cost.cluster import Cluster
from strategies.errors import StrategyError
from strategies.graph import Ref
from strategies.layout import Layout
from strategies.rules.sharding import Assignment
from strategies.search.alike import Alike, levels_of
from strategies.search.coarse import Classes, Groups, Within, price_pairs
from strategies.search.folding import Folded
from strategies.search.joining import joinings, least
from strategies.search.network import Building
from strategies.search.options import Menu
from strategies.search.pricing import plan_seconds
from strategies.search.problem import Problem
from strategies.search.transfers import Transfers

MOST_AXES = 3
"""Axes up to which every layout is an option."""
"""How many solutions of a coarse search become plans, at most."""
MOST_SOLUTIONS = 40
"""Of the network of a few layouts, until its best one is taken."""
ROUNDS = 24
"""Prices of memory that are tried at most."""


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


def search(problem: Problem, cluster: Cluster, tolerance: float | None = None) -> Found:
    """The cheapest plan within the memory limit, or one at most `tolerance` (relative to the bound) more expensive;
    None is 0 on meshes of one or two axes, and 1 % on larger ones. With a limit or more than `MOST_AXES` axes the gap
    may stay larger. Raises StrategyError where no plan within the limit is found."""
    transfers = Transfers(problem.mesh, cluster)
    if tolerance is None:
        tolerance = 0.01 if len(transfers.axes) > 2 else 1e-12
    menu = Menu(problem, transfers)
    if len(transfers.axes) > MOST_AXES and (best := _on_joined(problem, cluster, menu, tolerance)) is not None:
        return best
    finding = _Finding(problem, menu, tolerance)
    free = finding.cheapest(0.0)
    if problem.memory is None or free.bytes <= problem.memory:
        return free
    return finding.within(problem.memory, free)


def _on_joined(problem: Problem, cluster: Cluster, menu: Menu, tolerance: float) -> Found | None:
    """The best plan of the joined meshes, and its seconds on the whole one; None where axes cannot be joined."""
    best: Found | None = None
    refused: StrategyError | None = None
    for joined in joinings(problem, cluster):
        try:
            found = search(joined.problem, cluster, tolerance)
        except StrategyError as error:  # a limit that no plan on this mesh keeps
            refused = error
            continue
        if best is None or found.cost < best.cost:
            assignments = {id: joined.assignment(one) for id, one in found.assignments.items()}
            tensors = {ref: joined.layout(one) for ref, one in found.tensors.items()}
            best = replace(found, assignments=assignments, tensors=tensors)
    if best is None:
        if refused is not None:
            raise refused
        return None
    cost = plan_seconds(menu, best.assignments, best.tensors, problem)
    return replace(best, cost=cost, lower_bound=min(least(problem, cluster), cost))


class _Finding:
    def __init__(self, problem: Problem, menu: Menu, tolerance: float) -> None:
        self.problem, self.menu, self.tolerance = problem, menu, tolerance
        self._build(frozenset())
        self.many = len(menu.transfers.axes) > 2
        self.picks: list[int] = []
        """The options of the plan that was found last."""

    def _build(self, split: frozenset[Ref]) -> None:
        with _uncollected():
            self.building = Building(self.problem, self.menu, split)
            self.folded = Folded(self.building.network)

    def cheapest(self, pressure: float, enough: float = 0.0, most: int | None = None) -> Found:
        """The plan that costs least where a byte costs `pressure` seconds; `lower_bound` includes that price. A plan
        that costs `enough` is the last one, and the best of `most` solutions."""
        self.building.press(pressure)
        best: Found | None = None
        lower = least = 0.0
        solutions = 0
        while True:
            picks, bound = self.folded.solve()
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
            if not raised and not split:
                break
            if split:
                self._build(self.building.split | split)
        return replace(best, lower_bound=min(lower, least))

    def within(self, limit: float, free: Found) -> Found:
        """The cheapest plan found that keeps the limit."""
        lower, best, low = free.lower_bound, None, 0.0
        high = free.cost / limit
        over, under, building = self.picks, self.picks, self.building
        for _ in range(ROUNDS):
            price = (low + high) / 2 if best is not None else high
            found = self.cheapest(price)
            lower = max(lower, found.lower_bound - price * limit)
            if self.building is not building:  # its variables have other numbers
                over = under = self.picks
                building = self.building
            if found.bytes <= limit:
                under = self.picks
                best = found if best is None or found.cost < best.cost else best
                high = price
            else:
                over = self.picks
                low, high = (price, high * 8) if best is None else (price, high)
            if best is not None and (best.cost - lower <= self.tolerance * lower or high - low <= 1e-6 * high):
                break
        if best is None:
            raise StrategyError(
                f"parallel.memory_limit = {limit:.0f} bytes per rank, but no plan was found that keeps it: the "
                f"smallest needs {found.bytes:.0f}. Use more ranks, a higher parallel.zero.stage, smaller batches, "
                "or a larger limit."
            )
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


class _Coarse:
    """A search that goes from groups of classes of layouts to layouts, for meshes of many axes."""

    def __init__(self, problem: Problem, transfers: Transfers, tolerance: float) -> None:
        self.problem, self.transfers, self.tolerance = problem, transfers, tolerance
        self.alike = Alike(transfers, levels_of(problem.mesh, transfers.cluster))
        self.groups = Groups(Classes(problem, transfers, self.alike))

    def cheapest(self) -> Found:
        """The plan that costs least."""
        best, lower, plans = None, 0.0, 0
        while True:
            with _uncollected():
                building = Building(self.problem, self.groups)
                folded = Folded(building.network)
            while True:
                picks, bound = folded.solve()
                lower = max(lower, bound)
                raised = building.settle(picks)
                print(round(bound,4), raised, best and best.cost, time.process_time())
                named = {id: picks[variable] for id, variable in building.variables.items()}
                if best is not None and best.cost - lower <= self.tolerance * lower:
                    return replace(best, lower_bound=min(lower, best.cost))
                if self.groups.look(named):
                    break
                if raised:
                    continue
                found = self._within(named, lower * (1 + self.tolerance))
                print("plan", found.cost, time.process_time())
                best = found if best is None or found.cost < best.cost else best
                price_pairs(building, self.alike, picks, self.tolerance * lower / 50)
                if best.cost - lower <= self.tolerance * lower or not building.renew():
                    return replace(best, lower_bound=min(lower, best.cost))

    def _within(self, picks: Mapping[str, int], enough: float) -> Found:
        """The best plan of the classes that were picked; operators that are like no other may slice a loop with all
        axes that are alike, too."""
        chosen, often = {}, Counter(map(id, self.groups.every.values()))
        for operator in self.problem.graph.operators:
            every = self.groups.every[operator.id]
            placed = self.groups.classes.placed[id(every)]
            pick = placed[[self.groups.group(operator).heads[picks[operator.id]]]]
            runs = [placed[:, level[:1]] == placed[:, level] for level in self.alike.places]
            joined = placed[np.concatenate(runs, 1).all(1)] if often[id(every)] == 1 else placed[:0]
            chosen[operator.id] = np.concatenate([pick, joined])
        menu = Within(self.problem, self.transfers, self.alike, chosen)
        return _Finding(self.problem, menu, 1e-3).cheapest(0.0, enough, MOST_SOLUTIONS)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without the collector of cycles, which would go through the whole graph many times and find nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
