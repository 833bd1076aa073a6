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
from functools import cached_property
from itertools import product

import numpy as np

from strategies.chains import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, EXCHANGE, REDUCE_SCATTER, SLICE
from strategies.cost.cluster import Cluster
from strategies.cost.collectives import collective_seconds
from strategies.mesh import Mesh
from strategies.search.transfers import Integers, Seconds

Counts = tuple[int, ...]
"""Axes per level."""


Edges = tuple[Integers, Integers, Seconds, Integers, Integers, Integers]
"""Steps sorted by where to: where from, which kind, what share of the tensor lies on a rank before; where a target
begins, and the targets; which of all steps they are."""


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
        self.found: dict[tuple[float, int, bool], Seconds] = {}
        self.prices: dict[tuple[float, float], Seconds] = {}
        self.slowest = min(level.of(EXCHANGE).bandwidth for level in cluster.levels)
        self.groups: dict[bytes, int] = {}
        self.members: list[Integers] = []
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

    def seconds(self, start: int, size: float, scatters: bool = True) -> Seconds:
        """[states]: the least seconds from a state to all others for a tensor of `size` bytes; infinite where no chain
        leads. `scatters`: some dim can be cut by all axes."""
        if (size, start, scatters) not in self.found:
            self.found[size, start, scatters] = self._shortest(start, size, scatters)
        return self.found[size, start, scatters]

    def _shortest(self, start: int, size: float, scatters: bool) -> Seconds:
        """The engine takes the chain that sends least, and one exchange, after a scatter (or a sum) of what is partial,
        sends at most what a rank wants: so many bytes are `allowed`. Seconds plus a price per byte, less that price of
        what is allowed, bound the ways that keep it (a Lagrange multiplier)."""
        n = 1 / np.prod(np.array(self.sizes, dtype=float) ** self.states[start, -1])
        reduced = (1 - n) * (1 if scatters else 2) * self.share[start]
        allowed = (self.share + reduced) * size * (1 + 1e-9)
        bounds = [self._least(start, size, price) - price * allowed for price in (0.0, 2 / self.slowest)]
        return np.maximum(*bounds)

    def _least(self, start: int, size: float, price: float) -> Seconds:
        """A chain never gathers, or scatters, the same dim twice in a row: once would do. So the least seconds are
        kept apart by the last such step (the first row: any other)."""
        cost, found = self._priced(size, price), np.full((2 * self.dims + 1, len(self.states)), np.inf)
        found[0, start] = 0.0
        steps = self.edges if self.states[start, -1].any() else self.whole
        changed = True
        while changed:
            changed = False
            order = np.partition(found, 1, axis=0) if len(found) > 1 else np.concatenate([found, found])
            for last, (sources, _, _, starts, targets, edges) in enumerate(steps):
                if not len(sources):
                    continue
                before = np.where(found[last] > order[0], order[0], order[1]) if last else order[0]
                reached = np.minimum.reduceat(before[sources] + cost[edges], starts)
                better = reached < found[last, targets]
                if better.any():
                    changed = True
                    found[last, targets[better]] = reached[better]
        least = found.min(0)
        share, slow, calls, copied = self.exchanges
        last = least[self.total]
        near = last < np.inf
        fixed = self.cluster.launch + calls[near] + 2 * copied[near] * size / self.cluster.memory_bandwidth
        ended = (last[near, None] + fixed + share[near] * size * (slow[near] + price)).min(0)
        least[self.total] = np.minimum(last, ended)
        return np.asarray(least)

    @cached_property
    def whole(self) -> list[Edges]:
        """The steps from states that are not partial."""
        found, begun = [], 0
        for sources, kinds, shares, starts, targets, _ in self.edges:
            ends = np.repeat(targets, np.diff([*starts, len(sources)]))
            chosen = np.flatnonzero(self.states[sources, -1].sum(1) == 0)
            some, first = np.unique(ends[chosen], return_index=True)
            found.append((sources[chosen], kinds[chosen], shares[chosen], first, some, begun + chosen))
            begun += len(sources)
        return found

    def _priced(self, size: float, price: float) -> Seconds:
        """Seconds of every edge, and `price` for every byte that a rank sends."""
        if (size, price) not in self.prices:
            kinds, shares = (np.concatenate([group[part] for group in self.edges]) for part in (1, 2))
            named, inverse = np.unique(np.stack([kinds.astype(float), shares]), axis=1, return_inverse=True)
            seconds = [self._step(int(kind), share * size, price) for kind, share in named.T]
            self.prices[size, price] = np.array(seconds)[inverse.ravel()]
        return self.prices[size, price]

    def _step(self, number: int, local: float, price: float) -> float:
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
        return seconds + price * sent + collective_seconds(kind, sent, axes, self.mesh, self.cluster)

    def _edges(self) -> list[Edges]:
        """All steps: gathers by dim, scatters by dim, and before them the others."""
        self.kinds: list[tuple[str, Counts, bool]] = []
        radix = (max(self.lengths, default=0) + 1) ** np.arange((self.dims + 1) * len(self.levels))
        names = self.states.reshape(len(self.states), -1) @ radix
        order = np.argsort(names)
        groups: list[list[tuple[Integers, Integers, Integers]]] = [[] for _ in range(2 * self.dims + 1)]
        for kind, source, target, moved in self._moves():
            copies = kind in (ALL_REDUCE, ALL_TO_ALL, SLICE) or target > 0
            after = self._after(kind, source, target, np.array(moved))
            legal = np.flatnonzero((after.min(axis=(1, 2)) >= 0) & self._allowed(kind, source, target, np.array(moved)))
            reached = after[legal].reshape(len(legal), -1) @ radix
            ends = order[np.searchsorted(names, reached, sorter=order)]
            last = {ALL_GATHER: 1 + target, REDUCE_SCATTER: 1 + self.dims + target}.get(kind, 0)
            groups[last].append((legal, np.full(len(legal), len(self.kinds)), ends))
            self.kinds.append((kind, moved, copies))
        found, begun = [], 0
        for group in groups:
            nothing = np.zeros(0, dtype=np.int64)
            sources, kinds, ends = (np.concatenate([nothing, *parts]) for parts in zip((nothing,) * 3, *group))
            by = np.argsort(ends, kind="stable")
            targets, starts = np.unique(ends[by], return_index=True)
            shares, edges = self.share[sources[by]], np.arange(begun, begun + len(by))
            found.append((sources[by], kinds[by], shares, starts, targets, edges))
            begun += len(by)
        return found

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
    def exchanges(self) -> tuple[Seconds, Seconds, Seconds, Seconds]:
        """Between all states that are not partial: the share of the tensor that a rank at least sends, the least
        seconds per byte, those of the calls, and the share of it that a rank copies."""
        states = self.states[self.total, :-1]
        bits = states * np.log2(self.sizes)
        have, want = bits.sum(2)[:, None], bits.sum(2)[None]
        target = 2.0 ** -bits.sum((1, 2))
        kept = np.maximum(have, want).sum(2)
        share = np.maximum(target[None] - 2.0**-kept, 0.0)
        differ = np.abs(states[:, None] - states[None]).max(2, initial=0)
        place = tuple(differ[..., level] for level in range(len(self.levels)))
        return share, self._direct[0][place], self._direct[1][place], target[:, None] + target[None]

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
