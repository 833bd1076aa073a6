"""Variables with a few options each, and tables of seconds over some of them: what elimination minimises."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from strategies.search.transfers import Integers, Seconds

Part = tuple[tuple[int, ...], Seconds]
"""Seconds over some of a table's array dims."""


@dataclass(eq=False)
class Cell:
    """Seconds that can be made again when more prices are settled. Where they are the least of several parts, `split`
    makes these."""

    make: Callable[[], Seconds]
    split: Callable[[], tuple[Part, ...]] | None = None
    made: Seconds | None = field(default=None, init=False)
    divided: tuple[Part, ...] | None = field(default=None, init=False)

    @property
    def seconds(self) -> Seconds:
        """All of them, made when they are first asked for."""
        if self.made is None:
            self.made = self.make()
        return self.made

    @property
    def parts(self) -> tuple[Part, ...]:
        """What `split` makes, once it is asked for; all in one where there is nothing to split."""
        if self.split is None:
            return ((tuple(range(self.seconds.ndim)), self.seconds),)
        if self.divided is None:
            self.divided = self.split()
        return self.divided

    def refresh(self) -> None:
        self.made = self.divided = None

    def left(self, moved: Sequence[Seconds], place: int | None = None) -> Seconds:
        """The least over all options when `moved` of every variable is taken off; for each option of the variable at
        `place`, of which nothing is taken off."""
        found, dims = self.seconds, self.seconds.ndim
        for at, seconds in enumerate(moved):
            if at != place:
                found = found - seconds.reshape([-1 if i == at else 1 for i in range(dims)])
        return np.asarray(found.min(tuple(at for at in range(dims) if at != place)))

    def taken(self, kept: Sequence[Integers]) -> Seconds:
        """The seconds of some options of every variable."""
        return np.asarray(self.seconds[np.ix_(*kept)])


class Table(NamedTuple):
    """Seconds over `variables`, one array dim each. Equal parts of a program share `cell`."""

    variables: tuple[int, ...]
    cell: Cell

    @property
    def seconds(self) -> Seconds:
        return self.cell.seconds


def table(variables: tuple[int, ...], seconds: Seconds) -> Table:
    """A table that stays as it is."""
    return Table(variables, Cell(lambda: seconds))


Name = tuple[tuple[int, tuple[int, ...], int], ...]
"""Of a sum, for all arrays: how many parts their table has, where their dims are, and which they are."""


class Known:
    """The least sums of a solution and the one before, by what was added up. They hold these arrays, whose names are
    their places in memory."""

    def __init__(self) -> None:
        self.before: dict[Name, tuple[Sequence[Sequence[Part]], Seconds]] = {}
        self.now: dict[Name, tuple[Sequence[Sequence[Part]], Seconds]] = {}

    @contextmanager
    def solving(self) -> Iterator[None]:
        """Forgets what this solution has no use for."""
        self.before, self.now = self.now, {}
        yield
        self.before = {}

    def least(self, name: Name, parts: Sequence[Sequence[Part]], make: Callable[[], Seconds]) -> Seconds:
        """The least sum with a name; made where it is not known."""
        if name not in self.now:
            self.now[name] = self.before[name] if name in self.before else (parts, make())
        return self.now[name][1]


@dataclass(eq=False)
class Network:
    """`sizes` are the options of every variable; a table's variables are in increasing order. What is `known` of one
    network is of use to others with the same cells."""

    sizes: list[int] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    known: Known = field(default_factory=Known)

    def add(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def cost(self, picks: Sequence[int]) -> float:
        """Seconds of a solution."""
        return float(sum(one.seconds[tuple(picks[v] for v in one.variables)] for one in self.tables))
