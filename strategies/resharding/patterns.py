"""The cheapest chain of collectives as a pattern: for a tensor whose dims divide, steps and shares of the elements sent
depend on the layouts alone, not on the sizes. So a pattern is searched for once and serves all tensors.

A* over layouts: fewest elements first, then fewest steps, then no exchange. What is still to be sent is bounded from
below by what the busiest rank must receive: of its slice of the target, all that it does not hold on average; and a sum
over n ranks adds n - 1 messages per element. The steps are those that `redistribution` tells of.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import NamedTuple

from strategies.core.errors import StrategyError
from strategies.core.steps import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    EXCHANGE,
    PAD,
    REDUCE_SCATTER,
    SLICE,
    Axes,
    Dims,
    common,
    exchanged_share,
)

State = tuple[Dims, frozenset[str]]


@dataclass(frozen=True)
class Pattern:
    """`mesh` are the axes that either layout uses, outermost first; `divisors` is, per dim, the greatest common divisor
    of its size and the number of ranks along `mesh`: what it can be cut into."""

    mesh: tuple[tuple[str, int], ...]
    divisors: tuple[int, ...]
    before: Dims
    partial: frozenset[str]
    after: Dims
    kept: frozenset[str]


class Move(NamedTuple):
    """One step of a pattern: as `Step`, with what it leaves behind."""

    kind: str
    axes: Axes
    dim: int
    source: int
    dims: Dims
    partial: frozenset[str]


@cache
def pattern_chain(pattern: Pattern) -> tuple[Move, ...]:
    """The cheapest moves. Raises StrategyError if the target cannot be reached."""
    return _Search(pattern).run()


class _Search:
    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.sizes = dict(pattern.mesh)
        self.ranks = math.prod(self.sizes.values())
        self.order = {name: position for position, name in enumerate(self.sizes)}
        self.unit = self.ranks * self.ranks
        """Elements of the whole tensor: every share of it that a step may send is a whole number."""
        self.target: State = (pattern.after, pattern.kept)
        self.wanted = frozenset(axis for dim in pattern.after for axis in dim)
        self.slice = self.unit // self.product(self.wanted)

    def product(self, axes: Axes | frozenset[str]) -> int:
        found = 1
        for axis in axes:
            found *= self.sizes[axis]
        return found

    def sorted(self, axes: frozenset[str]) -> Axes:
        return tuple(sorted(axes, key=self.order.__getitem__))

    def run(self) -> tuple[Move, ...]:
        start: State = (self.pattern.before, self.pattern.partial)
        order, best = count(), {start: (0, 0, 0)}
        parents: dict[State, tuple[State, Move]] = {}
        queue: list[tuple[int, int, int, int, State, bool]] = [(self.bound(start), 0, 0, next(order), start, False)]
        sent = {start: 0}
        while queue:
            _, steps, exchanges, _, now, last = heapq.heappop(queue)
            if last:  # an exchange that may be the cheapest way on: only now is it priced
                if best[now] != (sent[now], steps - 1, exchanges - 1):
                    continue
                cost = sent[now] + self.exchanged(now)
                reached = (cost, steps, exchanges)
                if reached < best.get(self.target, (math.inf, 0, 0)):
                    best[self.target], sent[self.target] = reached, cost
                    parents[self.target] = now, self.exchange(now)
                    heapq.heappush(queue, (cost, steps, exchanges, next(order), self.target, False))
                continue
            if now == self.target:
                return self.back(parents, start)
            spent = sent[now]
            if (spent, steps, exchanges) > best[now]:
                continue
            for move, cost in self.moves(now):
                state = (move.dims, move.partial)
                reached = (spent + cost, steps + 1, exchanges)
                if reached < best.get(state, (math.inf, 0, 0)):
                    best[state], sent[state] = reached, reached[0]
                    parents[state] = now, move
                    heapq.heappush(
                        queue, (reached[0] + self.bound(state), steps + 1, exchanges, next(order), state, False)
                    )
            if now[1] == self.target[1] and not (now[1] & self.wanted):
                heapq.heappush(queue, (spent + self.bound(now), steps + 1, exchanges + 1, next(order), now, True))
        raise StrategyError("MW444", f"No redistribution leads from layout {start} to {self.target}.")

    def back(self, parents: dict[State, tuple[State, Move]], start: State) -> tuple[Move, ...]:
        found, state = [], self.target
        while state != start:
            state, move = parents[state]
            found.append(move)
        return tuple(reversed(found))

    def bound(self, state: State) -> int:
        """Elements that the busiest rank at least has to send from here."""
        dims, partial = state
        if self.target[1]:
            return 0
        if partial:
            return self.unit * (self.product(partial) - 2) // self.ranks + self.slice
        return self.missing(dims)

    def missing(self, dims: Dims) -> int:
        """Elements of its slice of the target that a rank at least does not hold, on average."""
        now = frozenset(axis for dim in dims for axis in dim)
        cut = 1
        for have, want in zip(dims, self.pattern.after, strict=True):
            if have == want:
                cut *= self.product(have)
                continue
            same = common(have, want)
            mine, other = have[same:], want[same:]
            if self.wanted.isdisjoint(mine) or now.isdisjoint(other):  # positions that know nothing of one another
                cut *= self.product(have) * self.product(other)
            else:
                cut *= self.product(have[:same]) * max(self.product(mine), self.product(other))
        return max(self.slice - self.unit // cut, 0)

    def exchange(self, now: State) -> Move:
        same = {axis for x, y in zip(now[0], self.pattern.after, strict=True) for axis in x[: common(x, y)]}
        axes = frozenset(axis for dim in now[0] for axis in dim) | self.wanted
        return Move(EXCHANGE, self.sorted(axes - same), 0, 0, self.pattern.after, now[1])

    def exchanged(self, now: State) -> int:
        """What the busiest rank sends in an exchange from here. Where in no dim both layouts cut on, all ranks send the
        same, and no rank receives what it has."""
        if all(common(x, y) == min(len(x), len(y)) for x, y in zip(now[0], self.pattern.after, strict=True)):
            return self.missing(now[0])
        sent, of = exchanged_share(self.pattern.mesh, now[0], self.pattern.after)
        return sent * self.unit // of

    def moves(self, state: State) -> Iterator[tuple[Move, int]]:
        """Every step from `state` that leads towards the target, and what the busiest rank sends."""
        dims, partial = state
        pending = partial - self.target[1]
        sliced = frozenset(axis for dim in dims for axis in dim)
        local = self.unit // self.product(sliced)
        reduced, free = self.sorted(pending), self.sorted(self.wanted - sliced - partial)

        def after(dim: int, axes: Axes) -> Dims:
            return (*dims[:dim], axes, *dims[dim + 1 :])

        if pending:
            n = self.product(reduced)
            yield Move(ALL_REDUCE, reduced, 0, 0, dims, partial - pending), 2 * local * (n - 1) // n
        for dim, (divisor, have) in enumerate(zip(self.pattern.divisors, dims, strict=True)):
            if reduced and divisor % self.product(have + reduced) == 0:
                n = self.product(reduced)
                yield (
                    Move(REDUCE_SCATTER, reduced, dim, 0, after(dim, have + reduced), partial - pending),
                    local // n * (n - 1),
                )
            if free and divisor % self.product(have + free) == 0:
                yield Move(SLICE, free, dim, 0, after(dim, have + free), partial), 0
        for dim, (have, want) in enumerate(zip(dims, self.pattern.after, strict=True)):
            if have == want:
                continue
            same = common(have, want)
            for cut in range(same, len(have)):
                tail, grown = have[cut:], after(dim, have[:cut])
                yield Move(ALL_GATHER, tail, dim, 0, grown, partial), local * (self.product(tail) - 1)
                if self.target[1].issuperset(tail):
                    yield Move(PAD, tail, dim, 0, grown, partial.union(tail)), 0
            if same == len(have):
                for end in range(same + 1, len(want) + 1):
                    yield from self.grown(state, dim, want[same:end], sliced, local)

    def grown(
        self, state: State, dim: int, added: Axes, sliced: frozenset[str], local: int
    ) -> Iterator[tuple[Move, int]]:
        """The ways in which a dim gets the axes that the target wants next."""
        dims, partial = state
        more = (*dims[:dim], dims[dim] + added, *dims[dim + 1 :])
        n = self.product(added)
        if (partial - self.target[1]).issuperset(added):
            yield Move(REDUCE_SCATTER, added, dim, 0, more, partial.difference(added)), local // n * (n - 1)
        elif (sliced | partial).isdisjoint(added):
            yield Move(SLICE, added, dim, 0, more, partial), 0
        else:
            for other, axes in enumerate(dims):
                left = axes[: -len(added)]
                if (
                    other != dim
                    and axes[-len(added) :] == added
                    and common(axes, self.pattern.after[other]) <= len(left)
                ):
                    moved = (*more[:other], left, *more[other + 1 :])
                    yield Move(ALL_TO_ALL, added, dim, other, moved, partial), local // n * (n - 1)
