"""Variables with a few options each, and tables of seconds over some of them: what elimination minimises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from strategies.search.transfers import Seconds

Part = tuple[tuple[int, ...], Seconds]
"""Seconds over some of a table's array dims."""


@dataclass(eq=False)
class Cell:
    """Seconds that can be made again when more prices are settled. Where they are the least of several parts, `split`
    makes these."""

    make: Callable[[], Seconds]
    split: Callable[[], tuple[Part, ...]] | None = None
    seconds: Seconds = field(init=False)

    def __post_init__(self) -> None:
        self.seconds = self.make()

    def refresh(self) -> None:
        self.seconds = self.make()


@dataclass(frozen=True, eq=False)
class Table:
    """Seconds over `variables`, one array dim each. Equal parts of a program share `cell`."""

    variables: tuple[int, ...]
    cell: Cell

    @property
    def seconds(self) -> Seconds:
        return self.cell.seconds

    def parts(self) -> tuple[Table, ...]:
        """Tables of which this one is the least; itself where it has no parts."""
        if self.cell.split is None:
            return (self,)
        return tuple(table(tuple(self.variables[i] for i in dims), seconds) for dims, seconds in self.cell.split())


def table(variables: tuple[int, ...], seconds: Seconds) -> Table:
    """A table that stays as it is."""
    return Table(variables, Cell(lambda: seconds))


@dataclass(eq=False)
class Network:
    """`sizes` are the options of every variable; a table's variables are in increasing order."""

    sizes: list[int] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)

    def add(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def cost(self, picks: Sequence[int]) -> float:
        """Seconds of a solution."""
        return float(sum(one.seconds[tuple(picks[v] for v in one.variables)] for one in self.tables))
