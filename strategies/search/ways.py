"""The least seconds of any chain of collectives between classes of layouts, as shortest ways in a small graph.

A state says how many axes of each level slice every dim, and over how many the tensor is partial. Every step that the
engine may take leads from a state to a state, at its own price, which depends on these numbers alone (`steps`); an
exchange ends a chain and is priced below what it sends. Of very many states ways are found as far as they are asked
for, and all others are told to be that far. Invariant: a chain of the engine is a way in this graph, so its seconds are
not below the shortest one's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby

import numpy as np

from strategies.core.mesh import Mesh
from strategies.core.steps import EXCHANGE
from strategies.cost.cluster import Cluster
from strategies.cost.collectives import collective_seconds
from strategies.search.bounds import Integers, Seconds
from strategies.search.steps import Steps

Levels = tuple[tuple[str, ...], ...]
"""The axes that are alike, outermost first: in each level the next ones of the mesh."""
FEW = 3000
"""States up to which all ways from a state are found at once."""
FAR = 4.0
"""How much farther than what is asked for ways are found."""
FURTHEST = 1e4
"""Seconds that no chain takes."""
NEAREST = 512
"""Of many states, those from which exchanges are told apart; of others only where axes of the outermost level are."""
AT_ONCE = 2**21
"""Exchanges, or steps, that are looked at together."""


def levels_of(mesh: Mesh, cluster: Cluster) -> Levels:
    """Neighbouring axes of one size that cross the same levels of the cluster, outermost first."""
    axes = [(axis, size, cluster.spread(mesh, (axis,))) for axis, size in mesh.axes if size > 1]
    return tuple(tuple(axis for axis, *_ in same) for _, same in groupby(axes, key=lambda one: one[1:]))


class Ways:
    """The states of tensors with so many dims. `levels` are axes that are alike, outermost first."""

    def __init__(self, mesh: Mesh, cluster: Cluster, levels: Sequence[Sequence[str]], dims: int) -> None:
        self.mesh, self.cluster, self.levels, self.dims = mesh, cluster, levels, dims
        self.steps = Steps(mesh, cluster, levels, dims)
        self.states = self.steps.states
        """[states, dims and last what is partial, levels]: axes."""
        self.share = self.steps.share
        self.total = np.flatnonzero(self.states[:, -1].sum(1) == 0)
        """The states that are not partial."""
        self.found: dict[tuple[float, int], tuple[float, Seconds]] = {}
        self.effort = 0.0
        """Steps and exchanges that were looked at."""
        self.groups: dict[bytes, int] = {}
        self.members: list[Integers] = []

    def places(self, dims: Integers, partial: Integers, known: Integers) -> Integers:
        """The states with `dims` [classes, dims, levels] and `partial` [classes, levels]; of classes of which only so
        many levels are `known`, the place where `seconds` has the least of all their states."""
        counts = np.concatenate([dims, partial[:, None]], 1)
        found = np.full(len(counts), -1, dtype=np.int64)
        whole = known == len(self.levels)
        found[whole] = self.steps.numbers(counts[whole])
        for at in np.flatnonzero(~whole).tolist():
            depth = int(known[at])
            name = counts[at, :, :depth].tobytes()
            if name not in self.groups:
                agree = (self.states[:, :, :depth] == counts[at, :, :depth]).all((1, 2))
                self.groups[name] = len(self.members)
                self.members.append(np.flatnonzero(agree))
            found[at] = -1 - self.groups[name]
        return found

    def least(self, found: Seconds, places: Integers) -> Seconds:
        """What was `found` per state, at `places`."""
        told = np.empty(len(places))
        one = places >= 0
        told[one] = found[places[one]]
        names, inverse = np.unique(places[~one], return_inverse=True)
        groups = np.array([found[self.members[-1 - name]].min() for name in names.tolist()])
        told[~one] = groups[inverse] if len(names) else 0.0
        return told

    def seconds(self, start: int, size: float, upto: float = math.inf) -> Seconds:
        """[states]: the least seconds from a state to all others for a tensor of `size` bytes; infinite where no chain
        leads. Of many states only what is nearer than `upto` is found, and others are told to be as far as that."""
        upto = math.inf if len(self.states) <= FEW else upto
        known, found = self.found.get((size, start), (-1.0, None))
        if found is None or known < upto:
            found = self._shortest(start, size, upto)
            self.found[size, start] = upto, found
        return found

    def until(self, start: int, size: float, place: int, near: float) -> tuple[Seconds, float]:
        """`seconds` from a state, as far as to the state or the least of the group at `place`, which is no nearer than
        `near`; and how far that is."""
        upto = FAR * max(near, self.cluster.launch)
        while True:
            upto = math.inf if len(self.states) <= FEW or upto > FURTHEST else upto
            found = self.seconds(start, size, upto)
            if math.isinf(upto) or self.least(found, np.array([place]))[0] < upto:
                return found, upto
            upto *= FAR

    def _shortest(self, start: int, size: float, upto: float) -> Seconds:
        found = np.full(len(self.states), upto)
        found[start] = 0.0
        todo = np.array([start])
        many = max(AT_ONCE // len(self.steps), 1)
        while len(todo):
            self.effort += len(todo) * len(self.steps)
            reached = []
            for place in range(0, len(todo), many):
                ends, seconds = self.steps.taken(todo[place : place + many], found, size)
                better = seconds < found[ends]
                ends, seconds = ends[better], seconds[better]
                np.minimum.at(found, ends, seconds)
                reached.append(ends)
            todo = np.unique(np.concatenate(reached))
        self._exchanged(found, size, upto)
        return found

    def _exchanged(self, found: Seconds, size: float, upto: float) -> None:
        """Lowers what was found to ways that end with an exchange."""
        last = found[self.total]
        copy = 2 * self.share[self.total] * size / self.cluster.memory_bandwidth
        before, after = last + copy, copy + self.cluster.launch
        slope, fixed = (table.ravel() for table in self._direct)
        best = np.full(len(last), np.inf)
        furthest = min(last.max(initial=0.0), upto) - fixed.min(initial=np.inf)  # from there on one gains nothing
        near = np.argsort(before)
        near = near[: np.searchsorted(before[near], furthest)]
        many = max(AT_ONCE // len(last), 1)
        self.effort += len(near) * len(last)
        exact = near if len(self.states) <= FEW or len(self.levels) < 2 else near[:NEAREST]
        for place in range(0, len(exact), many):
            starts = exact[place : place + many]
            moved = self._moved[0][self._parts[0][starts]][:, self._parts[0]]
            for differ, parts in zip(self._moved[1:], self._parts[1:], strict=True):
                moved = moved + differ[parts[starts]][:, parts]
            seconds = self._missing(self._bits[starts]) * size * slope[moved] + fixed[moved]
            np.minimum(best, (seconds + before[starts, None]).min(0), out=best)
        rest = near[len(exact) :]
        if len(rest):  # by where the axes of the outermost level are, as if no others sliced
            first = np.full(len(self.steps.parts[0]), np.inf)
            np.minimum.at(first, self._parts[0][rest], before[rest])
            outer = np.flatnonzero(np.isfinite(first))
            moved = self._moved[0][outer][:, self._parts[0]]
            seconds = self._missing(self._outer[outer]) * size * slope[moved] + fixed[moved]
            np.minimum(best, (seconds + first[outer, None]).min(0), out=best)
        found[self.total] = np.minimum(last, best + after)

    def _missing(self, sliced: Integers | Seconds) -> Seconds:
        """[starts, states that are not partial]: the share of the tensor that a rank sends in an exchange at least:
        what it wants and has not; `sliced` [starts, dims] as in `_bits`."""
        kept = np.zeros((len(sliced), len(self.total)), dtype=self._bits.dtype)
        for have, want in zip(sliced.T, self._bits.T, strict=True):
            kept += np.maximum(have[:, None], want)
        if kept.dtype == np.int8:
            cut = (float(self.steps.sizes[0]) ** -np.arange(128.0))[kept]
        else:
            cut = 2.0**-kept
        return np.asarray(np.maximum(self.share[self.total] - cut, 0.0))

    @cached_property
    def _parts(self) -> Integers:
        """[levels, states that are not partial]: the number of each level's part."""
        return self.steps.grid[:, self.total]

    @cached_property
    def _moved(self) -> list[Integers]:
        """Per level, [parts, parts]: how many axes an exchange at least moves, times the step of that level in
        `_direct`."""
        found, step = [], 1
        for length, parts in reversed(list(zip(self.steps.lengths, self.steps.parts, strict=True))):
            differ = abs(parts[:, None, :-1] - parts[None, :, :-1]).max(2, initial=0)
            found.append((differ * step).astype(np.int16))
            step *= length + 1
        return found[::-1]

    @cached_property
    def _bits(self) -> Integers | Seconds:
        """[states that are not partial, dims]: how many axes slice a dim where all have one size; else the logarithm of
        the slices."""
        return self._cut(self.states[self.total, :-1], self.steps.sizes)

    @cached_property
    def _outer(self) -> Integers | Seconds:
        """[parts of the outermost level, dims]: the same, of its axes alone."""
        return self._cut(self.steps.parts[0][:, :-1, None], self.steps.sizes[:1])

    def _cut(self, counts: Integers, sizes: Sequence[int]) -> Integers | Seconds:
        if len(set(self.steps.sizes)) == 1:
            return np.asarray(counts.sum(2).astype(np.int8))
        return np.asarray(counts @ np.log2(sizes))

    @cached_property
    def _direct(self) -> tuple[Seconds, Seconds]:
        """By the axes that an exchange at least moves: the least seconds per byte, and whatever it carries."""
        shape = [len(level) + 1 for level in self.levels]
        slope, fixed = np.zeros(shape), np.zeros(shape)
        for moved in np.ndindex(*shape):
            if any(moved):
                axes = tuple(a for level, count in zip(self.levels, moved, strict=True) for a in level[:count])
                fixed[moved] = collective_seconds(EXCHANGE, 0.0, axes, self.mesh, self.cluster)
                slope[moved] = collective_seconds(EXCHANGE, 1.0, axes, self.mesh, self.cluster) - fixed[moved]
        for axis in range(len(shape)):  # more axes than those may be moved, but one at least
            for table in (slope, fixed):
                table[(0,) * len(shape)] = np.inf
                np.minimum.accumulate(np.flip(table, axis), axis, out=np.flip(table, axis))
        return slope, fixed
