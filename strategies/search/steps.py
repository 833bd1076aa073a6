"""The steps between classes of layouts that the engine may take: which state each leads to, and what it costs.

A state says how many axes of each level slice every dim, and over how many the tensor is partial. It is numbered by its
levels, each of which changes by itself, so the steps from many states are found with a table per level. Axes of outer
levels lie below those of inner ones, so they go last and come first. (Where every dim has inner axes, an outer one may
have been laid on top for a while: there it may go first.) Invariant: every step of the engine's chains is one of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import numpy.typing as npt

from strategies.core.mesh import Mesh
from strategies.core.steps import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, SLICE
from strategies.cost.cluster import Cluster
from strategies.cost.collectives import collective_seconds
from strategies.search.bounds import Integers, Seconds

Counts = tuple[int, ...]
"""Axes per level."""
Flags = npt.NDArray[np.bool_]


class Steps:
    """Of tensors with so many dims; `levels` are axes that are alike, outermost first."""

    def __init__(self, mesh: Mesh, cluster: Cluster, levels: Sequence[Sequence[str]], dims: int) -> None:
        self.mesh, self.cluster, self.levels, self.dims = mesh, cluster, levels, dims
        self.sizes = [mesh.sizes[level[0]] for level in levels]
        self.lengths = [len(level) for level in levels]
        self.parts = [np.array(list(shared_out(length, dims + 1)), dtype=np.int64) for length in self.lengths]
        """Per level, all ways to give its axes to the dims and to what is partial."""
        self.grid = np.indices([len(one) for one in self.parts]).reshape(len(levels), -1)
        """[levels, states]: the number of each level's part."""
        lying = [one[at] for one, at in zip(self.parts, self.grid, strict=True)]
        self.states = np.stack([np.zeros((self.grid.shape[1], dims + 1), dtype=np.int64), *lying], -1)[:, :, 1:]
        """[states, dims and last what is partial, levels]: axes."""
        counts = np.prod(np.array(self.sizes, dtype=np.int64) ** self.states[:, :-1].sum(1), axis=1)
        self.share = 1.0 / counts
        self.slices, self.slicing = np.unique(counts, return_inverse=True)
        """Into how many slices states cut a tensor, and which of these numbers every state has."""
        self._moves()
        outer = range(len(levels) - 1)
        behind = [self.states[:, :-1, level + 1 :].sum(2) > 0 for level in outer]
        self.inner = [np.concatenate([one, one[:, :0].any(1, keepdims=True)], 1) for one in behind]
        """Per outer level, [states, dims and one more]: whether axes of inner levels slice a dim."""
        self.crowded = [one.all(1) for one in behind]
        self.prices: dict[float, Seconds] = {}

    def __len__(self) -> int:
        return len(self.moved)

    def numbers(self, counts: Integers) -> Integers:
        """The numbers of states [any, dims and last what is partial, levels]."""
        found = np.zeros(len(counts), dtype=np.int64)
        for level, one in enumerate(self.parts):
            found = found * len(one) + self._places(level, counts[:, :, level])
        return found

    def _places(self, level: int, counts: Integers) -> Integers:
        """Which parts of a level these are, [any, dims and one more]."""
        radix = (self.lengths[level] + 1) ** np.arange(self.dims + 1)
        names = self.parts[level] @ radix
        order = np.argsort(names)
        return np.asarray(order[np.searchsorted(names, counts @ radix, sorter=order)])

    def taken(self, starts: Integers, found: Seconds, size: float) -> tuple[Integers, Seconds]:
        """All steps from some states: where to, and the seconds until there of a tensor of `size` bytes where those
        until the states were `found`."""
        at = [self.grid[level, starts] for level in range(len(self.levels))]
        legal = np.ones((len(starts), len(self)), dtype=bool)
        for level, after in enumerate(self.after):
            legal &= after[at[level]] >= 0
        legal &= ~self.reducing | self._all(at, 0)
        for level in range(len(self.levels) - 1):
            moves, crowded = self.moved[:, level] > 0, self.crowded[level][starts, None]
            legal &= ~(moves & self.taking) | self._all(at, level + 1) | crowded
            legal &= ~(moves & self.giving) | ~self.inner[level][starts][:, self.target] | crowded
        rows, steps = np.nonzero(legal)
        ends = np.zeros(len(rows), dtype=np.int64)
        for level, after in enumerate(self.after):
            ends = ends * len(self.parts[level]) + after[at[level][rows], steps]
        return ends, found[starts][rows] + self._priced(size)[self.slicing[starts][rows], self.kind[steps]]

    def _all(self, at: Sequence[Integers], first: int) -> Flags:
        """[states, steps]: whether a step moves all axes of its source in the levels from `first` on."""
        found = np.ones((1, len(self)), dtype=bool)
        for level in range(first, len(self.levels)):
            found = found & self.all_of[level][at[level]]
        return found

    def _moves(self) -> None:
        """Every step: its kind, the dim that it takes axes from and the one that it gives them to, and the axes."""
        every = list(self._every())
        self.source = np.array([source for _, source, _, _ in every], dtype=np.int64)
        self.target = np.array([target for _, _, target, _ in every], dtype=np.int64)
        self.moved = np.array([moved for *_, moved in every], dtype=np.int64).reshape(len(every), len(self.levels))
        self.reducing = np.array([kind == ALL_REDUCE for kind, *_ in every], dtype=bool)
        self.taking = np.array([kind in (ALL_GATHER, ALL_TO_ALL) for kind, *_ in every], dtype=bool)
        self.giving = np.array([kind in (SLICE, ALL_TO_ALL) for kind, *_ in every], dtype=bool)
        copying = (ALL_REDUCE, ALL_TO_ALL, SLICE)
        told = [(kind, moved, kind in copying or target > 0) for kind, _, target, moved in every]
        self.kinds = list(dict.fromkeys(told))
        places = {one: place for place, one in enumerate(self.kinds)}
        self.kind = np.array([places[one] for one in told], dtype=np.int64)
        """What decides about the seconds of every step."""
        takes = np.array([kind != SLICE for kind, *_ in every], dtype=np.int64)
        gives = np.array([kind not in (ALL_GATHER, ALL_REDUCE) for kind, *_ in every], dtype=np.int64)
        self.all_of = [one[:, self.source] == self.moved[:, level] for level, one in enumerate(self.parts)]
        """Per level, [parts, steps]: whether a step moves all axes of its source."""
        self.after = []
        """Per level, [parts, steps]: the part that a step leads to; -1 where it is not possible."""
        for level, one in enumerate(self.parts):
            after = np.repeat(one[:, None], len(every), axis=1)
            steps = np.arange(len(every))
            after[:, steps, self.source] -= takes * self.moved[:, level]
            after[:, steps, self.target] += gives * self.moved[:, level]
            legal = (after.min(2) >= 0) & (after.sum(2) <= self.lengths[level])
            reached = np.full(legal.shape, -1, dtype=np.int64)
            reached[legal] = self._places(level, after[legal])
            self.after.append(reached)

    def _every(self) -> Iterator[tuple[str, int, int, Counts]]:
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

    def _priced(self, size: float) -> Seconds:
        """[numbers of slices, kinds of steps]: seconds."""
        if size not in self.prices:
            priced = [[self._step(*kind, size / float(count)) for kind in self.kinds] for count in self.slices]
            self.prices[size] = np.array(priced)
        return self.prices[size]

    def _step(self, kind: str, moved: Counts, copies: bool, local: float) -> float:
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


def shared_out(length: int, places: int) -> Iterator[Counts]:
    """All ways to give at most `length` equal axes to places."""
    if not places:
        yield ()
        return
    for first in range(length + 1):
        for rest in shared_out(length - first, places - 1):
            yield (first, *rest)
