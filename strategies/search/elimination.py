"""A factor graph in the min-plus semiring, and its exact minimum: variables are eliminated one by one.

A factor graph has variables with a few candidates each, and factors: tables of seconds over some of the variables. Its
minimum is an assignment for which the factors add up to the least. Eliminating a variable adds the factors that it is
in and keeps, for every choice of its neighbours, the least sum. The variable whose elimination makes the smallest table
goes first. Variables with the same tables around them share one sum: those of repeated layers are made once. Going back
through the eliminated variables, each takes the candidate that is best in the factors that it was in (to note all of
them would take as long as the minima). The order depends on the scopes alone: a graph whose seconds have changed is
eliminated in the same order again, and sums of tables that are still the same objects are reused.

Source: R. Dechter, "Bucket elimination: a unifying framework for reasoning" (1999).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property, reduce
from operator import attrgetter, is_
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]
Variables = tuple[int, ...]
Part = tuple[Variables, Seconds]
"""Seconds over some of a table's dims."""
LARGEST = 2**24
"""Entries of a table above which a graph is too wide: reduced-cost fixing is then faster than elimination."""
CACHED = 2**17
"""Entries of a table that are minimised at once."""


@dataclass(eq=False)
class FactorTable:
    """Seconds of a factor, one array dim per variable; made when they are first needed, and again after `refresh`.

    Where they are the least of several tables over fewer variables, `make_parts` makes these instead.
    """

    make: Callable[[], Seconds] | None = None
    make_parts: Callable[[], tuple[Part, ...]] | None = None
    _seconds: Seconds | None = field(default=None, init=False)
    _parts: tuple[Part, ...] | None = field(default=None, init=False)

    @property
    def seconds(self) -> Seconds:
        if self._seconds is None:
            self._seconds = self._least_part() if self.make is None else self.make()
        return self._seconds

    def _least_part(self) -> Seconds:
        count = 1 + max(dim for dims, _ in self.parts for dim in dims)
        return reduce(np.minimum, [expanded(seconds, dims, count) for dims, seconds in self.parts])

    @property
    def parts(self) -> tuple[Part, ...]:
        """The tables of which this one is the least: itself where there are no others."""
        if self.make_parts is None:
            return ((tuple(range(self.seconds.ndim)), self.seconds),)
        if self._parts is None:
            self._parts = self.make_parts()
        return self._parts

    @property
    def source(self) -> Seconds:
        """The array that all seconds come from: another one once they have changed."""
        return self.seconds

    def refresh(self) -> None:
        self._seconds = self._parts = None

    def least(self, messages: Sequence[Seconds], kept: int | None = None) -> Seconds:
        """The least entry once the message of every variable is subtracted; per candidate of the variable at dim
        `kept`, whose message is not subtracted."""
        count = self.seconds.ndim
        others = [expanded(seconds, (dim,), count) for dim, seconds in enumerate(messages) if dim != kept]
        rest = self.seconds - reduce(np.add, others) if others else self.seconds
        return np.asarray(rest.min(tuple([dim for dim in range(count) if dim != kept])))

    def restricted(self, candidates: Sequence[Integers]) -> Seconds:
        """The seconds of some candidates of every variable."""
        return np.asarray(self.seconds[np.ix_(*candidates)])


class Factor(NamedTuple):
    """A table over variables in increasing order. Equal parts of a program share the table."""

    variables: Variables
    table: FactorTable

    @property
    def seconds(self) -> Seconds:
        return self.table.seconds


def constant(variables: Variables, seconds: Seconds) -> Factor:
    """A factor that never changes."""
    return Factor(variables, FactorTable(lambda: seconds))


Key = tuple[tuple[int, Variables, int], ...]
"""Of a sum, per array: how many parts its table has, where its dims go, and the array's identity."""


class Memo:
    """Minima of the last solution and the one before, by what was added up; it holds the arrays whose identities are in
    its keys."""

    def __init__(self) -> None:
        self.before: dict[Key, tuple[Sequence[Sequence[Part]], Seconds]] = {}
        self.now: dict[Key, tuple[Sequence[Sequence[Part]], Seconds]] = {}

    @contextmanager
    def solving(self) -> Iterator[None]:
        """Forgets what this solution does not need."""
        self.before, self.now = self.now, {}
        yield
        self.before = {}

    def least(self, key: Key, parts: Sequence[Sequence[Part]], make: Callable[[], Seconds]) -> Seconds:
        """The minimum with this key; made where it is unknown."""
        if key not in self.now:
            self.now[key] = self.before[key] if key in self.before else (parts, make())
        return self.now[key][1]


@dataclass(eq=False)
class FactorGraph:
    """`sizes` are the candidates of every variable. `memo` serves other graphs with the same tables, too."""

    sizes: list[int] = field(default_factory=list)
    factors: list[Factor] = field(default_factory=list)
    memo: Memo = field(default_factory=Memo)

    def add(self, size: int) -> int:
        """A new variable; returns its number."""
        self.sizes.append(size)
        return len(self.sizes) - 1


