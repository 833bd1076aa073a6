"""A lower bound for a network of tables of any width, and what every option costs beyond it at least.

Seconds are moved between tables and variables: what is taken out of a table over several variables is added to one of
them, so all sums stay the same, and the least of every part, added up, is a bound. A sweep goes through the variables
in order: each takes what the tables towards the variables before it have left, and hands what it has in equal parts to
those towards the variables behind it. Source: V. Kolmogorov, "A new look at reweighted message passing" (2015).
Invariant: the bound never falls, and a solution with an option costs at least the bound plus the option's slack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from strategies.search.cells import Cell, Network, Table
from strategies.search.transfers import Integers, Seconds

SWEEPS = 4
"""Between two looks at the bound."""
MOST_SWEEPS = 60
"""After which the bound is taken as it is."""
RISING = 1e-5
"""Of the bound: what sweeps gain at least, if more are made."""
MOST = 1e3
"""Seconds that a variable is given at most: those of an option that is impossible are infinite."""


@dataclass(eq=False)
class Factor:
    """A table over several variables; `moved` is what every variable was given of it."""

    variables: tuple[int, ...]
    cell: Cell
    moved: list[Seconds]


class Messages:
    """The messages of one network. What was moved stays where it is when prices rise."""

    def __init__(self, network: Network) -> None:
        self.sizes = network.sizes
        self.alone: list[list[Table]] = [[] for _ in self.sizes]
        """The tables over one variable."""
        self.own = [np.zeros(size) for size in self.sizes]
        """What these add up to."""
        self.around: list[list[tuple[Factor, int]]] = [[] for _ in self.sizes]
        """The factors of every variable, and its place in each."""
        self.factors: list[Factor] = []
        self.slack: list[Seconds] = [np.zeros(size) for size in self.sizes]
        """What a solution with an option costs above the last bound, at least."""
        self.effort = 0.0
        """Entries of tables that were looked at."""
        for one in network.tables:
            if len(one.variables) == 1:
                self.alone[one.variables[0]].append(one)
                continue
            factor = Factor(one.variables, one.cell, [np.zeros(self.sizes[v]) for v in one.variables])
            self.factors.append(factor)
            for place, v in enumerate(one.variables):
                self.around[v].append((factor, place))

    @cached_property
    def entries(self) -> float:
        """Of all factors."""
        return float(sum(math.prod(self.sizes[v] for v in one.variables) for one in self.factors))

    def follow(self, before: Messages, parents: Sequence[Integers]) -> None:
        """Begins with what was moved in a network over the same variables, of which option `parents` [options] of every
        variable was the one that each of these options is a part of."""
        self.effort = before.effort
        known: dict[tuple[int, ...], list[Factor]] = {}
        for factor in before.factors:
            known.setdefault(factor.variables, []).append(factor)
        for factor in self.factors:
            if known.get(factor.variables):
                told = known[factor.variables].pop(0).moved
                factor.moved = [one[parents[v]] for one, v in zip(told, factor.variables, strict=True)]

    def spread(self, before: Messages, home: Sequence[int]) -> None:
        """Begins with what was moved in a shorter network, of which `home` tells the variable that each looks like."""
        self.effort = before.effort
        known: dict[int, list[Factor]] = {}
        for factor in before.factors:
            known.setdefault(max(factor.variables), []).append(factor)
        place: dict[int, int] = {}
        for factor in self.factors:
            v = max(factor.variables)
            factor.moved = known[home[v]][place.get(v, 0)].moved.copy()
            place[v] = place.get(v, 0) + 1

    def bound(self) -> float:
        """The least that any solution costs, after sweeps until they gain nothing; sets `slack`."""
        self.own = [
            sum((one.seconds for one in tables), np.zeros(size))
            for tables, size in zip(self.alone, self.sizes, strict=True)
        ]
        found = self._sum()
        for _ in range(MOST_SWEEPS // SWEEPS):
            for sweep in range(SWEEPS):
                self._sweep(sweep % 2 == 0)
            before, found = found, self._sum()
            if found - before <= RISING * abs(found):
                break
        self._sweep(True)
        return found

    def _sweep(self, forward: bool) -> None:
        self.effort += self.entries
        order = range(len(self.sizes))
        for v in order if forward else reversed(order):
            has, behind, before = self.own[v].copy(), [], 0
            for factor, place in self.around[v]:
                last = len(factor.variables) - 1
                if place != (0 if forward else last):
                    factor.moved[place] = np.minimum(factor.cell.left(factor.moved, place), MOST)
                    before += 1
                if place != (last if forward else 0):
                    behind.append((factor, place))
                has += factor.moved[place]
            has -= has.min()
            self.slack[v] = has
            share = has / max(before, len(behind), 1)
            for factor, place in behind:
                factor.moved[place] = factor.moved[place] - share

    def _sum(self) -> float:
        """The bound at the moment."""
        found = sum(float(one.cell.left(one.moved)) for one in self.factors)
        for own, around in zip(self.own, self.around, strict=True):
            found += float(sum((factor.moved[place] for factor, place in around), own).min())
        return found
