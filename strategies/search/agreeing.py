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


class _Side:
    """Which of so many layouts every option has."""

    def __init__(self, of_option: Integers, layouts: int) -> None:
        self.of_option, self.layouts = of_option, layouts
        self.order = np.argsort(of_option, kind="stable")
        self.names, self.starts = np.unique(of_option[self.order], return_index=True)

    def least(self, seconds: Seconds) -> Seconds:
        """The least of the options for every layout; infinite where there are none."""
        found = np.full(self.layouts, np.inf)
        found[self.names] = np.minimum.reduceat(seconds[self.order], self.starts)
        return found


class Agreeing(Cell):
    """Seconds over the options of a producer and of its users. `price` makes what each layout costs [layouts of the
    value, layouts that some use wants]; `given` [options of the producer] and `wanted` [options of the user], one per
    use, tell which these are. `given` is None where nothing produces the value: users are the only variables."""

    def __init__(self, price: Callable[[], Seconds], given: Integers | None, wanted: Sequence[Integers]) -> None:
        super().__init__(lambda: self.taken(self.every))
        self.price, self.prices = price, price()
        self.given = None if given is None else _Side(given, len(self.prices))
        self.wanted = [_Side(one, self.prices.shape[1]) for one in wanted]

    @property
    def every(self) -> list[Integers]:
        """All options of every variable."""
        sides = [*([] if self.given is None else [self.given]), *self.wanted]
        return [np.arange(len(one.of_option)) for one in sides]

    def refresh(self) -> None:
        super().refresh()
        self.prices = self.price()

    def left(self, moved: Sequence[Seconds], place: int | None = None) -> Seconds:
        uses = moved if self.given is None else moved[1:]
        told = [one.least(-seconds) for one, seconds in zip(self.wanted, uses, strict=True)]
        every, together = frozenset(range(len(uses))), dict[Uses, Seconds]()
        if self.given is not None and place == 0:
            return np.asarray(self._divided(every, told, together)[self.given.of_option])
        before = np.zeros(1) if self.given is None else self.given.least(-moved[0])
        if place is None:
            return np.asarray((self._divided(every, told, together) + before).min())
        own = place if self.given is None else place - 1
        best = np.full(self.prices.shape[1], np.inf)
        for group in _subsets(every - {own}):
            rest = self._divided(every - {own} - group, told, together) + before
            paid = (self.prices + rest[:, None]).min(0)
            best = np.minimum(best, sum((told[use] for use in group), paid))
        return np.asarray(best[self.wanted[own].of_option])

    def _divided(self, uses: Uses, told: Sequence[Seconds], together: dict[Uses, Seconds]) -> Seconds:
        """[layouts of the value]: the least that these uses pay, divided as is best."""
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
        rows = self.prices if self.given is None else self.prices[self.given.of_option[kept[0]]]
        users = kept if self.given is None else kept[1:]
        layouts = [one.of_option[few] for one, few in zip(self.wanted, users, strict=True)]
        found = np.zeros((len(rows), *map(len, layouts)))
        for use, one in enumerate(layouts):
            pays = _placed(rows[:, one], (0, use + 1), found.ndim)
            for before in range(use):
                apart = layouts[before][:, None] != one
                pays = pays * _placed(apart, (before + 1, use + 1), found.ndim)
            found += pays
        return np.asarray(found[0] if self.given is None else found)


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
