"""Options of which many cost the same: seconds depend on how many slices every loop has, and collectives on how many
axes of each level they run over, so each such number is priced once.

Invariant: what is told is what every option would be priced at by itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations, product

import numpy as np

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.sharding import Sharding
from strategies.search.alike import Alike
from strategies.search.options import Assignments, Menu, Placed
from strategies.search.problem import Problem
from strategies.search.transfers import WHOLE, Integers, Rows, Seconds, Transfers


class Counted(Menu):
    """A menu that prices by counts of axes; `alike` knows the levels."""

    def __init__(self, problem: Problem, transfers: Transfers, alike: Alike) -> None:
        super().__init__(problem, transfers)
        self.alike = alike
        self.level_sizes = np.array([problem.mesh.sizes[level[0]] for level in alike.levels], dtype=np.int64)

    def counted(self, places: Integers, factors: int) -> Integers:
        """[options, factors, levels]: how many axes of every level slice a factor."""
        lying = places[:, None, :] == np.arange(factors)[:, None]
        return np.stack([lying[:, :, level].sum(2) for level in self.alike.places], -1)

    def slices(self, counts: Integers) -> Integers:
        """[options, factors]: into how many slices so many axes [options, factors, levels] cut."""
        return np.asarray((self.level_sizes**counts).prod(2))

    def _inside(self, operator: Operator, sharding: Sharding, assignments: Assignments) -> Seconds:
        def inside(index: int) -> float:
            return self.own.inside(operator, sharding, assignments[index])

        if not isinstance(assignments, Placed):
            return np.array([inside(index) for index in range(len(assignments))])
        counts = self.counted(assignments.places, len(sharding.factors))
        talking = self.own.talking(operator, sharding)
        over = counts[:, [number for number, factor in enumerate(sharding.factors) if factor in talking]]
        return once(np.concatenate([self.slices(counts), over.reshape(len(counts), -1)], 1), inside)

    def parameters(self, rows: Rows, spec: TensorSpec) -> Seconds:
        """`parameter_seconds` of many layouts: of all that are cut into as many slices, over as many axes."""
        bits = self.alike.bits(rows)
        lying = [self.alike.counted(rows.partial), self.alike.counted(bits).sum(1)]
        told = np.concatenate([self.transfers.counts[rows.dims], *lying], 1)
        return once(told, lambda index: self.parameter_seconds(self.transfers.layout(rows, index), spec))

    def parameters_bytes(self, rows: Rows, ref: Ref) -> Seconds:
        told = self.alike.counted(self.alike.bits(rows)).sum(1)
        return once(told, lambda index: self.parameter_bytes(self.transfers.layout(rows, index), ref))


def once(told: Integers, price: Callable[[int], float]) -> Seconds:
    """The price of every row of `told` [rows, numbers], asked for once of those that are equal."""
    _, first, inverse = np.unique(told, axis=0, return_index=True, return_inverse=True)
    return np.array([price(index) for index in first.tolist()])[inverse.ravel()]


def canonical(sharding: Sharding, sizes: Integers, lengths: Sequence[int]) -> Integers:
    """[classes, axes]: per class of legal assignments the factor that every axis slices, by number, or WHOLE. Axes of
    one level (so many as `lengths` says, of the size in `sizes`) rise in it, and the levels follow one another."""
    extents = np.array([sharding.sizes[factor] for factor in sharding.factors], dtype=np.int64)
    places, slices = np.zeros((1, 0), dtype=np.int64), np.ones((1, len(extents)), dtype=np.int64)
    for size, length in zip(sizes.tolist(), lengths, strict=True):
        last = np.full(len(places), WHOLE)
        for _ in range(length):
            grown = []
            for factor in range(WHOLE, len(extents)):
                legal = last <= factor
                if factor != WHOLE:
                    legal &= extents[factor] % (slices[:, factor] * size) == 0
                cut = slices[legal]
                if factor != WHOLE:
                    cut[:, factor] *= size
                grown.append((np.insert(places[legal], places.shape[1], factor, axis=1), cut))
            places, slices = (np.concatenate(parts) for parts in zip(*grown, strict=True))
            last = places[:, -1]
    return places


def members(row: Integers, levels: Sequence[Integers], most: int) -> Integers:
    """[assignments, axes]: those of the class of `row`, where the axes of each level may change places. Of more than
    `most` only those in which axes that slice the same follow one another."""
    held = [row[places].tolist() for places in levels]
    number = math.prod(
        math.factorial(len(one)) // math.prod(map(math.factorial, Counter(one).values())) for one in held
    )
    found = [list(_orders(one)) if number <= most else list(_runs(one)) for one in held]
    every = [[place for part in parts for place in part] for parts in product(*found)]
    order = np.concatenate([np.asarray(places) for places in levels]) if levels else np.zeros(0, dtype=np.int64)
    lying = np.empty((len(every), len(row)), dtype=np.int64)
    lying[:, order] = np.array(every, dtype=np.int64).reshape(len(every), len(row))
    return lying


def _orders(held: list[int]) -> Iterator[list[int]]:
    """All orders of what may hold the same more than once."""
    if not held:
        yield []
    for first in sorted(set(held)):
        rest = held.copy()
        rest.remove(first)
        yield from ([first, *others] for others in _orders(rest))


def _runs(held: list[int]) -> Iterator[list[int]]:
    for order in permutations(sorted(set(held))):
        yield [place for place in order for _ in range(held.count(place))]
