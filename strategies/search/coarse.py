"""Search on meshes of many axes, from coarse to fine.

Axes of one level and size are alike. First every operator chooses among groups of classes: how many axes of the slowest
level slice each of its loops. What a solution picks is looked into: groups become classes (how many axes of every
level), and the ways from the classes that are used are priced. Each solution of that network is a lower bound, because
its tables hold the least of all members. Where nothing is left to look into, the layouts of the classes that were
picked are searched exactly, which gives a plan; where it costs more than the bound, the pairs of classes that it uses
are priced layout by layout, and the search goes on.
Source of the idea: C. Raphael, "Coarse-to-fine dynamic programming" (2001).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np

from strategies.core.graph import Ref
from strategies.search.alike import Alike
from strategies.search.finding import Finding, Found
from strategies.search.frontier import Frontier
from strategies.search.groups import Classes, Groups, Within
from strategies.search.halved import halved
from strategies.search.network import Building
from strategies.search.networks import Networks
from strategies.search.problem import Problem
from strategies.search.transfers import Integers, Transfers
from strategies.search.uses import Pair
from strategies.search.ways import levels_of

PRICES = 8
"""Of memory that are tried."""
MOST_SOLUTIONS = 40
"""Of the network of a few layouts, until its best one is taken."""
PRECISE = 1e-3
"""Of a plan of a few layouts: how much more than their best one it costs at most."""
EXACT = 1e-9
"""Of the bound: a plan that costs so much more is the best one."""
BOUNDING, MOST_BOUNDS = 3e8, 32
"""Of a bound alone: what is looked at (see `networks.MOST`), and of how many networks; more hardly raise it."""
NEGLIGIBLE = 0.02
"""Of what a plan may cost more than the bound: what a pair of classes may be told too low."""


class Coarse:
    """The search on one problem; what was looked into and priced stays for the next price of memory."""

    def __init__(self, problem: Problem, transfers: Transfers, tolerance: float) -> None:
        self.problem, self.transfers, self.tolerance = problem, transfers, tolerance
        self.alike = Alike(transfers, levels_of(problem.mesh, transfers.cluster))
        self.groups = Groups(Classes(problem, transfers, self.alike))
        self.split: frozenset[Ref] = frozenset()
        """Values of which uses pay together."""

    def cheapest(self, pressure: float = 0.0) -> Found:
        """A plan that costs little where a byte costs `pressure` seconds; `lower_bound` includes that price."""
        best: Found | None = None
        least = lower = 0.0
        networks = Networks(self.problem, self.groups, pressure)
        while True:
            networks.build(self.split)
            while True:
                picks, bound = networks.solve()
                lower = max(lower, bound)
                if best is not None and least - lower <= self.tolerance * lower:
                    return replace(best, lower_bound=min(lower, least))
                building = networks.building
                raised = building.settle(picks)
                tired = networks.tired
                if not tired and networks.look(picks):
                    break
                if raised and not tired:
                    continue
                self.last = {id: picks[variable] for id, variable in building.variables.items()}
                if tired and self.groups.unknown(self.last):
                    found = halved(self.problem, self.transfers.cluster)
                else:
                    found = self._within(self.last, pressure, lower * (1 + self.tolerance))
                if best is None or found.cost + pressure * found.bytes < least:
                    best, least = found, found.cost + pressure * found.bytes
                price_pairs(building, self.alike, picks, NEGLIGIBLE * self.tolerance * lower)
                near = least - lower <= self.tolerance * lower
                enough = near or tired or pressure > 0  # a limit leaves a gap anyway
                split = frozenset() if enough else building.underpaid(picks)
                self.split |= split
                if split:
                    break
                if near or tired or not building.renew():
                    return replace(best, lower_bound=min(lower, least))

    def least(self, enough: float) -> float:
        """Seconds below those of any plan, also where parameters have several uses: the bound of one network after the
        other, until it is `enough` or more would hardly raise it."""
        lower, networks = 0.0, Networks(self.problem, self.groups, 0.0, BOUNDING)
        networks.build(frozenset())
        for _ in range(MOST_BOUNDS):
            picks, bound = networks.solve()
            lower = max(lower, bound)
            if lower >= enough or networks.tired:
                break
            raised = networks.building.settle(picks)
            if networks.look(picks):
                networks.build(frozenset())
            elif not raised:
                price_pairs(networks.building, self.alike, picks, NEGLIGIBLE * self.tolerance * lower)
                if not networks.building.renew():
                    break
        return lower

    @cached_property
    def free(self) -> Found:
        """The cheapest plan of all."""
        found = self.cheapest()
        self.widest = self._classes(self.last)
        if found.gap > EXACT:
            rounds = halved(replace(self.problem, memory=None), self.transfers.cluster)
            if rounds.cost < found.cost:
                found = replace(rounds, lower_bound=min(found.lower_bound, rounds.cost))
        return found

    def within(self, limit: float) -> Found:
        """A plan that keeps the limit: the best of the classes that are picked at two prices of memory, between which
        plans begin to keep it. Raises StrategyError where there is none."""
        free = self.free
        lower, low, high = free.lower_bound, 0.0, free.cost / limit
        over = under = self.widest
        price, fits = high, False
        for _ in range(PRICES):
            found = self.cheapest(price)
            lower = max(lower, found.lower_bound - price * limit)
            if found.bytes <= limit:
                under, high, fits = self._classes(self.last), price, True
            else:
                over, low = self._classes(self.last), price
            price = (low + high) / 2 if fits else price * 8
        chosen = {id: np.concatenate([over[id], under[id]]) for id in over}
        menu = Within(self.problem, self.transfers, self.alike, chosen)
        finding = Finding(self.problem, menu, max(self.tolerance, PRECISE))
        best = Frontier(finding, MOST_SOLUTIONS).within(limit)
        return replace(best, lower_bound=min(lower, best.cost))

    def _classes(self, picks: Mapping[str, int]) -> dict[str, Integers]:
        """Where the axes of the classes are that were picked, [1, axes] by operator."""
        found = {}
        for operator in self.problem.graph.operators:
            placed = self.groups.classes.placed[id(self.groups.every[operator.id])]
            found[operator.id] = placed[[self.groups.group(operator).heads[picks[operator.id]]]]
        return found

    def _within(self, picks: Mapping[str, int], pressure: float, enough: float) -> Found:
        """The best plan of the classes that were picked; operators that are like no other may slice a loop with all
        axes that are alike, too."""
        chosen, often = self._classes(picks), Counter(map(id, self.groups.every.values()))
        for id_, every in self.groups.every.items():
            if often[id(every)] == 1:
                placed = self.groups.classes.placed[id(every)]
                runs = [placed[:, level[:1]] == placed[:, level] for level in self.alike.places]
                chosen[id_] = np.concatenate([chosen[id_], placed[np.concatenate(runs, 1).all(1)]])
        menu = Within(self.problem, self.transfers, self.alike, chosen)
        finding = Finding(self.problem, menu, min(self.tolerance, PRECISE))
        return finding.cheapest(pressure, enough, MOST_SOLUTIONS)


def price_pairs(building: Building, alike: Alike, picks: list[int], least: float) -> None:
    """Prices the pairs of classes that a solution uses layout by layout. Pairs that together take less than `least`
    seconds stay as they are."""
    times: Counter[tuple[int, int, int]] = Counter()
    pairs: dict[int, Pair] = {}
    for _, producer, given, uses in building.used:
        row = 0 if producer is None else int(given.of_option[picks[producer]])
        for user, pair in uses:
            times[id(pair), row, int(pair.of_option[picks[user]])] += 1
            pairs[id(pair)] = pair
    for (name, row, target), count in times.items():
        pair = pairs[name]
        if pair.seconds[row, target] * count > least:
            alike.settle_all(pair.given, pair.wanted, pair.spec, row, int(pair.come[target]))
            if pair.returned is not None:
                alike.settle_all(pair.returned, pair.whole, pair.spec, int(pair.go[target]), row)


def shared(problem: Problem) -> bool:
    """Whether a parameter has several uses: its layout would be one for all of them."""
    users = problem.graph.users
    return any(len(users[Ref(source.id)]) > 1 for source in problem.graph.of_kind("parameter"))
