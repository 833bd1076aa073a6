"""What the uses of a value cost: each alone, or together where they want the same.

Invariant: what several uses pay adds up to what the engine sends, where each target that any of them has is paid once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from strategies.core.graph import TensorSpec
from strategies.search.agreeing import Agreeing
from strategies.search.cells import Cell, Part
from strategies.search.options import Side
from strategies.search.transfers import Integers, Prices, Rows, Seconds


@dataclass(eq=False)
class Pair:
    """What one use of a value costs: `seconds` [layouts of the value, targets]; `of_option` [options of the user] is
    the target of each. A target is how the value comes (`come`: a row of `wanted`) and how its gradient goes."""

    transfers: Prices
    spec: TensorSpec
    given: Rows
    wanted: Rows
    returned: Rows | None
    come: Integers
    go: Integers
    of_option: Integers

    def __post_init__(self) -> None:
        self.whole = self.transfers.whole(self.given)
        told = [row.tobytes() for row in self.wanted.dims[self.come]]
        back = [b""] * len(told) if self.returned is None else [row.tobytes() for row in self.returned.partial[self.go]]
        self.targets = tuple(zip(told, back, strict=True))
        self.changes = 0
        self._look()

    def refresh(self) -> bool:
        """Looks prices up again where some were settled; whether there were any."""
        changes = self.transfers.changes(self.given, self.wanted, self.spec)
        if self.returned is not None:
            changes += self.transfers.changes(self.returned, self.whole, self.spec)
        if changes == self.changes:
            return False
        self.changes = changes
        self._look()
        return True

    def _look(self) -> None:
        self.seconds = self.transfers.seconds(self.given, self.wanted, self.spec)[:, self.come]
        if self.returned is not None:
            self.seconds = self.seconds + self.transfers.seconds(self.returned, self.whole, self.spec)[self.go].T

    def settle(self, row: int, target: int) -> None:
        """Prices one entry."""
        self.transfers.settle(self.given, self.wanted, self.spec, row, int(self.come[target]))
        if self.returned is not None:
            self.transfers.settle(self.returned, self.whole, self.spec, int(self.go[target]), row)


@dataclass(frozen=True, eq=False)
class Sharing:
    """A value that uses may share: `first` [options of the producer, shared layouts] is what the shared one costs (0 is
    none), `uses` [options of the producer, shared layouts, options of the user] what is left for each use."""

    first: Cell
    uses: tuple[Cell, ...]


def cell_of_use(given: Side, pair: Pair, uses: int) -> Cell:
    """What one of several uses pays [options of the producer, options of the user]."""
    return Cell(lambda: pair.seconds[np.ix_(given.of_option, pair.of_option)] / uses)


def agreeing(given: Side, pairs: Sequence[Pair], share: int, produced: bool) -> Agreeing:
    """What uses pay together, each one of `share` parts; `produced` by an operator, with options of its own."""
    every = list(dict.fromkeys(target for pair in pairs for target in pair.targets))
    places = {target: place for place, target in enumerate(every)}
    columns = [np.array([places[target] for target in pair.targets]) for pair in pairs]

    def prices() -> Seconds:
        found = np.zeros((len(given.rows), len(every)))
        for pair, column in zip(pairs, columns, strict=True):
            found[:, column] = pair.seconds / share
        return found

    wanted = [column[pair.of_option] for pair, column in zip(pairs, columns, strict=True)]
    return Agreeing(prices, given.of_option if produced else None, wanted)


def sharing_of(given: Side, pairs: Sequence[Pair]) -> Sharing | None:
    """What uses may share; None where no two uses have a target in common."""
    often: dict[tuple[bytes, bytes], list[Pair]] = {}
    for pair in pairs:
        for target in pair.targets:
            often.setdefault(target, []).append(pair)
    shared = [target for target, found in often.items() if len(found) > 1]
    if not shared:
        return None

    def first() -> Seconds:
        costs = [often[target][0].seconds[:, often[target][0].targets.index(target)] for target in shared]
        return np.asarray(np.stack([np.zeros(len(given.rows)), *costs], 1)[given.of_option])

    def left(pair: Pair) -> Seconds:
        found = np.repeat(pair.seconds[given.of_option][:, None, pair.of_option], len(shared) + 1, axis=1)
        for number, target in enumerate(shared):
            if target in pair.targets:
                found[:, number + 1, pair.of_option == pair.targets.index(target)] = 0.0
        return found

    def parts(pair: Pair) -> tuple[Part, ...]:
        """A use pays for itself, or nothing where what it wants is shared."""
        wanted = [pair.targets.index(target) if target in pair.targets else -1 for target in shared]
        free = np.array([-2, *wanted])[:, None] == pair.of_option
        own = pair.seconds[np.ix_(given.of_option, pair.of_option)]
        return ((0, 2), own), ((1, 2), np.where(free, 0.0, np.inf))

    def cell(pair: Pair) -> Cell:
        return Cell(lambda: left(pair), lambda: parts(pair))

    return Sharing(Cell(first), tuple(cell(pair) for pair in pairs))
