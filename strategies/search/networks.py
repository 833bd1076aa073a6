"""The networks of groups of classes, one after the other, as groups are looked into.

Each is folded and eliminated; from the first that is too wide for that, they are narrowed, and each begins with the
messages of the one before it. What is worth a closer look is then found in networks with few of the repeated layers.
"""

from __future__ import annotations

from collections.abc import Sequence

from strategies.core.gc_paused import gc_paused
from strategies.core.graph import Ref
from strategies.search.cells import Network
from strategies.search.elimination import TooWide
from strategies.search.folding import Folded
from strategies.search.groups import Grouped, Groups
from strategies.search.narrowing import Narrowed
from strategies.search.network import Building
from strategies.search.problem import Problem
from strategies.search.shortened import Shortened
from strategies.search.transfers import Integers

MOST = 2e9
"""Entries of tables, steps and exchanges that are looked at, until what is known by then is enough."""
TABLE = 3e4
"""Entries that take as long as it does to solve a network once more, by its tables."""
AGAIN = 8
"""Solutions of the best options of one network between two looks at all of its options."""


class Networks:
    """Of one problem, where a byte of memory costs `pressure` seconds; after `most` of what `MOST` counts they are
    `tired`."""

    def __init__(self, problem: Problem, groups: Groups, pressure: float, most: float = MOST) -> None:
        self.problem, self.groups, self.pressure, self.most = problem, groups, pressure, most
        self.grouped: list[Grouped] = []
        self.split: frozenset[Ref] = frozenset()
        self.solver: Folded | Narrowed | None = None
        self.last: Narrowed | None = None
        self.solved = 0.0
        """Tables of all networks that were solved."""

    def build(self, split: frozenset[Ref]) -> None:
        """The network of the groups as they are now; the uses of `split` values pay together."""
        parents = self._build(split)
        network = self.building.network
        if isinstance(self.solver, Narrowed):
            self.solver = self._narrow(network, self.solver, parents)
        else:
            self.solver = self._narrowed() if split else Folded(network)

    def _build(self, split: frozenset[Ref]) -> list[Integers]:
        """Makes the building; of which group of the one before every group of each operator is a part."""
        self.split = split
        with gc_paused():
            self.building = Building(self.problem, self.groups, split, wide=bool(split))
        self.building.press(self.pressure)
        before, self.grouped = self.grouped, list(map(self.groups.group, self.problem.graph.operators))
        return [one.parents(last) for one, last in zip(self.grouped, before, strict=False)]

    def solve(self) -> tuple[list[int], float]:
        """The option of every variable in the best solution found, and what any solution costs at least."""
        assert self.solver is not None
        self.solved += len(self.building.network.tables)
        try:
            return self.solver.solve()
        except TooWide:
            self.solver = self._narrowed()
            return self.solver.solve()

    @property
    def tired(self) -> bool:
        """Whether enough was looked at."""
        ways = self.groups.alike.ways.values()
        sent = 0.0 if self.last is None else self.last.messages.effort
        return sent + TABLE * self.solved + sum(one.effort for one in ways) > self.most

    def look(self, picks: Sequence[int]) -> bool:
        """Looks into what a solution picks; whether anything is new."""
        return self.groups.look({id: picks[variable] for id, variable in self.building.variables.items()})

    def _narrow(self, network: Network, before: Narrowed | None = None, parents: Sequence[Integers] = ()) -> Narrowed:
        found = Narrowed(network, before, parents)
        self.last = found
        return found

    def _narrowed(self) -> Narrowed:
        """The network after a look into all that a short one picks."""
        short = Shortened(self.building.network)
        solver = self._narrow(short.network)
        since = 0  # solutions since the messages were sent
        while True:
            self.solved += len(short.network.tables)
            picks = short.expanded((solver.again() if since else solver.solve())[0])
            raised = self.building.settle(picks)
            if self.tired:
                break
            if raised and since < AGAIN:
                since += 1
            elif self.look(picks):
                parents = self._build(self.split)
                short = Shortened(self.building.network)
                solver = self._narrow(short.network, solver, [parents[v] for v in short.stays])
                since = 0
            elif raised or since:
                since = 0
            else:
                break
        found = self._narrow(self.building.network)
        found.messages.spread(solver.messages, short.home)
        return found
