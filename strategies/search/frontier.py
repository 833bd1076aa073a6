"""The least seconds of a step against the bytes that a rank keeps: what was found for one limit is known for the next.

A limit of memory enters as seconds per byte (a Lagrange multiplier): for any such price, the optimum minus the price of
the limit bounds all plans within the limit from below (M. Held, R. Karp, 1970). The next price is that at which the
best plans on both sides of the limit cost the same, until nothing is cheaper there: then the bound is the best one (J.
Kelley, "The cutting-plane method", 1960).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product

from strategies.search.finding import AGAIN, Finding, Found, Name
from strategies.search.kept import too_large

PRECISE = 1e-6
"""Of a price: what makes no difference."""
ROUNDS = 24
"""Prices of memory that are tried at most for one limit."""
WIDE_ROUNDS = 8
"""The same in a wide network, where each takes long."""
FIRST, HIGH, HIGHEST = 0.25, 4.0, 1e7
"""Prices that are tried until something keeps the limit, as shares of that at which the memory of the limit costs as
much as the step takes: the first, where doubling ends, and the last, at which nothing but memory counts."""
HALF = 0.5
"""Of what a plan may cost more than the bound: what no higher bound would take away, the rest is for the plan."""
LOOSE = 0.03
"""Of what a plan costs: how precise it is at a price that may not be the last one."""


@dataclass(frozen=True)
class _Point:
    """A plan that costs least at some price of memory, and its options."""

    found: Found
    picks: Mapping[Name, int]


@dataclass(frozen=True)
class Frontier:
    """The plans of one `finding`. `most`: solutions per price, of which the best one is taken (None: until it is
    proven). By price: `bounds`, what any plan costs at least, its memory included, and how `precise` its plan is.
    `smallest` is what nothing but memory counts for, once that was asked."""

    finding: Finding
    most: int | None = None
    points: list[_Point] = field(default_factory=list)
    bounds: dict[float, float] = field(default_factory=dict)
    precise: dict[float, float] = field(default_factory=dict)
    smallest: list[_Point] = field(default_factory=list)

    def free(self) -> Found:
        """The cheapest plan of all."""
        self._try(0.0, self.finding.tolerance)
        return self.points[0].found

    def within(self, limit: float) -> Found:
        """The cheapest plan found that keeps the limit. Raises StrategyError where none does."""
        free = self.free()
        if free.bytes <= limit:
            return free
        for _ in range(WIDE_ROUNDS if self.finding.wide else ROUNDS):
            price = self._next(limit)
            if price is None:
                break
            self._try(price, self.finding.tolerance if price in self.bounds else max(LOOSE, self.finding.tolerance))
        best = self._best(limit)
        if best is None:
            raise too_large(limit, min(one.found.bytes for one in [*self.points, *self.smallest]))
        if not self._near(best.cost, limit):
            best = min([best, *self._mixed(limit)], key=lambda one: one.cost)
        return replace(best, lower_bound=min(self.least(limit), best.cost))

    def least(self, limit: float) -> float:
        """What any plan within the limit costs at least, by the prices that were tried."""
        return max((bound - price * limit for price, bound in self.bounds.items()), default=0.0)

    def _try(self, price: float, tolerance: float) -> None:
        if price not in self.bounds or tolerance < self.precise[price]:
            most = AGAIN if self.most is None and self.finding.wide and price else self.most
            found = self.finding.cheapest(price, most=most, tolerance=tolerance)
            reached = (found.cost + price * found.bytes) / found.lower_bound - 1 if found.lower_bound else 0.0
            self.bounds[price], self.precise[price] = found.lower_bound, min(reached, tolerance)
            self.points.append(_Point(found, self.finding.named))

    def _best(self, limit: float) -> Found | None:
        fitting = [one.found for one in self.points if one.found.bytes <= limit]
        return min(fitting, key=lambda one: one.cost, default=None)

    def _next(self, limit: float) -> float | None:
        """The price that is to be tried next; None where that finds nothing."""
        best = self._best(limit)
        if best is None:
            unit, tried = self.points[0].found.cost / limit, max(self.bounds)
            price = max(FIRST * unit, 2 * tried)
            if tried and not self.finding.wide and self._smallest() > limit:
                return None
            return price if price <= HIGH * unit else HIGHEST * unit if tried < HIGHEST * unit else None
        large, small = (one.found for one in self._around(limit))
        price = (small.cost - large.cost) / (large.bytes - small.bytes)
        if price <= 0 or self._near(small.cost - price * (limit - small.bytes), limit, HALF):
            return None
        tried = min(self.bounds, key=lambda other: abs(price - other))
        if abs(price - tried) > PRECISE * price:
            return price
        return tried if self.precise[tried] > self.finding.tolerance else None

    def _smallest(self) -> float:
        """Bytes of the plan that keeps least: where that is too large, no price finds one."""
        if not self.smallest:
            free = self.points[0].found
            found = self.finding.cheapest(
                HIGHEST * free.cost / free.bytes, most=self.most, tolerance=self.finding.tolerance
            )
            self.smallest.append(_Point(found, self.finding.named))
        return self.smallest[0].found.bytes

    def _near(self, seconds: float, limit: float, share: float = 1.0) -> bool:
        """Whether so many are as good as the least that is known for a limit, to a share of what is tolerated."""
        least = self.least(limit)
        return seconds - least <= share * self.finding.tolerance * least

    def _around(self, limit: float) -> tuple[_Point, _Point]:
        """The plans on both sides of the limit between which it costs least to keep it: no bound gets higher than what
        a line between them tells for the limit."""
        large = [one for one in self.points if one.found.bytes > limit]
        small = [one for one in self.points if one.found.bytes <= limit]

        def between(pair: tuple[_Point, _Point]) -> float:
            a, b = (one.found for one in pair)
            return b.cost + (a.cost - b.cost) * (limit - b.bytes) / (a.bytes - b.bytes)

        return min(product(large, small), key=between)

    def _mixed(self, limit: float) -> list[Found]:
        """Repeated layers all change at one price, so the limit may lie between two plans: those plans found that take
        the first part of the program from one and the rest from the other, and keep the limit."""
        large, small = (self.finding.numbered(one.picks) for one in self._around(limit))
        found = []
        for first, last in ((large, small), (small, large)):
            low, high = 0, len(first)  # how much comes from `first`
            while high - low > 1:
                middle = (low + high) // 2
                one = self.finding.priced([*first[:middle], *last[middle:]])
                if one.bytes <= limit:
                    found.append(one)
                if (one.bytes <= limit) == (first is large):
                    low = middle
                else:
                    high = middle
        return found
