"""A network with few of its repeated layers: what is worth a closer look in it is so in all of them.

Of every run of alike blocks (see `folding`) the first ones and the last stay; a block that is left out looks like the
one before the last. A solution of the short network is one of the whole, layer by layer. Its seconds bound nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from strategies.search.cells import Network, Table
from strategies.search.folding import Folded

BLOCKS = 4
"""Of a run that stay."""


class Shortened:
    """`network` is the short one, of the variables that `stays` lists; `home` tells which there every variable of the
    `whole` one looks like."""

    def __init__(self, whole: Network) -> None:
        folded = Folded(whole)
        home, touched = (list(range(len(whole.sizes))) for _ in range(2))  # the latter: by what stands behind a run
        for run in folded.runs:
            last = run.start + (run.count - 1) * run.period
            for v in range(run.start + (BLOCKS - 1) * run.period, last + run.period):
                block = BLOCKS - 1 if v >= last else BLOCKS - 2
                home[v] = run.start + block * run.period + (v - run.start) % run.period
                touched[v] = home[v] if v >= last else v
        self.stays = sorted(set(home))
        number = {v: place for place, v in enumerate(self.stays)}
        self.home = [number[v] for v in home]
        self.network = Network([whole.sizes[v] for v in self.stays])
        for v in self.stays:
            for one in folded.attached[v]:
                self.network.tables.append(Table(tuple(number[touched[w]] for w in one.variables), one.cell))

    def expanded(self, picks: Sequence[int]) -> list[int]:
        """A solution of the whole network that is like this one in every layer."""
        return [picks[home] for home in self.home]
