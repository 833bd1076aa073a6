"""What is asked of redistributions: pairs of layouts, and which of them ask for the same pattern of collectives.

A pattern is told by the kinds of a tensor's dims and by both layouts, whatever the order of dims behind the first; so
tensors of the same kinds share patterns. Pairs with one pattern are found by a number that is equal where patterns are
and hardly anywhere else, and compared in full. Invariant: all pairs with a pattern are settled at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from strategies.core.graph import TensorSpec

Integers = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]
Booleans = npt.NDArray[np.bool_]
MIXING = np.int64(-7046029254386353131)
"""An odd number whose multiples differ in many bits (2**64 over the golden ratio)."""
WIDTH = 2**16
"""More than there are tuples of axes."""
Kinds = tuple[int, ...]
"""Per dim a number that says all that chains need to know of its size."""
Pattern = tuple[int, ...]
"""What tells one: per dim its kind and both tuples of axes as one number, and the partial axes."""
Price = Callable[[Pattern, TensorSpec], float]
"""Seconds of the chain of a pattern, for a tensor."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Layouts of one tensor, each once: `dims` [layouts, dims] and `partial` [layouts]."""

    dims: Integers
    partial: Integers

    def __len__(self) -> int:
        return len(self.partial)

    @cached_property
    def tuples(self) -> list[tuple[Integers, Integers]]:
        """Per dim the tuples of axes that occur, and which one every layout has."""
        return [np.unique(dim, return_inverse=True) for dim in self.dims.T]


@dataclass(eq=False)
class Asked:
    """Pairs of layouts of a tensor, [before, after]: `mixed` are the numbers of their patterns, `values` their seconds
    or lower bounds of them, `settled` tells which."""

    before: Rows
    after: Rows
    spec: TensorSpec
    kinds: Kinds
    mixed: Integers
    values: Seconds
    settled: Booleans
    changes: int = 0

    def pattern(self, row: int, column: int) -> Pattern:
        """The pattern of a pair."""
        dims = zip(self.kinds, self.before.dims[row].tolist(), self.after.dims[column].tolist(), strict=True)
        parts = [(kind * WIDTH + have) * WIDTH + want for kind, have, want in dims]
        ends = int(self.before.partial[row]), int(self.after.partial[column])
        return *parts[:1], *sorted(parts[1:]), *ends  # dims but the first have no order in a pattern


class Group:
    """All that is asked of tensors of the same kinds; `named` are the patterns with known chains, by their numbers."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.named: dict[int, Pattern] = {}

    def adopt(self, one: Asked, seconds: Price) -> None:
        """Adds a table, and settles its pairs whose patterns have known chains."""
        if self.named:
            self._settle(Joined([one]), [one], self.named, seconds)
        self.asked.append(one)
        self.__dict__.pop("joined", None)

    def price(self, numbers: Iterable[int], seconds: Price) -> bool:
        """Settles all pairs with patterns of these numbers; whether that raised a bound."""
        return self._settle(self.joined, self.asked, numbers, seconds)

    def _settle(self, joined: Joined, asked: Sequence[Asked], numbers: Iterable[int], seconds: Price) -> bool:
        """`price` of some tables, which are `joined`."""
        order = np.array(sorted(numbers), dtype=np.int64)
        names = np.array([self.named[number] for number in order.tolist()], dtype=np.int64)
        nearest = np.minimum(np.searchsorted(order, joined.mixed), len(order) - 1)
        places = np.flatnonzero(order[nearest] == joined.mixed)
        nearest = nearest[places]
        tables = np.searchsorted(joined.starts, places, side="right") - 1
        same = (joined.patterns(places, tables) == names[nearest]).all(1)
        places, nearest, tables = places[same], nearest[same], tables[same]
        found, inverse = np.unique(tables * len(order) + nearest, return_inverse=True)
        pairs = [divmod(one, len(order)) for one in found.tolist()]
        prices = [seconds(self.named[int(order[number])], asked[table].spec) for table, number in pairs]
        before, now = joined.values[places], np.array(prices)[inverse]
        joined.values[places], joined.settled[places] = now, True
        for table in set(tables[now != before].tolist()):
            asked[table].changes += 1
        return bool((now > before * (1 + 1e-12)).any())

    @cached_property
    def joined(self) -> Joined:
        return Joined(self.asked)


class Joined:
    """Tables behind one another; their values and what is settled become views of the arrays here."""

    def __init__(self, asked: Sequence[Asked]) -> None:
        self.mixed = np.concatenate([one.mixed.ravel() for one in asked])
        self.values = np.concatenate([one.values.ravel() for one in asked])
        self.settled = np.concatenate([one.settled.ravel() for one in asked])
        self.starts = _starts([one.mixed.size for one in asked])
        for one, start in zip(asked, self.starts.tolist(), strict=True):
            one.values = self.values[start : start + one.mixed.size].reshape(one.mixed.shape)
            one.settled = self.settled[start : start + one.mixed.size].reshape(one.mixed.shape)
        self.kinds = np.array([one.kinds for one in asked], dtype=np.int64).reshape(len(asked), -1)
        self.widths = np.array([len(one.after) for one in asked])
        self.before = [np.concatenate([getattr(one.before, part) for one in asked]) for part in ("dims", "partial")]
        self.after = [np.concatenate([getattr(one.after, part) for one in asked]) for part in ("dims", "partial")]
        self.rows, self.columns = (
            _starts([len(one.before) for one in asked]),
            _starts([len(one.after) for one in asked]),
        )

    def patterns(self, places: Integers, tables: Integers) -> Integers:
        """[pairs, numbers]: what tells the patterns of pairs."""
        rows, columns = np.divmod(places - self.starts[tables], self.widths[tables])
        rows, columns = rows + self.rows[tables], columns + self.columns[tables]
        parts = (self.kinds[tables] * WIDTH + self.before[0][rows]) * WIDTH + self.after[0][columns]
        parts[:, 1:] = np.sort(parts[:, 1:], axis=1)
        return np.concatenate([parts, self.before[1][rows, None], self.after[1][columns, None]], 1)


def _starts(sizes: Sequence[int]) -> Integers:
    return np.array([0, *accumulate(sizes)][:-1], dtype=np.int64)


def alike(kinds: Kinds) -> Kinds:
    """The kinds in the order in which patterns tell them."""
    return kinds[:1] + tuple(sorted(kinds[1:]))


def mixed(before: Rows, after: Rows, kinds: Kinds) -> Integers:
    """[before, after]: a number that is the same where patterns are, whatever the order of dims behind the first."""
    total = _scattered(before.partial[:, None] * WIDTH + after.partial)
    dims = zip(kinds, before.tuples, after.tuples, strict=True)
    for place, (kind, (have, row), (want, column)) in enumerate(dims):
        each = _scattered((kind * WIDTH + have[:, None]) * WIDTH + want)
        total += (_scattered(each + 1) if place == 0 else each)[row][:, column]
    return total


def _scattered(numbers: Integers) -> Integers:
    """Numbers that differ in many bits where these differ in few. Source: the finaliser of splitmix64."""
    found = numbers * MIXING
    found ^= found >> 31
    found *= MIXING
    found ^= found >> 29
    return found
