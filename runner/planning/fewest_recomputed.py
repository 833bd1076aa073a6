"""In how few repeated layers a plan computes again so that a limit of memory is kept.

Bytes are nearly affine in how many layers of a rank are computed again, so few numbers are tried: regula falsi. The
groups of ranks of a pipeline hold unlike many micro-batches at a time, so each has its own number; all are tried
together. A rank's first layers are taken: their second run comes when what later ones stored is gone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class _Group:
    """Layers of one group of ranks: `low` are too few, `high` are enough, with the bytes `above` and `below`."""

    limit: int
    every: tuple[str, ...]
    above: int
    below: int
    sure: bool
    low: int = field(init=False)
    high: int = field(init=False)

    def __post_init__(self) -> None:
        enough = self.above <= self.limit
        self.low, self.high = (-1, 0) if enough else (0 if self.sure else -1, len(self.every))

    @property
    def known(self) -> bool:
        return self.high - self.low <= 1

    @property
    def guess(self) -> int:
        if self.known:
            return self.high
        guess = self.low + math.ceil((self.high - self.low) * (self.above - self.limit) / (self.above - self.below))
        return min(max(guess, self.low + 1), self.high - 1)

    def told(self, count: int, size: int) -> None:
        if size > self.limit:
            if count >= self.high:  # with fewer layers of other groups, of which one was this one's too
                self.high = len(self.every)
            self.low, self.above = count, size
        elif count < self.high:
            fewer = size + (size - self.below) / (self.high - count)
            self.high, self.below = count, size
            if fewer > self.limit:
                self.low = count - 1  # one less would be too few


class Fewest:
    """Of layers in which `every` group of ranks may compute again, of which it needs `most` bytes where it does in none
    and `least` where it does in all of them; `sure`: `most` is no guess."""

    def __init__(
        self, limit: int, every: Sequence[tuple[str, ...]], most: Sequence[int], least: Sequence[int], *, sure: bool
    ) -> None:
        self.limit = limit
        self.groups = [_Group(limit, *one, sure) for one in zip(every, most, least, strict=True)]
        self.tried: list[int] = []

    @property
    def at_least(self) -> set[str]:
        """The layers that are surely among them."""
        return self._layers([max(one.guess - 1, 0) if one.high else 0 for one in self.groups])

    def next(self) -> set[str] | None:
        """The layers that are to be tried; None where the last ones are as few as keep the limit, or none do."""
        counts = [one.guess for one in self.groups]
        if counts == self.tried:
            return None
        self.tried = counts
        return self._layers(counts)

    def told(self, sizes: Sequence[int]) -> bool:
        """With the bytes that every group then needs. Whether all keep the limit."""
        for one, count, size in zip(self.groups, self.tried, sizes, strict=True):
            one.told(count, size)
        return max(sizes) <= self.limit

    def _layers(self, counts: Sequence[int]) -> set[str]:
        return {name for one, count in zip(self.groups, counts, strict=True) for name in one.every[:count]}
