"""Exact minimisation over networks that are too wide to be eliminated: options that no optimum takes are left out.

Messages give a lower bound and what every option costs beyond it at least (its slack). The options of least slack are
eliminated exactly, as many as that is cheap with. Where the solution costs no more than the bound plus the least slack
that was left out, it is the optimum of all options; else the network is made wider. Source of the idea: reduced cost
fixing (G. Dantzig, R. Fulkerson, S. Johnson, 1954). Invariant: no solution costs less than the bound that is told.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence

import numpy as np

from strategies.search.cells import Network, Table, table
from strategies.search.elimination import eliminate
from strategies.search.messages import Messages
from strategies.search.transfers import Integers

EFFORTS = (2**20, 2**24, 2**27)
"""Entries of all tables that an elimination makes: it is tried with few, and with more where that proves nothing."""


class Narrowed:
    """One network, solved again when its prices rise. What was found `before` of options that were parts of the options
    `parents` is where it begins."""

    def __init__(self, network: Network, before: Narrowed | None = None, parents: Sequence[Integers] = ()) -> None:
        self.network = network
        self.messages = Messages(network)
        if before is not None:
            self.messages.follow(before.messages, parents)
        self.lower = -math.inf
        """What any solution costs at least, as far as it is known."""
        self.kept: list[Integers] = []

    def again(self) -> tuple[list[int], float]:
        """As `solve`, of the options that were kept then; the bound is still that one."""
        return self._best(self.kept)[0], self.lower

    def solve(self) -> tuple[list[int], float]:
        """The option of every variable in the best solution found, and what any solution costs at least."""
        lower = self.messages.bound()
        for effort in EFFORTS:
            self.kept, beyond = self._kept(effort)
            picks, seconds = self._best(self.kept)
            self.lower = max(lower, min(seconds, lower + beyond))
            if seconds <= self.lower:
                break
        return picks, self.lower

    def _kept(self, most: float) -> tuple[list[Integers], float]:
        """The options of least slack with which an elimination makes at most so many entries; and the least slack of
        the others."""
        slack = self.messages.slack
        levels = np.unique(np.concatenate(slack))
        low, high = 0, len(levels)
        while high - low > 1:
            middle = (low + high) // 2
            if self._effort([int((one <= levels[middle]).sum()) for one in slack], most) <= most:
                low = middle
            else:
                high = middle
        kept = [np.flatnonzero(one <= levels[low]) for one in slack]
        beyond = float(levels[low + 1]) if low + 1 < len(levels) else math.inf
        while self._effort(list(map(len, kept)), most) > most:  # too many that are equally good
            longest = max(map(len, kept))
            kept, beyond = [one[: (longest + 1) // 2] for one in kept], 0.0
        return kept, beyond

    def _effort(self, sizes: Sequence[int], most: float) -> float:
        scopes = {tuple(v for v in one.variables if sizes[v] > 1) for one in self.network.tables}
        return effort(dict(enumerate(sizes)), scopes, most)

    def _best(self, kept: Sequence[Integers]) -> tuple[list[int], float]:
        """The best solution of these options alone."""
        tables: dict[tuple[int, ...], Table] = {}
        for one in self.network.tables:
            part = one.cell.taken([kept[v] for v in one.variables])
            varied = tuple(v for v in one.variables if len(kept[v]) > 1)
            part = part.reshape([len(kept[v]) for v in varied])
            tables[varied] = table(varied, tables[varied].seconds + part if varied in tables else part)
        alone = tables.pop((), None)
        rest = eliminate({v: len(one) for v, one in enumerate(kept) if len(one) > 1}, tables.values(), largest=math.inf)
        picks = {v: 0 for v, one in enumerate(kept) if len(one) == 1}
        rest.complete(picks)
        seconds = float(rest.table.seconds) + (0.0 if alone is None else float(alone.seconds))
        return [int(one[picks[v]]) for v, one in enumerate(kept)], seconds


def effort(sizes: Mapping[int, int], scopes: set[tuple[int, ...]], most: float) -> float:
    """Entries of all tables that an elimination makes, of tables over `scopes`; it is not counted beyond `most`."""
    near: dict[int, set[int]] = {}
    for scope in scopes:
        for v in scope:
            near.setdefault(v, set()).update(scope)

    def entries(v: int) -> int:
        return math.prod(sizes[other] for other in near[v])

    heap = [(entries(v), v) for v in near]
    heapq.heapify(heap)
    total = 0.0
    while heap and total <= most:
        size, v = heapq.heappop(heap)
        if v not in near:
            continue
        now = entries(v)
        if now != size:
            heapq.heappush(heap, (now, v))
            continue
        total += size
        around = near.pop(v) - {v}
        for other in around:
            near[other] = (near[other] | around) - {v}
            heapq.heappush(heap, (entries(other), other))
    return total
