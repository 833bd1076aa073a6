"""What a value costs that several uses want: every layout that any of them wants is paid once.

Uses that agree pay together, so the price is the least over all ways to divide the uses into groups that agree, where
each group pays for the layout it wants. Given how the value lies, groups have nothing to do with one another: the least
over everything else takes as long as a table over the value and one use, not as one over all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from strategies.search.cells import Cell
from strategies.search.transfers import Integers, Seconds

Uses = frozenset[int]


class Agreeing(Cell):
    """Seconds over the options of a producer and of its users. `price` makes what each layout costs [options of the
    producer, layouts that some use wants]; `wanted` [options of the user] is the layout of every use. `lone`: nothing
    produces the value, so there is one row and users are the only variables."""

    def __init__(self, price: Callable[[], Seconds], wanted: Sequence[Integers], lone: bool) -> None:
        super().__init__(lambda: self.taken(self.every))
        self.price, self.wanted, self.lone = price, tuple(wanted), lone
        self.prices = price()
        self.order = [np.argsort(one, kind="stable") for one in self.wanted]
        firsts = [
            np.unique(one[order], return_index=True) for one, order in zip(self.wanted, self.order, strict=True)
        ]
        self.names, self.starts = [names for names, _ in firsts], [starts for _, starts in firsts]

    @property
    def every(self) -> list[Integers]:
        """All options of every variable."""
        rows = [] if self.lone else [np.arange(len(self.prices))]
        return [*rows, *(np.arange(len(one)) for one in self.wanted)]

    def refresh(self) -> None:
        super().refresh()
        self.prices = self.price()

    def left(self, moved: Sequence[Seconds], place: int | None = None) -> Seconds:
        given = np.zeros(1) if self.lone else moved[0]
        uses = moved if self.lone else moved[1:]
        told = [self._by_layout(use, -seconds) for use, seconds in enumerate(uses)]
        every, together = frozenset(range(len(uses))), dict[Uses, Seconds]()
        if place is None:
            return np.asarray((self._divided(every, told, together) - given).min())
        if place == 0 and not self.lone:
            return self._divided(every, told, together)
        own = place if self.lone else place - 1
        best = np.full(self.prices.shape[1], np.inf)
        for group in _subsets(every - {own}):
            rest = self._divided(every - {own} - group, told, together) - given
            paid = (self.prices + rest[:, None]).min(0)
            best = np.minimum(best, sum((told[use] for use in group), paid))
        return np.asarray(best[self.wanted[own]])

    def _by_layout(self, use: int, seconds: Seconds) -> Seconds:
        """The least of a user's options for every layout; infinite where it never wants that."""
        found = np.full(self.prices.shape[1], np.inf)
        found[self.names[use]] = np.minimum.reduceat(seconds[self.order[use]], self.starts[use])
        return found

    def _divided(self, uses: Uses, told: Sequence[Seconds], together: dict[Uses, Seconds]) -> Seconds:
        """[options of the producer]: the least that these uses pay, divided as is best."""
        if not uses:
            return np.zeros(len(self.prices))
        if uses not in together:
            first, best = min(uses), np.full(len(self.prices), np.inf)
            for group in _subsets(uses - {first}):
                paid = sum((told[use] for use in group), told[first])
                common = np.flatnonzero(np.isfinite(paid))
                if len(common):
                    one = (self.prices[:, common] + paid[common]).min(1)
                    best = np.minimum(best, one + self._divided(uses - {first} - group, told, together))
            together[uses] = best
        return together[uses]

    def taken(self, kept: Sequence[Integers]) -> Seconds:
        rows = self.prices if self.lone else self.prices[kept[0]]
        layouts = [one[few] for one, few in zip(self.wanted, kept if self.lone else kept[1:], strict=True)]
        found = np.zeros((len(rows), *map(len, layouts)))
        for use, one in enumerate(layouts):
            pays = _placed(rows[:, one], (0, use + 1), found.ndim)
            for before in range(use):
                apart = layouts[before][:, None] != one
                pays = pays * _placed(apart, (before + 1, use + 1), found.ndim)
            found += pays
        return np.asarray(found[0] if self.lone else found)


def _placed(table: Seconds, places: tuple[int, int], dims: int) -> Seconds:
    """A table with its two dims at `places` among others of size 1."""
    shape = [1] * dims
    for place, size in zip(places, table.shape, strict=True):
        shape[place] = size
    return np.asarray(table.reshape(shape))


def _subsets(uses: Uses) -> list[Uses]:
    found = [Uses()]
    for use in sorted(uses):
        found += [one | {use} for one in found]
    return found
