"""The best plan among the options of a menu: solve a network, price what the solution uses, solve it again.

Tables hold lower bounds first: prices that a solution uses are settled, values of which uses disagree get a variable of
their own, until the solution costs what the network says. Each solution is a plan, and each optimum of the network a
lower bound, so both are known at any time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from strategies.core.gc_paused import gc_paused
from strategies.core.graph import Ref
from strategies.core.layout import Layout
from strategies.rules.sharding import Assignment
from strategies.search.elimination import TooWide
from strategies.search.folding import Folded
from strategies.search.narrowing import Narrowed
from strategies.search.network import Building
from strategies.search.options import Menu
from strategies.search.problem import Problem

AGAIN = 12
"""Solutions of a wide network with one bound, and with one price of memory."""
Name = str | Ref
"""Of what has options: an operator by its id, or a parameter with several uses."""


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
        self.named: Mapping[Name, int] = {}
        """The options of the plan that was found last, by what they are of: variables may be numbered anew."""

    def _build(self, split: frozenset[Ref], like: Building | None = None) -> Building:
        with gc_paused():
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

    def cheapest(
        self, pressure: float, enough: float = 0.0, most: int | None = None, tolerance: float | None = None
    ) -> Found:
        """The plan that costs least where a byte costs `pressure` seconds; `lower_bound` includes that price. A plan
        that costs `enough` is the last one, and the best of `most` solutions; `tolerance` is that of the search."""
        tolerance = self.tolerance if tolerance is None else tolerance
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
                self.named = {name: picks[variable] for name, variable in self._variables()}
            solutions += 1
            if least - lower <= tolerance * lower or least <= enough or solutions == most:
                break
            split = self.building.underpaid(picks) if not raised or self.many else frozenset()
            if not raised and not split and proven == solutions:
                break
            if split:
                self.building = self._build(self.building.split | split, self.building)
            if split or not raised or solutions - proven == AGAIN:
                proven = solutions + 1
        return replace(best, lower_bound=min(lower, least))

    def priced(self, picks: list[int]) -> Found:
        """The plan of any options, at the prices of what it uses; no bound."""
        self.building.settle(picks)
        assignments, tensors = self.building.assignments(picks), self.building.tensors(picks)
        return Found(assignments, tensors, self.building.cost(picks), 0.0, self.building.bytes(picks))

    def numbered(self, picks: Mapping[Name, int]) -> list[int]:
        """Options by the numbers of variables, of which those that say what is shared play no part in a price."""
        found = [0] * len(self.building.network.sizes)
        for name, variable in self._variables():
            found[variable] = picks[name]
        return found

    def _variables(self) -> Iterator[tuple[Name, int]]:
        yield from self.building.variables.items()
        yield from ((ref, variable) for ref, (variable, _) in self.building.parameters.items())