class Elimination:
    """The order in which variables are eliminated.

    Args:
        sizes: candidates by variable.
        factors: over these variables.
        largest: entries of a table that are too many; None for `LARGEST`.
        most: entries of all tables together that are too many.

    Attributes:
        kept: variables that stay, because eliminating any of them would make too many entries.
        left: numbers of the factors over these.
        entries: of all tables that the elimination makes.
    """

    def __init__(
        self,
        sizes: Mapping[int, int],
        factors: Iterable[Factor],
        largest: float | None = None,
        most: float = math.inf,
    ) -> None:
        self.sizes, self.factors = sizes, list(factors)
        self.scopes = [one.variables for one in self.factors]
        """The variables of the given factors, then of those that eliminations make."""
        self.divided = {number for number, one in enumerate(self.factors) if one.table.make_parts is not None}
        self.order: list[tuple[int, Variables, set[int]]] = []
        """The variables with those around each, and the factors that its elimination adds up."""
        self.entries = 0.0
        self.left = set(range(len(self.scopes)))
        self.kept: Variables = ()
        self._plan(LARGEST if largest is None else largest, most)

    def solve(self, memo: Memo | None = None) -> tuple[dict[int, int], float]:
        """The candidate of every variable in a minimum, and its seconds, with the factors as they are now; none may be
        `kept`."""
        assert not self.kept
        indices = dict[int, int]()
        self.renew(Memo() if memo is None else memo)
        self.complete(indices)
        return indices, float(sum(self.tables[number].seconds for number in sorted(self.left)))

    def renew(self, memo: Memo) -> None:
        """Makes the tables again, with the given factors as they are now."""
        with memo.solving():
            for one in self.minima:
                one.renew(memo)

    def complete(self, indices: dict[int, int]) -> None:
        """Adds the candidates of eliminated variables to those of the variables that stay."""
        for (variable, around, _), least in zip(reversed(self.order), reversed(self.tables), strict=False):
            assert isinstance(least, _Minimum)
            indices[variable] = least.best(tuple([indices[v] for v in around]))

    @cached_property
    def tables(self) -> list[FactorTable]:
        """Those of the given factors, then those that eliminations make: variables with the same tables around them,
        as in repeated layers, have one minimum."""
        tables, minima = [one.table for one in self.factors], dict[tuple[tuple[Variables, int], ...], _Minimum]()
        for variable, around, used in self.order:
            dim = {v: place for place, v in enumerate((variable, *around))}
            terms = [(tuple([dim[v] for v in self.scopes[number]]), tables[number]) for number in sorted(used)]
            key = tuple(sorted([(dims, id(table)) for dims, table in terms]))
            if key not in minima:
                minima[key] = _Minimum(len(dim), terms)
            tables.append(minima[key])
        return tables

    @cached_property
    def minima(self) -> list[_Minimum]:
        return list(dict.fromkeys(one for one in self.tables if isinstance(one, _Minimum)))

    def _plan(self, largest: float, most: float) -> None:
        factors: dict[int, set[int]] = {variable: set() for variable in self.sizes}
        near: dict[int, set[int]] = {variable: {variable} for variable in self.sizes}
        for number, scope in enumerate(self.scopes):
            for v in scope:
                factors[v].add(number)
                near[v].update(scope)
        joint = {v: math.prod([self.sizes[other] for other in around]) for v, around in near.items()}
        """Entries over all variables that are near one; those near many others are not counted again each time."""

        def priority(v: int) -> tuple[int, int, int]:
            return self._entries(v, joint[v], factors[v]), len(near[v]), v

        current = {v: priority(v) for v in self.sizes}
        heap = list(current.values())
        heapq.heapify(heap)
        while heap:
            first = heapq.heappop(heap)
            size, _, variable = first
            if current.get(variable) != first:
                continue
            if size > largest or self.entries + size > most:
                self.kept = tuple(sorted(current))
                return
            used, around = factors[variable], near[variable] - {variable}
            del current[variable]
            self.entries += size
            self.order.append((variable, tuple(sorted(around)), used))
            self.left -= used  # in place: with a copy the plan of thousands of variables took quadratic time
            self.left.add(len(self.scopes))
            for v in around:
                factors[v] -= used
                factors[v].add(len(self.scopes))
                joint[v] //= self.sizes[variable]
                joint[v] *= math.prod([self.sizes[other] for other in around - near[v]])
                near[v] |= around
                near[v].discard(variable)
            self.scopes.append(self.order[-1][1])
            for v in around:
                if current[v] != (now := priority(v)):
                    current[v] = now
                    heapq.heappush(heap, now)

    def _entries(self, variable: int, joint: int, used: set[int]) -> int:
        """The entries of the tables that eliminating a variable adds up and makes."""
        sizes = self.sizes
        divided = used & self.divided if self.divided else ()
        if len(divided) != 1:
            return joint
        (one,) = divided
        others = {v for number in used if number != one for v in self.scopes[number]}
        scopes = [[self.scopes[one][dim] for dim in dims] for dims, _ in self.factors[one].table.parts]
        return joint // sizes[variable] + sum(math.prod([sizes[v] for v in others.union(scope)]) for scope in scopes)


