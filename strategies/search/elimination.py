"""A factor graph in the min-plus semiring, and its exact minimum: variables are eliminated one by one.

A factor graph has variables with a few candidates each, and factors: tables of seconds over some of the variables. Its
minimum is an assignment for which the factors add up to the least. Eliminating a variable adds the factors that it is
in and keeps, for every choice of its neighbours, the least sum. The variable whose elimination makes the smallest table
goes first. Going back through the eliminated variables, each takes the candidate that is best in the factors that it
was in (to note all of them would take as long as the minima). The order depends on the scopes alone: a graph whose
seconds have changed is eliminated in the same order again, and sums of tables that are still the same objects are
reused.

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


class TooWide(Exception):
    """A table would be too large."""


@dataclass(eq=False)
class Table:
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

    def refresh(self) -> None:
        self._seconds = self._parts = None

    def least(self, messages: Sequence[Seconds], kept: int | None = None) -> Seconds:
        """The least entry once the message of every variable is subtracted; per candidate of the variable at dim
        `kept`, whose message is not subtracted."""
        found, dims = self.seconds, self.seconds.ndim
        for dim, seconds in enumerate(messages):
            if dim != kept:
                found = found - seconds.reshape([-1 if i == dim else 1 for i in range(dims)])
        return np.asarray(found.min(tuple(dim for dim in range(dims) if dim != kept)))

    def restricted(self, candidates: Sequence[Integers]) -> Seconds:
        """The seconds of some candidates of every variable."""
        return np.asarray(self.seconds[np.ix_(*candidates)])


class Factor(NamedTuple):
    """A table over variables in increasing order. Equal parts of a program share the table."""

    variables: Variables
    table: Table

    @property
    def seconds(self) -> Seconds:
        return self.table.seconds


def constant(variables: Variables, seconds: Seconds) -> Factor:
    """A factor that never changes."""
    return Factor(variables, Table(lambda: seconds))


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

    def cost(self, indices: Sequence[int]) -> float:
        """Seconds of an assignment, by the candidate of every variable."""
        return float(sum(one.seconds[tuple(indices[v] for v in one.variables)] for one in self.factors))


class Elimination:
    """The order in which variables are eliminated.

    Args:
        sizes: candidates by variable.
        factors: over these variables.
        kept: variables that stay.
        largest: entries of a table that are too many; None for `LARGEST`.
        most: entries of all tables together that are too many.
        fixing: where a table would have more entries, go on without the variable that is in most factors, which is
            then one of `fixed`. Nothing can be solved before these are taken out of the factors.
        stopping: where a table would have more entries, the variables that are left stay, too. `left` are the factors
            over these.

    Raises:
        TooWide: a table would have more entries, and neither `fixing` nor `stopping`; or all of them together would.
    """

    def __init__(
        self,
        sizes: Mapping[int, int],
        factors: Iterable[Factor],
        kept: Sequence[int] = (),
        largest: float | None = None,
        *,
        most: float = math.inf,
        fixing: bool = False,
        stopping: bool = False,
    ) -> None:
        self.sizes, self.factors, self.kept = sizes, list(factors), tuple(sorted(kept))
        self.scopes = [one.variables for one in self.factors]
        """The variables of the given factors, then of those that eliminations make."""
        self.divided = {number for number, one in enumerate(self.factors) if one.table.make_parts is not None}
        self.of_variable: dict[int, set[int]] = {variable: set() for variable in sizes}
        """The factors that a variable is in at the moment."""
        for number, scope in enumerate(self.scopes):
            for variable in scope:
                self.of_variable[variable].add(number)
        self.order: list[tuple[int, Variables, set[int]]] = []
        """The variables with those around each, and the factors that its elimination adds up."""
        self.entries = 0.0
        """Of all tables that the elimination makes."""
        self.left = set(range(len(self.scopes)))
        """The factors that were not added up yet."""
        self.most, self.fixed = most, list[int]()
        self._plan(set(sizes) - set(kept), LARGEST if largest is None else largest, fixing, stopping)
        self.rest_seconds: list[Seconds] = []
        self.rest: Rest | None = None

    def solve(self, memo: Memo | None = None) -> Rest:
        """The minimum with the factors' seconds as they are now."""
        made = self.made(Memo() if memo is None else memo)
        count, numbers = len(self.factors), sorted(self.left)
        left = [self.factors[n].seconds if n < count else made[n - count] for n in numbers]
        if self.rest is None or not _same(left, self.rest_seconds):
            dims = [tuple([self.kept.index(v) for v in self.scopes[n]]) for n in numbers]
            parts = [expanded(one, at, len(self.kept)) for one, at in zip(left, dims, strict=True)]
            total = np.broadcast_to(_added(parts) if parts else np.zeros(()), [self.sizes[v] for v in self.kept])
            self.rest_seconds, self.rest = left, Rest(constant(self.kept, total), self.complete)
        return self.rest

    def made(self, memo: Memo) -> list[Seconds]:
        """The factors that eliminations make, with the given ones as they are now."""
        made: list[Seconds] = []
        for step in self.steps:
            made.append(step.least(self.factors, made, memo))
        return made

    def complete(self, indices: dict[int, int]) -> None:
        """Adds the candidates of eliminated variables to those of the variables that stay."""
        for step in reversed(self.steps):
            indices[step.variable] = step.best(indices)

    @cached_property
    def steps(self) -> list[_Step]:
        return [
            _Step(one, around, {n: self.scopes[n] for n in sorted(used)}, used & self.divided)
            for one, around, used in self.order
        ]

    def _plan(self, alive: set[int], largest: float, fixing: bool, stopping: bool) -> None:
        heap = [(self._entries(variable), variable) for variable in alive]
        heapq.heapify(heap)
        while alive:
            size, variable = heapq.heappop(heap)
            if variable not in alive:
                continue
            now = self._entries(variable)
            if now != size:
                heapq.heappush(heap, (now, variable))
                continue
            if size > largest:
                if stopping:
                    self.kept = tuple(sorted(alive | set(self.kept)))
                    return
                if not fixing:
                    raise TooWide
                widest = max(alive, key=lambda v: (len(self.of_variable[v]), -v))
                heapq.heappush(heap, (size, variable))
                for v in self._fix(widest) & alive:
                    heapq.heappush(heap, (self._entries(v), v))
                alive.discard(widest)
                continue
            used = self.of_variable.pop(variable)
            around = tuple(sorted({v for number in used for v in self.scopes[number]} - {variable}))
            self.order.append((variable, around, used))
            self.entries += size
            if self.entries > self.most:
                raise TooWide
            self.left -= used  # in place: with a copy the plan of thousands of variables took quadratic time
            self.left.add(len(self.scopes))
            alive.discard(variable)
            for v in around:
                self.of_variable[v] -= used
                self.of_variable[v].add(len(self.scopes))
            self.scopes.append(around)
            for v in around:
                if v in alive:
                    heapq.heappush(heap, (self._entries(v), v))

    def _fix(self, variable: int) -> set[int]:
        """Takes a variable out of all factors; returns those that were around it."""
        self.fixed.append(variable)
        around: set[int] = set()
        for number in self.of_variable.pop(variable):
            self.scopes[number] = tuple([v for v in self.scopes[number] if v != variable])
            around.update(self.scopes[number])
        return around

    def _entries(self, variable: int) -> int:
        """Of the tables that eliminating a variable adds up and makes."""
        used, sizes = self.of_variable[variable], self.sizes
        divided = used & self.divided
        result = math.prod([sizes[v] for v in {v for number in used for v in self.scopes[number]} if v != variable])
        if len(divided) != 1:
            return result * sizes[variable]
        (one,) = divided
        others = {v for number in used if number != one for v in self.scopes[number]}
        scopes = [[self.scopes[one][dim] for dim in dims] for dims, _ in self.factors[one].table.parts]
        return result + sum(math.prod([sizes[v] for v in others.union(scope)]) for scope in scopes)


