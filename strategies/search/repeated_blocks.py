"""Repeated-block contraction of a factor graph by min-plus matrix powers, and classes of equivalent operators.

A run is a stretch of variables in which each has the same tables (as objects) as the one a `period` before it, over
variables that are as far away, or over the same ones in front of the run. One block of it is eliminated down to a
min-plus matrix from the variables of the block before that it touches to those that the next one touches; the n-th
power of the matrix, by doubling, is all n blocks. The last block stays: what follows may touch any of its variables.

Operators are equivalent if their rules, shapes and configured strategies are equal and so are those of everything up to
`DEPTH` operators away; searches that decide once per class use this. Source: colour refinement (Weisfeiler and Leman,
1968), stopped early. Invariant: a strategy that is legal for one member is legal for all, and the edges between classes
are exactly the edges between their members, counted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from strategies.core.graph import Operator, Ref, Source
from strategies.rules.sharding import Assignment
from strategies.search.elimination import Elimination, Factor, FactorGraph, Memo, Seconds, Table
from strategies.search.problem import Problem

SHORTEST = 3
"""Blocks that a run has at least."""
PERIODS = 6
"""Distances between equal variables that are tried, the most frequent first."""
DEPTH = 2


@dataclass(frozen=True)
class Run:
    """`count` blocks of `period` variables from `start` on. Blocks touch the variables `inward` of the block before
    (relative to that block's start) and `outside` in front of the run."""

    start: int
    period: int
    count: int
    inward: tuple[int, ...]
    outside: tuple[int, ...]


class Contraction:
    """A factor graph with its runs, which depend on scopes alone: it is solved again when seconds have changed."""

    def __init__(self, graph: FactorGraph) -> None:
        self.graph = graph
        self.attached: list[list[Factor]] = [[] for _ in graph.sizes]
        """Every factor, at the last of its variables."""
        for one in graph.factors:
            self.attached[max(one.variables)].append(one)
        tables, scopes = dict[tuple[int, ...], int](), dict[tuple[int, ...], int]()
        numbers = []
        for v, (size, factors) in enumerate(zip(graph.sizes, self.attached, strict=True)):
            same = tables.setdefault((size, *[id(one.table) for one in factors]), len(tables))
            scope = (same, *[v - around for one in factors for around in one.variables])
            numbers.append((same, scopes.setdefault(scope, len(scopes))))
        self.tables, self.scopes = np.array(numbers, dtype=np.int64).reshape(len(numbers), 2).T
        """Per variable a number for its tables, and one for these and the distances to their other variables."""
        self.runs = list(self._runs(0, len(graph.sizes)))

    @cached_property
    def powers(self) -> list[_Power]:
        return [_Power(run, self.attached, self.graph) for run in self.runs]

    @cached_property
    def others(self) -> Elimination:
        """Of all variables that are not within a run."""
        contracted = {v for power in self.powers for v in power.contracted}
        factors = [one for v in range(len(self.attached)) if v not in contracted for one in self.attached[v]]
        hidden = contracted.difference(*(power.ending for power in self.powers))
        sizes = {v: size for v, size in enumerate(self.graph.sizes) if v not in hidden}
        return Elimination(sizes, [*factors, *(power.factor for power in self.powers)])

    def solve(self) -> tuple[list[int], float]:
        """The best candidate of every variable, and their seconds. Raises TooWide."""
        memo, indices = self.graph.memo, dict[int, int]()
        with memo.solving():
            for power in self.powers:
                power.renew(memo)
            rest = self.others.solve(memo)
        rest.complete(indices)
        for power in self.powers:
            power.complete(indices)
        return [indices[v] for v in range(len(self.graph.sizes))], float(rest.factor.seconds)

    def _runs(self, low: int, high: int) -> Iterator[Run]:
        run = self._longest_run(low, high)
        if run is not None:
            yield run
            yield from self._runs(low, run.start)
            yield from self._runs(run.start + run.period * run.count, high)

    def _longest_run(self, low: int, high: int) -> Run | None:
        """The run between two variables that saves most; None where nothing is repeated."""
        last: dict[int, int] = {}
        distances: Counter[int] = Counter()
        for position, number in enumerate(self.tables[low:high].tolist()):
            if number in last:
                distances[position - last[number]] += 1
            last[number] = position
        best, saved = None, 0
        for period, _ in distances.most_common(PERIODS):
            for start, length in self._stretches(low, high, period):
                if length >= (SHORTEST - 1) * period and length > saved:
                    run = _aligned(self.attached, self.graph.sizes, start, period, length + period)
                    if run is not None:
                        best, saved = run, length
        return best

    def _stretches(self, low: int, high: int, period: int) -> list[tuple[int, int]]:
        """Starts and lengths of stretches of variables that are like those one `period` later."""
        first, second = slice(low, high - period), slice(low + period, high)
        equal = self.scopes[first] == self.scopes[second]
        for position in np.flatnonzero(~equal & (self.tables[first] == self.tables[second])).tolist():
            pair = self.attached[low + position], self.attached[low + position + period]
            equal[position] = all(y in (x, x + period) for x, y in _corresponding(*pair))
        edges = np.flatnonzero(np.diff(equal.astype(np.int8), prepend=0, append=0)).tolist()
        return [(low + start, end - start) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def _corresponding(first: Sequence[Factor], second: Sequence[Factor]) -> Iterator[tuple[int, int]]:
    """The variables of the same tables."""
    for a, b in zip(first, second, strict=True):
        yield from zip(a.variables, b.variables, strict=True)


def _aligned(
    attached: Sequence[Sequence[Factor]], sizes: Sequence[int], first: int, period: int, length: int
) -> Run | None:
    """The run within a stretch of repeated variables whose blocks touch the fewest candidates of one another."""
    later = {
        v for variable in range(first + length, len(attached)) for one in attached[variable] for v in one.variables
    }
    pairs = {
        v: list(_corresponding(attached[v], attached[v + period]))
        for v in range(first, min(first + 2 * period, first + length - period))
    }
    best, least = None, math.inf
    for start in range(first, first + period):
        count = (first + length - start) // period
        last = start + (count - 1) * period
        if count < SHORTEST or any(start <= v < last for v in later):
            continue
        inward, outside, fits = set(), set(), True
        for v in range(start, start + period):
            for x, y in pairs[v]:
                if x == y:
                    outside.add(x)
                elif y < start + period:
                    inward.add(y - start)
                    fits &= y >= start
        entering = {start - period + place for place in inward}
        rest = range(start + count * period, first + length)
        touched = {v for variable in rest for one in attached[variable] for v in one.variables}
        if not fits or entering & outside or min(entering, default=0) < 0 or any(start <= v < last for v in touched):
            continue
        width = math.prod(sizes[start + place] for place in inward) * math.prod(sizes[v] for v in outside)
        if width < least:
            best, least = Run(start, period, count, tuple(sorted(inward)), tuple(sorted(outside))), width
    return best


class _Power:
    """All blocks of a run but the last as one factor over what they touch in front, and what the last block touches."""

    def __init__(self, run: Run, attached: Sequence[Sequence[Factor]], graph: FactorGraph) -> None:
        sizes = graph.sizes
        self.run, self.blocks = run, run.count - 1
        self.contracted = range(run.start, run.start + run.period * self.blocks)
        """The variables whose factors this one stands for."""
        start, period = run.start, run.period
        self.entering = tuple(start - period + place for place in run.inward)
        self.leaving = tuple(start + place for place in run.inward)
        self.ending = tuple(start + (run.count - 2) * period + place for place in run.inward)
        own = range(start, start + period)
        kept = tuple(dict.fromkeys((*run.outside, *self.entering, *self.leaving)))
        self.block = Elimination({v: sizes[v] for v in (*kept, *own)}, [one for v in own for one in attached[v]], kept)
        self.order = [self.block.kept.index(v) for v in (*run.outside, *self.entering, *self.leaving)]
        self.shape = [sizes[start + place] for place in run.inward]
        self.before = [sizes[v] for v in run.outside]
        self.rest = self.block.solve(graph.memo)
        self.factor = Factor((*run.outside, *self.entering, *self.ending), Table(self._raised))

    def renew(self, memo: Memo) -> None:
        """Looks at the seconds of a block again."""
        rest = self.block.solve(memo)
        if rest is not self.rest:
            self.rest = rest
            self.factor.table.refresh()

    def _raised(self) -> Seconds:
        width = math.prod(self.shape)
        self.matrix = self.rest.factor.seconds.transpose(self.order).reshape(math.prod(self.before), width, width)
        return power(self.matrix, self.blocks).reshape((*self.before, *self.shape, *self.shape))

    def complete(self, indices: dict[int, int]) -> None:
        """Adds the candidates of all blocks' variables, from those of the factor's."""
        outside = int(np.ravel_multi_index([indices[v] for v in self.run.outside], self.before)) if self.before else 0
        first, last = (
            int(np.ravel_multi_index([indices[v] for v in variables], self.shape)) if self.shape else 0
            for variables in (self.entering, self.ending)
        )
        matrix = self.matrix[outside]
        left = [matrix[:, last]]  # seconds from every state to the last one, by the blocks between, less one
        for _ in range(self.blocks - 1):
            left.append((matrix + left[-1]).min(1))
        states = [first]
        for seconds in reversed(left[:-1]):
            states.append(int((matrix[states[-1]] + seconds).argmin()))
        states.append(last)
        own = range(self.run.start, self.run.start + self.run.period)
        blocks: dict[tuple[int, int], dict[int, int]] = {}
        for block, ends in enumerate(pairwise(states)):
            if ends not in blocks:
                found = blocks[ends] = {v: indices[v] for v in self.run.outside}
                for variables, index in zip((self.entering, self.leaving), ends, strict=True):
                    found |= dict(zip(variables, map(int, np.unravel_index(index, self.shape)), strict=True))
                self.rest.complete(found)
            shift = block * self.run.period
            indices |= {v + shift: blocks[ends][v] for v in own}


def power(matrix: Seconds, exponent: int) -> Seconds:
    """The min-plus power of matrices [batch, n, n], by doubling."""
    if exponent == 1:
        return matrix
    half = power(matrix, exponent // 2)
    square = product(half, half)
    return product(square, matrix) if exponent % 2 else square


def product(left: Seconds, right: Seconds) -> Seconds:
    """The min-plus product of matrices [batch, n, n]."""
    best = np.empty_like(left)
    for row in range(left.shape[1]):
        best[:, row] = (left[:, row, :, None] + right).min(1)
    return best


@dataclass(frozen=True)
class Edge:
    """Values that members of one class hand to members of another: result `index` to operand `position`. `after` is
    the use before this one of the same value (class and position), None for the first."""

    producer: int
    index: int
    user: int
    position: int
    after: tuple[int, int] | None


@dataclass(frozen=True)
class Classes:
    """`members[c]` are the operators of class c, `edges` count each kind of edge, `of` has the class of an operator."""

    members: tuple[tuple[Operator, ...], ...]
    edges: dict[Edge, int]
    of: dict[str, int]

    @cached_property
    def representatives(self) -> tuple[Operator, ...]:
        """One member of each class."""
        return tuple(members[0] for members in self.members)


def equivalence_classes(
    problem: Problem, chosen: Mapping[str, Assignment] | None = None, *, single: bool = False
) -> Classes:
    """The classes of a problem's operators, in the order of their first members.

    Args:
        problem: the problem.
        chosen: assignments by id that equivalent operators must share, if any.
        single: put every operator into a separate class.
    """
    key = None if chosen is None else tuple([tuple(one.items()) for one in chosen.values()])
    return problem.once(("classes", key, single), lambda: _classes(problem, chosen, single))


def _classes(problem: Problem, chosen: Mapping[str, Assignment] | None, single: bool) -> Classes:
    graph = problem.graph
    numbers: dict[Hashable, int] = {}

    def number(key: Hashable) -> int:
        return numbers.setdefault(key, len(numbers))

    leaving: dict[str, list[Hashable]] = {}
    for ref, why in (*((ref, "output") for ref in graph.outputs), *((ref, "update") for _, ref in graph.updates)):
        leaving.setdefault(ref.id, []).append((ref.index, why))
    colour = {
        id: number((kind, tuple(leaving.get(id, ())), chosen and tuple(chosen[id].items())))
        for id, kind in problem.kinds.items()
    }
    sources = {source.id: number(_source(problem, source)) for source in graph.sources}
    uses = {
        operator.id: [
            (user.id, index, position)
            for index in range(len(operator.results))
            for user, position in graph.users[Ref(operator.id, index)]
        ]
        for operator in graph.operators
    }
    for _ in range(DEPTH):
        seen = sources | colour
        for operator in graph.operators:
            key: list[Hashable] = [seen[operator.id], *[(seen[ref.id], ref.index) for ref in operator.operands], None]
            key += sorted([(seen[id], index, position) for id, index, position in uses[operator.id]])
            colour[operator.id] = number(tuple(key))
    if single:
        colour = {operator.id: place for place, operator in enumerate(graph.operators)}
    members: dict[int, list[Operator]] = {}
    for operator in graph.operators:
        members.setdefault(colour[operator.id], []).append(operator)
    of = {operator.id: place for place, group in enumerate(members.values()) for operator in group}
    edges: Counter[Edge] = Counter()
    for operator in graph.operators:
        for index in range(len(operator.results)):
            last = None
            for user, position in graph.users[Ref(operator.id, index)]:
                use = of[user.id], position
                edges[Edge(of[operator.id], index, *use, last)] += 1
                last = use
    return Classes(tuple(map(tuple, members.values())), dict(edges), of)


def repeats(problem: Problem) -> bool:
    """Whether the model has repeated layers: some product of tensors has an equivalent one."""
    members = equivalence_classes(problem).members
    return any(len(group) > 1 and problem.shardings[group[0].id].sums for group in members)


def _source(problem: Problem, source: Source) -> Hashable:
    """The key by which uses of a source are equivalent; a parameter with several uses is equivalent to no other."""
    users = len(problem.graph.users[Ref(source.id)])
    single = source.id if source.kind == "parameter" and users > 1 else None
    layout = problem.inputs[source.name] if source.kind == "input" else None
    return source.kind, source.spec, source.trainable, layout, single
