"""The least seconds of any chain of collectives between classes of layouts, as shortest ways in a small graph.

A state says how many axes of each level slice every dim, and over how many the tensor is partial. Every step that the
engine may take leads from a state to a state, at its own price, which depends on these numbers alone; an exchange ends
a chain and is priced below what it sends. Axes of outer levels lie below those of inner ones, so they go last and come
first. Invariant: a chain of the engine is a way in this graph, so its seconds are not below the shortest one's. (Where
every dim has inner axes, an outer one may have been laid on top for a while: there it may go first.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, product

import numpy as np

from strategies.chains import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, EXCHANGE, REDUCE_SCATTER, SLICE
from strategies.cost.cluster import Cluster
from strategies.cost.collectives import collective_seconds
from strategies.mesh import Mesh
from strategies.search.bounds import Integers, Seconds

Counts = tuple[int, ...]
"""Axes per level."""
Levels = tuple[tuple[str, ...], ...]
"""The axes that are alike, outermost first: in each level the next ones of the mesh."""


def levels_of(mesh: Mesh, cluster: Cluster) -> Levels:
    """Neighbouring axes of one size that cross the same levels of the cluster, outermost first."""
    axes = [(axis, size, cluster.spread(mesh, (axis,))) for axis, size in mesh.axes if size > 1]
    return tuple(tuple(axis for axis, *_ in same) for _, same in groupby(axes, key=lambda one: one[1:]))


@dataclass(frozen=True, eq=False)
class Edges:
    """Steps sorted by where to: `sources` and `kinds` of each; where the steps to a target begin (`starts`), and the
    `targets`."""

    sources: Integers
    kinds: Integers
    starts: Integers
    targets: Integers


class Ways:
    """The states of tensors with so many dims. `levels` are axes that are alike, outermost first."""

    def __init__(self, mesh: Mesh, cluster: Cluster, levels: Sequence[Sequence[str]], dims: int) -> None:
        self.mesh, self.cluster, self.levels, self.dims = mesh, cluster, levels, dims
        self.sizes = [mesh.sizes[level[0]] for level in levels]
        self.lengths = [len(level) for level in levels]
        parts = [list(_parts(length, dims + 1)) for length in self.lengths]
        states = [tuple(zip(*chosen, strict=True)) for chosen in product(*parts)]
        self.states = np.array(states, dtype=np.int64).reshape(len(states), dims + 1, len(levels))
        """[states, dims and last what is partial, levels]: axes."""
        self.number = {state.tobytes(): place for place, state in enumerate(self.states)}
        counts = np.prod(np.array(self.sizes) ** self.states[:, :-1].sum(1), axis=1)
        self.share = 1.0 / counts
        self.total = np.flatnonzero(self.states[:, -1].sum(1) == 0)
        """The states that are not partial."""
        self.edges = self._edges()
        self.found: dict[tuple[float, int], Seconds] = {}
        self.prices: dict[tuple[int, float], Seconds] = {}
        self.groups: dict[bytes, int] = {}
        self.members: list[Integers] = []

    def places(self, dims: Integers, partial: Integers, known: Integers) -> Integers:
        """The states with `dims` [classes, dims, levels] and `partial` [classes, levels]; of classes of which only so
        many levels are `known`, the place where `seconds` has the least of all their states."""
        found = []
        for counts, depth in zip(np.concatenate([dims, partial[:, None]], 1), known.tolist(), strict=True):
            if depth == len(self.levels):
                found.append(self.number[counts.tobytes()])
            else:
                name = counts[:, :depth].tobytes()
                if name not in self.groups:
                    agree = (self.states[:, :, :depth] == counts[:, :depth]).all((1, 2))
                    self.groups[name] = len(self.members)
                    self.members.append(np.flatnonzero(agree))
                found.append(-1 - self.groups[name])
        return np.array(found, dtype=np.int64)

    def least(self, found: Seconds, places: Integers) -> Seconds:
        """What was `found` per state, at `places`."""
        groups = [found[members].min() for members in self.members]
        return np.concatenate([found, np.array(groups[::-1])])[places]

    def seconds(self, start: int, size: float) -> Seconds:
        """[states]: the least seconds from a state to all others for a tensor of `size` bytes; infinite where no chain
        leads."""
        if (size, start) not in self.found:
            self.found[size, start] = self._shortest(start, size)
        return self.found[size, start]

    def _shortest(self, start: int, size: float) -> Seconds:
        found = np.full(len(self.states), np.inf)
        found[start] = 0.0
        steps = self.edges if self.states[start, -1].any() else self.whole
        cost = self._priced(steps, size)
        while len(cost):
            reached = np.minimum.reduceat(found[steps.sources] + cost, steps.starts)
            better = reached < found[steps.targets]
            if not better.any():
                break
            found[steps.targets[better]] = reached[better]
        slow, calls = self.exchanges
        last = found[self.total]
        copy = 2 * self.share[self.total] * size / self.cluster.memory_bandwidth
        near = np.flatnonzero(last + copy < last.max(initial=0.0))  # from others an exchange gains nothing
        ended = slow[near] * size
        ended += calls[near]
        ended += (last + copy)[near, None]
        least = ended.min(0, initial=np.inf) + copy + self.cluster.launch
        found[self.total] = np.minimum(last, least)
        return found

    @cached_property
    def whole(self) -> Edges:
        """The steps from states that are not partial."""
        every = self.edges
        ends = np.repeat(every.targets, np.diff([*every.starts, len(every.sources)]))
        chosen = np.flatnonzero(self.states[every.sources, -1].sum(1) == 0)
        targets, starts = np.unique(ends[chosen], return_index=True)
        return Edges(every.sources[chosen], every.kinds[chosen], starts, targets)

    def _priced(self, steps: Edges, size: float) -> Seconds:
        """Seconds of steps."""
        if (id(steps), size) not in self.prices:
            told = np.stack([steps.kinds.astype(float), self.share[steps.sources]])
            named, inverse = np.unique(told, axis=1, return_inverse=True)
            seconds = [self._step(int(kind), share * size) for kind, share in named.T]
            self.prices[id(steps), size] = np.array(seconds)[inverse.ravel()]
        return self.prices[id(steps), size]

    def _step(self, number: int, local: float) -> float:
        kind, moved, copies = self.kinds[number]
        n = math.prod(size**count for size, count in zip(self.sizes, moved, strict=True))
        sent, copied = {
            ALL_REDUCE: (2 * local * (n - 1) / n, local),
            REDUCE_SCATTER: (local * (n - 1) / n, local),
            ALL_GATHER: (local * (n - 1), local * n),
            ALL_TO_ALL: (local * (n - 1) / n, 2 * local),
            SLICE: (0.0, local),
        }[kind]
        seconds = self.cluster.launch + 2 * copied / self.cluster.memory_bandwidth if copies else 0.0
        if not sent:
            return seconds
        axes = tuple(a for level, count in zip(self.levels, moved, strict=True) for a in level[:count])
        return seconds + collective_seconds(kind, sent, axes, self.mesh, self.cluster)

    def _edges(self) -> Edges:
        """All steps."""
        self.kinds: list[tuple[str, Counts, bool]] = []
        radix = (max(self.lengths, default=0) + 1) ** np.arange((self.dims + 1) * len(self.levels))
        names = self.states.reshape(len(self.states), -1) @ radix
        order = np.argsort(names)
        found: list[tuple[Integers, Integers, Integers]] = [(np.zeros(0, dtype=np.int64),) * 3]
        for kind, source, target, moved in self._moves():
            copies = kind in (ALL_REDUCE, ALL_TO_ALL, SLICE) or target > 0
            after = self._after(kind, source, target, np.array(moved))
            legal = np.flatnonzero((after.min(axis=(1, 2)) >= 0) & self._allowed(kind, source, target, np.array(moved)))
            reached = after[legal].reshape(len(legal), -1) @ radix
            ends = order[np.searchsorted(names, reached, sorter=order)]
            found.append((legal, np.full(len(legal), len(self.kinds)), ends))
            self.kinds.append((kind, moved, copies))
        sources, kinds, ends = (np.concatenate(parts) for parts in zip(*found, strict=True))
        by = np.argsort(ends, kind="stable")
        targets, starts = np.unique(ends[by], return_index=True)
        return Edges(sources[by], kinds[by], starts, targets)

    def _moves(self) -> Iterator[tuple[str, int, int, Counts]]:
        """Every step: its kind, the dim that it takes axes from and the one that it gives them to, and the axes."""
        every = range(self.dims)
        for moved in product(*(range(length + 1) for length in self.lengths)):
            if not any(moved):
                continue
            yield ALL_REDUCE, self.dims, self.dims, moved
            for dim in every:
                yield REDUCE_SCATTER, self.dims, dim, moved
                yield SLICE, dim, dim, moved
                yield ALL_GATHER, dim, dim, moved
                yield from ((ALL_TO_ALL, dim, other, moved) for other in every if other != dim)

    def _after(self, kind: str, source: int, target: int, moved: Integers) -> Integers:
        after = self.states.copy()
        if kind == SLICE:
            after[:, target] += moved
            free = np.array(self.lengths) - after.sum(1)
            after[(free < 0).any(1)] = -1
        elif kind in (ALL_GATHER, ALL_REDUCE):
            after[:, source] -= moved
        else:
            after[:, source] -= moved
            after[:, target] += moved
        return after

    def _allowed(self, kind: str, source: int, target: int, moved: Integers) -> Integers:
        """[states]: whether outer axes go after, and come before, all inner ones of a dim."""
        found = np.ones(len(self.states), dtype=bool)
        if kind == ALL_REDUCE:
            return np.asarray((self.states[:, source] == moved).all(1))
        for level in range(len(self.levels) - 1):
            if not moved[level]:
                continue
            inner = self.states[:, :-1, level + 1 :].sum(2) > 0
            crowded = inner.all(1)
            if kind in (ALL_GATHER, ALL_TO_ALL):
                found &= (self.states[:, source, level + 1 :] == moved[level + 1 :]).all(1) | crowded
            if kind in (SLICE, ALL_TO_ALL):
                found &= ~inner[:, target] | crowded
        return np.asarray(found)

    @cached_property
    def exchanges(self) -> tuple[Seconds, Seconds]:
        """Between all states that are not partial: the least seconds of an exchange per byte of the tensor, of which a
        rank at least sends what it wants and has not; and the least of the calls."""
        states = self.states[self.total, :-1]
        bits = states * np.log2(self.sizes)
        have, want = bits.sum(2)[:, None], bits.sum(2)[None]
        target = 2.0 ** -bits.sum((1, 2))
        kept = np.maximum(have, want).sum(2)
        share = np.maximum(target[None] - 2.0**-kept, 0.0)
        differ = np.abs(states[:, None] - states[None]).max(2, initial=0)
        place = tuple(differ[..., level] for level in range(len(self.levels)))
        return share * self._direct[0][place], self._direct[1][place]

    @cached_property
    def _direct(self) -> tuple[Seconds, Seconds]:
        """By the axes that an exchange at least moves: the least seconds per byte, and whatever it carries."""
        shape = [length + 1 for length in self.lengths]
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


def _parts(length: int, places: int) -> Iterator[Counts]:
    """All ways to give at most `length` equal axes to places."""
    if not places:
        yield ()
        return
    for first in range(length + 1):
        for rest in _parts(length - first, places - 1):
            yield (first, *rest)
