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

from strategies.chains import EXCHANGE
from strategies.cost.cluster import Cluster
from strategies.cost.collectives import collective_seconds
from strategies.mesh import Mesh
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
        last, ends = found[self.total], self.cluster.launch
        copy = 2 * self.share[self.total] * size / self.cluster.memory_bandwidth
        before = last + copy
        best = np.full(len(last), np.inf)
        order = np.argsort(before)
        many = max(AT_ONCE // len(last), 1)
        furthest = min(last.max(initial=0.0), upto)  # from there on an exchange gains nothing
        for place in range(0, len(order), many):
            near = order[place : place + many]
            near = near[before[near] < furthest]
            if not len(near):
                break
            slow, calls = self._exchanges(near)
            best = np.minimum(best, (slow * size + calls + before[near, None]).min(0))
        found[self.total] = np.minimum(last, best + copy + ends)

    def _exchanges(self, starts: Integers) -> tuple[Seconds, Seconds]:
        """From some of the states that are not partial to all of them: the least seconds of an exchange per byte of the
        tensor, of which a rank at least sends what it wants and has not; and the least of the calls."""
        have, bits = self._bits[starts], self._bits
        kept = np.zeros((len(starts), len(bits)))
        for dim in range(self.dims):
            kept += np.maximum(have[:, None, dim], bits[None, :, dim])
        share = np.maximum(2.0 ** -bits.sum(1) - 2.0**-kept, 0.0)
        every = self._whole
        place = np.zeros(kept.shape, dtype=np.int64)
        for level, length in enumerate(map(len, self.levels)):
            differ = np.zeros(kept.shape, dtype=every.dtype)
            for dim in range(self.dims):
                differ = np.maximum(differ, abs(every[starts, None, dim, level] - every[None, :, dim, level]))
            place = place * (length + 1) + differ
        slope, fixed = self._direct
        return share * slope.ravel()[place], fixed.ravel()[place]

    @cached_property
    def _whole(self) -> Integers:
        """[states that are not partial, dims, levels]: axes, in few bytes."""
        return np.ascontiguousarray(self.states[self.total, :-1].astype(np.int8))

    @cached_property
    def _bits(self) -> Seconds:
        """[states that are not partial, dims]: of all slices of a dim, the logarithm."""
        return np.asarray(self._whole @ np.log2(self.steps.sizes))

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