class _Step:
    """A variable with the factors that it was in: `scopes` by number, of which a single `divided` one is taken in
    parts."""

    def __init__(self, variable: int, around: Variables, scopes: Mapping[int, Variables], divided: set[int]) -> None:
        self.variable, self.around = variable, around
        self.divided = next(iter(divided)) if len(divided) == 1 else None
        order = {v: dim for dim, v in enumerate((variable, *around))}
        dims = {number: tuple([order[v] for v in scope]) for number, scope in scopes.items()}
        """Per factor, where its dims are among the variable itself and those around."""
        self.divided_dims = () if self.divided is None else dims.pop(self.divided)
        self.numbers, self.dims = list(dims), list(dims.values())
        self.used: list[Seconds] = []
        """The arrays of the most recent sum."""
        self.parts: list[tuple[Part, ...]] = []
        """The same by factor: one array, or several of which the table is the least."""
        self.key: Key = ()
        self.made: Seconds = np.zeros(())

    def least(self, factors: Sequence[Factor], made: Sequence[Seconds], memo: Memo) -> Seconds:
        """The least sum for all candidates of the variables around; `made` are the results of the steps before."""
        count = len(factors)
        single = [factors[n].seconds if n < count else made[n - count] for n in self.numbers]
        several = () if self.divided is None else factors[self.divided].table.parts
        used = [*single, *[seconds for _, seconds in several]]
        if self.used and _same(used, self.used):
            return memo.least(self.key, self.parts, lambda: self.made)
        self.used = used  # which holds the arrays, and so their identities
        self.parts = [((dims, seconds),) for dims, seconds in zip(self.dims, single, strict=True)]
        if several:
            self.parts.append(tuple((tuple([self.divided_dims[d] for d in dims]), x) for dims, x in several))
        self.key = tuple(sorted([(len(one), dims, id(seconds)) for one in self.parts for dims, seconds in one]))
        self.made = memo.least(self.key, self.parts, self._least)
        return self.made

    def _least(self) -> Seconds:
        count = 1 + len(self.around)
        every = [[expanded(seconds, dims, count) for dims, seconds in parts] for parts in self.parts]
        single = [one[0] for one in every if len(one) == 1]
        several = [one for parts in every if len(parts) > 1 for one in parts]
        return reduce(np.minimum, [minimised([*single, x]) for x in several]) if several else minimised(single)

    def best(self, indices: Mapping[int, int]) -> int:
        """The candidate that costs least where its neighbours take `indices`."""
        chosen: list[Any] = [slice(None), *[indices[v] for v in self.around]]
        seconds = [
            reduce(np.minimum, [array[tuple([chosen[dim] for dim in dims])] for dims, array in parts])
            for parts in self.parts
        ]
        return int(reduce(np.add, seconds).argmin()) if seconds else 0


