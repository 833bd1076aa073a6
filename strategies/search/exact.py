"""Dynamic programming over the operator graph: the plan that costs least, with a certificate.

problem -> network of tables -> repeated layers folded -> elimination -> assignments. Tables hold lower bounds first:
prices that a solution uses are settled, values of which uses disagree get a variable of their own, and the network is
solved again until the solution costs what the network says. Each solution is a plan, and each optimum of the network a
lower bound, so both are known at any time.

A limit of memory enters as seconds per byte (a Lagrange multiplier): for any such price, the optimum minus the price of
the limit bounds all plans within the limit from below (M. Held, R. Karp, 1970). The price is found by bisection.

On meshes of more than `MOST_AXES` axes, or where a table would be too large, neighbours are joined: the best plan of
all joined meshes is taken, and the gap is that to what work alone takes on the whole mesh.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from strategies.cost.cluster import Cluster
from strategies.errors import StrategyError
from strategies.graph import Ref
from strategies.layout import Layout
from strategies.rules.sharding import Assignment
from strategies.search.elimination import LARGEST, TooWide
from strategies.search.folding import Folded
from strategies.search.joining import joinings, least
from strategies.search.kept import too_large
from strategies.search.network import Building
from strategies.search.options import Menu
from strategies.search.prices import Pricing
from strategies.search.problem import Problem
from strategies.search.transfers import Transfers

MOST_AXES = 3
"""Axes up to which every layout is an option."""
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
    if len(transfers.axes) > MOST_AXES and (best := _on_joined(problem, cluster, tolerance)) is not None:
        return best
    finding = _Finding(problem, Menu(problem, transfers), tolerance)
    try:
        free = finding.cheapest(0.0)
    except TooWide:
        if (best := _on_joined(problem, cluster, tolerance)) is not None:
            return best
        raise StrategyError(
            f"parallel.search = dynamic_programming would need a table of more than {LARGEST:,} entries on this mesh, "
            "because some operator meets many others. Use parallel.search=recursive_programming, a mesh of fewer "
            "axes, or configure some strategies."
        ) from None
    if problem.memory is None or free.bytes <= problem.memory:
        return free
    return finding.within(problem.memory, free)


def _on_joined(problem: Problem, cluster: Cluster, tolerance: float) -> Found | None:
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
    cost = Pricing(problem, cluster).total(best.assignments, best.tensors)
    return replace(best, cost=cost, lower_bound=min(least(problem, cluster), cost))


class _Finding:
    def __init__(self, problem: Problem, menu: Menu, tolerance: float) -> None:
        self.problem, self.menu, self.tolerance = problem, menu, tolerance
        self._build(frozenset())
        self.many = len(menu.transfers.axes) > 2
        self.solved: frozenset[Ref] = frozenset()
        """Values that were split when the network was last solved."""
        self.refused: frozenset[Ref] = frozenset()
        """Values that stay whole, because split they would make a table too large."""
        self.together: frozenset[Ref] = frozenset()
        """Values that get no variable of their own, because a table would become too large."""
        self.picks: list[int] = []
        """The options of the plan that was found last."""

    def _build(self, split: frozenset[Ref]) -> None:
        with _uncollected():
            self.building = Building(self.problem, self.menu, split)
            self.folded = Folded(self.building.network)

    def cheapest(self, pressure: float) -> Found:
        """The plan that costs least where a byte costs `pressure` seconds; `lower_bound` includes that price."""
        self.building.press(pressure)
        best: Found | None = None
        lower = least = 0.0
        while True:
            picks, bound = self.solve()
            lower = max(lower, bound)
            raised = self.building.settle(picks)
            cost, kept = self.building.cost(picks), self.building.bytes(picks)
            priced = cost + pressure * kept
            if best is None or priced < least:
                least = priced
                assignments, tensors = self.building.assignments(picks), self.building.tensors(picks)
                best = Found(assignments, tensors, cost, lower, kept)
                self.picks = picks
            if least - lower <= self.tolerance * lower:
                break
            split = self.building.underpaid(picks) - self.refused if not raised or self.many else frozenset()
            if not raised and not split:
                break
            if split:
                self._build(self.building.split | split)
        return replace(best, lower_bound=min(lower, least))

    def solve(self) -> tuple[list[int], float]:
        """The options and seconds of the optimum. Where a table would be too large, values of fewer kinds are split
        (alike ones of repeated layers together), so a gap may stay. Raises TooWide where none helps."""
        while True:
            try:
                found = self.folded.solve()
                self.solved = self.building.split
                return found
            except TooWide:
                more = self.building.split - self.solved
                kinds: dict[tuple[int, int], set[Ref]] = {}
                for ref in sorted(more, key=lambda ref: (ref.id, ref.index)):
                    kinds.setdefault((id(self.building.choices.get(ref.id)), ref.index), set()).add(ref)
                if not kinds:
                    raise
                kept = list(kinds.values())[: len(kinds) // 2]
                if not kept:
                    self.refused |= more
                self._build(self.solved.union(*kept))

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
def _uncollected() -> Iterator[None]:
    """Without the collector of cycles, which would go through the whole graph many times and find nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