class _Minimum(FactorTable):
    """The least sum of tables over the candidates of an eliminated variable, which is dim 0 of the sum. `terms` are the
    tables, and where their dims are in the sum, of `count` dims; a single one that has parts is taken in parts."""

    def __init__(self, count: int, terms: Sequence[tuple[Variables, FactorTable]]) -> None:
        super().__init__()
        self.count = count
        divided = [one for one in terms if one[1].make_parts is not None]
        self.divided = divided if len(divided) == 1 else []
        self.single = [one for one in terms if one not in self.divided]
        self.used: list[Seconds] = []
        """The arrays of the most recent sum."""
        self.terms: list[tuple[Part, ...]] = []
        """The same by table: one array, or several of which the table is the least."""
        self.key: Key = ()
        self.candidates: dict[Variables, int] = {}
        """The best one by the candidates of the variables around."""

    def renew(self, memo: Memo) -> None:
        """Makes the seconds again."""
        single = [table.seconds for _, table in self.single]
        several = [part for _, table in self.divided for part in table.parts]
        used = [*single, *[seconds for _, seconds in several]]
        known = self._seconds
        if known is not None and _same(used, self.used):
            memo.least(self.key, self.terms, lambda: known)
            return
        self.used, self.candidates = used, {}  # the arrays stay, and so do their identities
        self.terms = [((dims, seconds),) for (dims, _), seconds in zip(self.single, single, strict=True)]
        for own, _ in self.divided:
            self.terms.append(tuple([(tuple([own[dim] for dim in dims]), seconds) for dims, seconds in several]))
        self.key = tuple(sorted([(len(one), dims, id(seconds)) for one in self.terms for dims, seconds in one]))
        self._seconds = memo.least(self.key, self.terms, self._least)

    def _least(self) -> Seconds:
        every = [[expanded(seconds, dims, self.count) for dims, seconds in parts] for parts in self.terms]
        single = [one[0] for one in every if len(one) == 1]
        several = [one for parts in every if len(parts) > 1 for one in parts]
        return reduce(np.minimum, [minimised([*single, x]) for x in several]) if several else minimised(single)

    def best(self, around: Variables) -> int:
        """The candidate that costs least where the variables around have these candidates."""
        if around not in self.candidates:
            chosen: list[Any] = [slice(None), *around]
            seconds = [
                reduce(np.minimum, [array[tuple([chosen[dim] for dim in dims])] for dims, array in parts])
                for parts in self.terms
            ]
            self.candidates[around] = int(reduce(np.add, seconds).argmin()) if seconds else 0
        return self.candidates[around]


def elimination_effort(sizes: Mapping[int, int], scopes: Iterable[Variables], most: float) -> float:
    """Entries of all tables that an elimination over `scopes` makes; infinite where they are more than `most`."""
    table = FactorTable()
    elimination = Elimination(sizes, [Factor(scope, table) for scope in scopes], most=most, largest=most)
    return math.inf if elimination.kept else elimination.entries


def minimised(parts: Sequence[Seconds]) -> Seconds:
    """The least sum over dim 0 of arrays that broadcast together (0 of none). Large ones are made in blocks that fit a
    cache."""
    if not parts:
        return np.zeros(())
    shape = [max(sizes) for sizes in zip(*[one.shape for one in parts], strict=True)]
    entries = math.prod(shape)
    if entries <= CACHED or len(shape) < 3:
        return np.asarray(_added(parts).min(0))
    common = [one for one in parts if one.shape[1] == 1]
    if len(common) > 1:
        common = [_added(common)]
    others = [one for one in parts if one.shape[1] > 1]
    least = np.empty(shape[1:])
    step = max(CACHED * shape[1] // entries, 1)
    for start in range(0, shape[1], step):
        block = [*common, *(one[:, start : start + step] for one in others)]
        if step > 1 or len(shape) < 4:
            _added(block).min(0, out=least[start : start + step])
        else:
            least[start] = minimised([one[:, 0] for one in block])
    return least


_size = attrgetter("size")


def _added(parts: Sequence[Seconds]) -> Seconds:
    """The sum of arrays that broadcast together, small ones first."""
    first, *others = sorted(parts, key=_size)
    return reduce(np.add, others, first)


def expanded(seconds: Seconds, dims: Variables, count: int) -> Seconds:
    """Seconds as an array of `count` dims, of which its own go to `dims`; the others have size 1."""
    shape = [1] * count
    for dim, size in zip(dims, seconds.shape, strict=True):
        shape[dim] = size
    return seconds.transpose(_order(dims)).reshape(shape)


@cache
def _order(dims: Variables) -> Variables:
    """The array's dims by where they go."""
    return tuple(sorted(range(len(dims)), key=lambda dim: dims[dim]))


def _same(first: Sequence[Seconds], second: Sequence[Seconds]) -> bool:
    """Whether these are the same objects."""
    return len(first) == len(second) and all(map(is_, first, second))