@dataclass(frozen=True, eq=False)
class Rest:
    """`factor` has the least seconds over the variables that stay; `complete` adds the candidates of the others to
    theirs, until the same graph is eliminated again."""

    factor: Factor
    complete: Callable[[dict[int, int]], None]


def eliminate(
    sizes: Mapping[int, int], factors: Iterable[Factor], kept: Sequence[int] = (), largest: float | None = None
) -> Rest:
    """Eliminates all variables of `sizes` but `kept`, which the resulting factor has in order; see `Elimination`."""
    return Elimination(sizes, factors, kept, largest).solve()


def elimination_effort(sizes: Mapping[int, int], scopes: Iterable[Variables], most: float) -> float:
    """Entries of all tables that an elimination over `scopes` makes; infinite where they are more than `most`."""
    table = Table()
    try:
        return Elimination(sizes, [Factor(scope, table) for scope in scopes], largest=most, most=most).entries
    except TooWide:
        return math.inf


def minimum(sizes: Sequence[int], tables: Mapping[Variables, Seconds], largest: int) -> list[int]:
    """The candidate of every variable for which the sum of the tables is least.

    Exact while no table grows beyond `largest` entries. Where one would, the variable that is in most factors is fixed
    to the candidate that is the least with every factor minimised by itself.
    """
    around: dict[int, list[Variables]] = {}
    for variables in tables:
        for v in variables:
            around.setdefault(v, []).append(variables)
    fixed = {v: 0 for v, size in enumerate(sizes) if size == 1}
    while True:
        free = {v: size for v, size in enumerate(sizes) if v not in fixed}
        factors = [constant(*_conditioned(variables, table, fixed)) for variables, table in tables.items()]
        elimination = Elimination(free, factors, largest=largest, fixing=True)
        if not elimination.fixed:
            indices: dict[int, int] = {}
            elimination.solve().complete(indices)
            return [fixed.get(v, indices.get(v, 0)) for v in range(len(sizes))]
        for variable in elimination.fixed:
            least = np.zeros(sizes[variable])
            for variables in around[variable]:
                left, seconds = _conditioned(variables, tables[variables], fixed)
                dim = left.index(variable)
                least += seconds.min(tuple(d for d in range(seconds.ndim) if d != dim))
            fixed[variable] = int(least.argmin())


def _conditioned(variables: Variables, table: Seconds, fixed: Mapping[int, int]) -> tuple[Variables, Seconds]:
    if fixed.keys().isdisjoint(variables):
        return variables, table
    index: list[Any] = [fixed.get(v, slice(None)) for v in variables]
    return tuple(v for v in variables if v not in fixed), np.asarray(table[tuple(index)])


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
