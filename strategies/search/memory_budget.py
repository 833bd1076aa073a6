"""The cheapest plan within a memory limit: the limit enters as a Lagrange multiplier, seconds per byte.

For any multiplier, the least cost minus the multiplier times the limit bounds all plans within the limit from below (M.
Held, R. Karp, 1970). The next multiplier is that at which the best plans on both sides of the limit cost the same,
until nothing is cheaper there: then the bound is the best one (J. Kelley, "The cutting-plane method", 1960). What was
found for one limit serves the next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Protocol

from strategies.core.graph import Ref
from strategies.search.problem import Solution, too_large

PRECISION = 1e-6
"""Relative difference below which two multipliers are equal."""
ATTEMPTS, WIDE_ATTEMPTS = 24, 8
"""Multipliers that are tried at most for one limit; the latter in a graph that is too wide to be eliminated."""
FIRST, HIGH, HIGHEST = 0.25, 4.0, 1e7
"""Multipliers that are tried until a plan keeps the limit, in units of the one at which the memory of the limit costs
as much as the step: the first, where doubling ends, and the last, at which only memory counts."""
SHARE = 0.5
"""Share of the tolerated gap that may be left to the bound; the rest is for the plan."""
LOOSE = 0.03
"""Gap at a multiplier that may not be the last one."""
Name = str | Ref
"""A variable that decides about a plan: an operator by its id, or a parameter with several uses."""


@dataclass(frozen=True)
class Point:
    """The best plan at one multiplier, whose `lower_bound` includes the cost of its bytes; the index of the candidate
    of every variable; whether the search was `stopped` because nothing cheap enough was left."""

    solution: Solution
    indices: Mapping[Name, int]
    stopped: bool = False


class Solver(Protocol):
    """The search for the best plan at a multiplier."""

    @property
    def tolerance(self) -> float: ...

    @property
    def wide(self) -> bool: ...

    def cheapest(self, multiplier: float, tolerance: float, enough: float = math.inf) -> Point: ...

    def evaluated(self, first: Mapping[Name, int], last: Mapping[Name, int], count: int) -> Solution:
        """The plan whose first `count` variables are as in `first`, the others as in `last`; without a bound."""


@dataclass(frozen=True)
class MemoryBudget:
    """The plans that one `solver` found. By multiplier: `bounds`, the least cost of any plan with that of its bytes,
    and the relative `gaps` of the plans."""

    solver: Solver
    points: list[Point] = field(default_factory=list)
    bounds: dict[float, float] = field(default_factory=dict)
    gaps: dict[float, float] = field(default_factory=dict)
    smallest: list[Solution] = field(default_factory=list)
    """The plan with the fewest bytes, once it was needed."""

    def within(self, limit: float | None, enough: float = math.inf) -> Solution | None:
        """The cheapest plan that keeps the limit in bytes per rank; None where none takes less than `enough` seconds.

        Raises:
            TooLarge: no plan within the limit was found.
        """
        self._try(0.0, self.solver.tolerance, enough)
        if self.bounds[0.0] >= enough:
            return None
        free = self._best(math.inf)
        assert free is not None
        if limit is None or free.bytes <= limit:
            return replace(free, lower_bound=min(self.bounds[0.0], free.cost))
        for _ in range(WIDE_ATTEMPTS if self.solver.wide else ATTEMPTS):
            multiplier = self._next(limit)
            if multiplier is None:
                break
            tolerance = self.solver.tolerance
            self._try(multiplier, tolerance if multiplier in self.bounds else max(LOOSE, tolerance))
            if self.lower_bound(limit) >= enough:
                return None
        best = self._best(limit)
        if best is None:
            raise too_large(limit, min(one.bytes for one in [*(x.solution for x in self.points), *self.smallest]))
        if not self._near(best.cost, limit):
            best = min([best, *self._mixed(limit)], key=lambda one: one.cost)
        return replace(best, lower_bound=min(self.lower_bound(limit), best.cost))

    def lower_bound(self, limit: float) -> float:
        """Seconds below those of any plan within the limit."""
        return max(bound - multiplier * limit for multiplier, bound in self.bounds.items())

    def _try(self, multiplier: float, tolerance: float, enough: float = math.inf) -> None:
        if self.gaps.get(multiplier, math.inf) <= tolerance or self.bounds.get(multiplier, -math.inf) >= enough:
            return
        point = self.solver.cheapest(multiplier, tolerance, enough)
        found = point.solution
        bound = max(found.lower_bound, self.bounds.get(multiplier, 0.0))
        gap = (found.cost + multiplier * found.bytes) / bound - 1 if bound else 0.0
        self.bounds[multiplier], self.gaps[multiplier] = bound, gap if point.stopped else min(gap, tolerance)
        self.points.append(point)

    def _best(self, limit: float) -> Solution | None:
        fitting = [one.solution for one in self.points if one.solution.bytes <= limit]
        return min(fitting, key=lambda one: one.cost, default=None)

    def _next(self, limit: float) -> float | None:
        """The multiplier to try next; None where none is promising."""
        best = self._best(limit)
        if best is None:
            unit, tried = self.points[0].solution.cost / limit, max(self.bounds)
            multiplier = max(FIRST * unit, 2 * tried)
            if tried and not self.solver.wide and self._smallest_bytes() > limit:
                return None
            return multiplier if multiplier <= HIGH * unit else HIGHEST * unit if tried < HIGHEST * unit else None
        large, small = (one.solution for one in self._around(limit))
        multiplier = (small.cost - large.cost) / (large.bytes - small.bytes)
        if multiplier <= 0 or self._near(small.cost - multiplier * (limit - small.bytes), limit, SHARE):
            return None
        tried = min(self.bounds, key=lambda other: abs(multiplier - other))
        if abs(multiplier - tried) > PRECISION * multiplier:
            return multiplier
        return tried if self.gaps[tried] > self.solver.tolerance else None

    def _smallest_bytes(self) -> float:
        """Bytes of the plan that needs least: where that is too large, no multiplier finds one."""
        if not self.smallest:
            free = self.points[0].solution
            multiplier = HIGHEST * free.cost / free.bytes
            self.smallest.append(self.solver.cheapest(multiplier, self.solver.tolerance).solution)
        return self.smallest[0].bytes

    def _near(self, seconds: float, limit: float, share: float = 1.0) -> bool:
        """Whether a gap in seconds is within a share of the tolerance."""
        bound = self.lower_bound(limit)
        return seconds - bound <= share * self.solver.tolerance * bound

    def _around(self, limit: float) -> tuple[Point, Point]:
        """The plans on both sides of the limit between which it costs least to keep it: no bound is higher than the
        line between them at the limit."""
        large = [one for one in self.points if one.solution.bytes > limit]
        small = [one for one in self.points if one.solution.bytes <= limit]

        def between(pair: tuple[Point, Point]) -> float:
            a, b = (one.solution for one in pair)
            return b.cost + (a.cost - b.cost) * (limit - b.bytes) / (a.bytes - b.bytes)

        return min(product(large, small), key=between)

    def _mixed(self, limit: float) -> list[Solution]:
        """Plans that take the first part of the program from one plan and the rest from another, and keep the limit:
        repeated layers all change at one multiplier, so the limit may fall between two plans."""
        large, small = (one.indices for one in self._around(limit))
        found = []
        for first, last in ((large, small), (small, large)):
            low, high = 0, len(first)
            while high - low > 1:
                middle = (low + high) // 2
                one = self.solver.evaluated(first, last, middle)
                if one.bytes <= limit:
                    found.append(one)
                if (one.bytes <= limit) == (first is large):
                    low = middle
                else:
                    high = middle
        return found
