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

from strategies.errors import StrategyError
from strategies.search.finding import AGAIN, Finding, Found, Name
from strategies.search.kept import too_large

PRECISE = 1e-6
"""Of a price: what makes no difference."""
ROUNDS = 24
"""Prices of memory that are tried at most for one limit."""
WIDE_ROUNDS = 8
"""The same in a wide network, where each takes long."""
SHARES = (0.25, 0.75, 4.0, 1e7)
"""Prices that are tried until something keeps the limit, as shares of that at which the memory of the limit costs as
much as the step takes. At the last one nothing but memory counts."""


@dataclass(frozen=True)
class _Point:
    """A plan that costs least at some price of memory, and its options."""

    found: Found
    picks: Mapping[Name, int]


@dataclass(frozen=True)
class Frontier:
    """The plans of one `finding`. `most`: solutions per price, of which the best one is taken (None: until it is
    proven). `bounds`, by price: what any plan costs at least, its memory included."""

    finding: Finding
    most: int | None = None
    points: list[_Point] = field(default_factory=list)
    bounds: dict[float, float] = field(default_factory=dict)

    def free(self) -> Found:
        """The cheapest plan of all."""
        self._try(0.0)
        return self.points[0].found

    def within(self, limit: float) -> Found:
        """The cheapest plan found that keeps the limit. Raises StrategyError where none does."""
        if self.free().bytes <= limit:
            return self.free()
        for _ in range(WIDE_ROUNDS if self.finding.wide else ROUNDS):
            price = self._next(limit)
            if price is None:
                break
            self._try(price)
        best = self._best(limit)
        if best is None:
            raise StrategyError(too_large(limit, min(one.found.bytes for one in self.points)))
        if not self._proven(best, limit):
            best = min([best, *self._mixed(limit)], key=lambda one: one.cost)
        return replace(best, lower_bound=min(self.least(limit), best.cost))

    def least(self, limit: float) -> float:
        """What any plan within the limit costs at least, by the prices that were tried."""
        return max((bound - price * limit for price, bound in self.bounds.items()), default=0.0)

    def _try(self, price: float) -> None:
        if price not in self.bounds:
            found = self.finding.cheapest(
                price, most=AGAIN if self.finding.wide and price and not self.most else self.most
            )
            self.bounds[price] = found.lower_bound
            self.points.append(_Point(found, self.finding.named))

    def _best(self, limit: float) -> Found | None:
        fitting = [one.found for one in self.points if one.found.bytes <= limit]
        return min(fitting, key=lambda one: one.cost, default=None)

    def _proven(self, best: Found, limit: float) -> bool:
        least = self.least(limit)
        return best.cost - least <= self.finding.tolerance * least

    def _next(self, limit: float) -> float | None:
        """The price that is to be tried next; None where that finds nothing."""
        best = self._best(limit)
        if best is None:
            unit = self.free().cost / limit
            return next((share * unit for share in SHARES if share * unit > max(self.bounds)), None)
        large, small = (one.found for one in self._around(limit))
        price = (small.cost - large.cost) / (large.bytes - small.bytes)
        tried = any(abs(price - other) <= PRECISE * price for other in self.bounds)
        return None if price <= 0 or tried or self._proven(best, limit) else price

    def _around(self, limit: float) -> tuple[_Point, _Point]:
        """The plans on both sides of the limit between which it costs least to keep it."""
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
