"""The minimum of a factor graph that is too wide to be eliminated: message passing bounds it, reduced-cost fixing finds
it among few candidates.

Costs are reparametrised between factors and variables: an amount subtracted from a factor is added to one of its
variables, so all totals stay the same, and the sum of the minima of all parts is a lower bound. A sweep visits the
variables in order: each collects the min-marginals of the factors towards earlier variables, and distributes its cost
in equal parts to those towards later ones. Then the least of every factor is 0, so the bound is the sum of the minima
of the variables. Source: V. Kolmogorov, "A new look at reweighted message passing" (2015). Invariant: the bound never
falls, and a solution with a candidate costs at least the bound before a sweep plus the candidate's reduced cost.

Variables that are cheap to eliminate are eliminated before: of thousands of operators most follow a few others. Exact
elimination then runs on the candidates of least reduced cost, as many as are cheap to eliminate. Where the solution
costs no more than the bound plus the least reduced cost among the others, it is the minimum over all candidates; else
more are included. Source: G. Dantzig, R. Fulkerson, S. Johnson (1954).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from strategies.search.elimination import (
    Elimination,
    Factor,
    FactorGraph,
    FactorTable,
    Integers,
    Seconds,
    Variables,
    constant,
    elimination_effort,
)

MOST_SWEEPS = 30
"""In each direction."""
RISE = 1e-5
"""Relative gain of the bound below which no more sweeps are made, at least."""
RISE_SHARE = 0.1
"""The same as a share of the gap that matters."""
MOST_SECONDS = 1e3
"""Of a message and of a candidate at most: those of an illegal candidate are infinite."""
CHEAP = 2**18
"""Entries of the tables with which a variable is eliminated before messages are passed between the others."""
EFFORTS = (2**20, 2**24, 2**27)
"""Entries of all tables that an elimination may make: few at first, more where that proves nothing."""


@dataclass(eq=False)
class _Messages:
    """A table over several variables, and the seconds that were moved from it to every variable."""

    variables: tuple[int, ...]
    table: FactorTable
    moved: list[Seconds]


class DualBound:
    """The messages of one graph; they stay when seconds rise. Sweeps end where the bound gains less than `rise`."""

    def __init__(self, graph: FactorGraph, rise: float = RISE) -> None:
        self.sizes, self.rise = graph.sizes, rise
        self.unary: list[list[Factor]] = [[] for _ in self.sizes]
        self.own = [np.zeros(size) for size in self.sizes]
        """The sum of the unary factors."""
        self.around: list[list[tuple[_Messages, int]]] = [[] for _ in self.sizes]
        """The other factors of every variable, and its dim in each."""
        self.several: list[_Messages] = []
        self.reduced_costs: list[Seconds] = [np.zeros(size) for size in self.sizes]
        """Seconds that a solution with a candidate costs above `before`, at least."""
        self.before = -math.inf
        """The bound before the last sweep."""
        for one in graph.factors:
            if len(one.variables) == 1:
                self.unary[one.variables[0]].append(one)
                continue
            messages = _Messages(one.variables, one.table, [np.zeros(self.sizes[v]) for v in one.variables])
            self.several.append(messages)
            for dim, v in enumerate(one.variables):
                self.around[v].append((messages, dim))

    def bound(self, enough: float = math.inf) -> float:
        """Seconds that any solution costs at least, after sweeps until they gain little or there are `enough`; sets
        `reduced_costs`."""
        self.own = [
            np.minimum(sum((one.seconds for one in factors), np.zeros(size)), MOST_SECONDS)
            for factors, size in zip(self.unary, self.sizes, strict=True)
        ]
        found = self._sweep(True)
        for _ in range(MOST_SWEEPS):
            known, self.before = found, self._sweep(False)
            found = self._sweep(True)
            if found - known <= self.rise * abs(found) or found >= enough:
                break
        return found

    def _sweep(self, forward: bool) -> float:
        """The bound after a sweep."""
        found = 0.0
        order = range(len(self.sizes))
        for v in order if forward else reversed(order):
            seconds, behind, before = self.own[v].copy(), [], 0
            for factor, dim in self.around[v]:
                last = len(factor.variables) - 1
                if dim != (0 if forward else last):
                    factor.moved[dim] = np.minimum(factor.table.least(factor.moved, dim), MOST_SECONDS)
                    before += 1
                if dim != (last if forward else 0):
                    behind.append((factor, dim))
                seconds += factor.moved[dim]
            least = float(seconds.min())
            found += least
            seconds -= least
            self.reduced_costs[v] = seconds
            part = seconds / max(before, len(behind), 1)
            for factor, dim in behind:
                factor.moved[dim] = factor.moved[dim] - part
        return found


class _Restricted(FactorTable):
    """A factor's table over few candidates; `variables` are those that have several."""

    def __init__(self, factor: Factor, candidates: Sequence[Integers]) -> None:
        super().__init__()
        self.table, self.candidates = factor.table, [candidates[v] for v in factor.variables]
        self.variables = tuple(v for v in factor.variables if len(candidates[v]) > 1)
        self.shape = [len(candidates[v]) for v in self.variables]
        self.known: Seconds | None = None

    def renew(self) -> None:
        """Makes the table again where the factor's has changed."""
        if self.known is not self.table.source:
            self.known = self.table.source
            self._seconds = self.table.restricted(self.candidates).reshape(self.shape)


class ReducedCostFixing:
    """The solver of one graph, solved again when seconds rise. `tolerance` is the gap that matters to its user."""

    def __init__(self, graph: FactorGraph, tolerance: float = 0.0) -> None:
        self.memo = graph.memo
        self.first = Elimination(dict(enumerate(graph.sizes)), graph.factors, largest=CHEAP)
        """Of the variables that are cheap to eliminate."""
        self.graph = FactorGraph([graph.sizes[v] for v in self.first.kept])
        """Of the other variables."""
        numbers = {v: number for number, v in enumerate(self.first.kept)}
        for place in sorted(self.first.left):
            variables = tuple([numbers[v] for v in self.first.scopes[place]])
            self.graph.factors.append(Factor(variables, self.first.tables[place]))
        self.dual = DualBound(self.graph, max(RISE, RISE_SHARE * tolerance))
        self.candidates: list[Integers] = []
        self.lower_bound = -math.inf
        """Seconds that any solution costs at least."""

    def _completed(self, indices: Sequence[int]) -> list[int]:
        """The solution with the candidates of eliminated variables."""
        found = dict(zip(self.first.kept, indices, strict=True))
        self.first.complete(found)
        return [found[v] for v in range(len(found))]

    def again(self) -> tuple[list[int], float]:
        """The best solution of the candidates that were taken last, and the bound from then."""
        self.first.renew(self.memo)
        return self._completed(self._best()[0]), self.lower_bound

    def solve(self, enough: float = math.inf) -> tuple[list[int], float]:
        """The candidate of every variable in the best solution found, and seconds that any solution costs at least;
        where these are `enough`, no more is proven."""
        self.first.renew(self.memo)
        bound = self.dual.bound(enough)
        if self.candidates and bound >= enough:
            self.lower_bound = bound
            return self.again()
        for effort in EFFORTS:
            candidates, beyond = self._taken(effort)
            self._take(candidates)
            indices, seconds = self._best()
            self.lower_bound = max(bound, min(seconds, self.dual.before + beyond))
            if seconds <= self.lower_bound or self.lower_bound >= enough:
                break
        return self._completed(indices), self.lower_bound

    def _take(self, candidates: list[Integers]) -> None:
        """Solves among these candidates from now on; what did not change is not eliminated again."""
        self.candidates = candidates
        self.restricted = [_Restricted(one, candidates) for one in self.graph.factors]
        sizes = {v: len(one) for v, one in enumerate(candidates) if len(one) > 1}
        factors = [Factor(one.variables, one) for one in self.restricted]
        self.elimination = Elimination(sizes, factors, largest=math.inf)

    def _taken(self, most: float) -> tuple[list[Integers], float]:
        """The candidates of least reduced cost whose elimination makes at most the given number of table entries, and
        the least reduced cost of the others."""
        costs = self.dual.reduced_costs
        levels = np.unique(np.concatenate((np.zeros(1), *costs)))
        low, high = 0, len(levels)
        while high - low > 1:
            middle = (low + high) // 2
            if self._effort([int((one <= levels[middle]).sum()) for one in costs], most) <= most:
                low = middle
            else:
                high = middle
        taken = [np.flatnonzero(one <= levels[low]) for one in costs]
        beyond = float(levels[low + 1]) if low + 1 < len(levels) else math.inf
        while self._effort(list(map(len, taken)), most) > most:  # too many that are equally good
            longest = max(map(len, taken))
            taken, beyond = [one[: (longest + 1) // 2] for one in taken], 0.0
        return taken, beyond

    def _effort(self, sizes: Sequence[int], most: float) -> float:
        scopes = {tuple(v for v in one.variables if sizes[v] > 1) for one in self.graph.factors}
        return elimination_effort({v: size for v, size in enumerate(sizes) if size > 1}, scopes, most)

    def _best(self) -> tuple[list[int], float]:
        """The best solution of the candidates that were taken last, and its seconds."""
        for one in self.restricted:
            one.renew()
        indices, seconds = self.elimination.solve()
        return [int(one[indices.get(v, 0)]) for v, one in enumerate(self.candidates)], seconds


def minimum(sizes: Sequence[int], tables: Mapping[Variables, Seconds], largest: int) -> list[int]:
    """The candidate of every variable for which the sum of the tables is least.

    Exact while no table of the elimination has more than `largest` entries, else the first of reduced-cost fixing.
    """
    factors = [constant(*one) for one in tables.items()]
    elimination = Elimination(dict(enumerate(sizes)), factors, largest)
    if elimination.kept:
        return ReducedCostFixing(FactorGraph(list(sizes), factors)).solve(enough=-math.inf)[0]
    indices, _ = elimination.solve()
    return [indices[v] for v in range(len(sizes))]
