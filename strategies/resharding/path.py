"""The shortest resharding path: the cheapest sequence of collectives that turns one layout into another.

Best-first search over layouts: fewest elements of the busiest rank first, then fewest steps, then fewest exchanges.
It takes steps that lead towards the target (a dim grows only by the axes that the target wants next, and shrinks only
by axes that the target does not have there), and two detours that an exchange puts right: a reduce-scatter along any
dim, and a slice along any dim over axes that slice the target, so that replicas share the work. Invariant, which a test
compares with a search without these limits: no path with as many collectives sends less, as long as only axes of the
target slice.

Where all slices are equal, the steps and their shares of the elements depend on the layouts alone: a path is searched
for once per `Pattern`, by A*, and serves tensors of all sizes. A dim that does not divide (its slices are padded, see
`strategies.core.layout`) is sliced by all its axes at once and gathered from all of them at once: the slices of slices
would be others. Padding is added when a complete dim is sliced and dropped when it is gathered.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import NamedTuple

from strategies.core.errors import StrategyError
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.steps import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    EXCHANGE,
    LOCAL,
    PAD,
    REDUCE_SCATTER,
    SLICE,
    Axes,
    Dims,
    ReshardingPath,
    Step,
    common_prefix,
    exchange_share,
)

LARGE = 65536
"""Elements from which on a share that is rounded does not matter."""
State = tuple[Dims, frozenset[str]]
"""Axes per dim, and those over which the tensor is partial."""


@cache
def resharding_path(before: Layout, after: Layout, shape: tuple[int, ...], mesh: Mesh) -> ReshardingPath:
    """The cheapest steps between two layouts of a tensor.

    Args:
        before: Any layout.
        after: Its partial axes are partial in `before`, or slice `before` at the end of a dim (those are padded).
        shape: The global shape.
        mesh: The mesh whose axes both layouts use.

    Returns:
        The steps; their bytes are `path_elements` times those of an element, their seconds
        `strategies.cost.collectives.path_seconds`.

    Raises:
        StrategyError: A layout does not fit the shape, or no path leads to the target.
    """
    mesh = mesh.even  # every rank takes the same path, whatever its share
    if 1 in mesh.sizes.values():  # an axis of one rank slices nothing and needs no collective
        before, after = _without_single(before, mesh), _without_single(after, mesh)
    if len(before.dims) != len(shape) or len(after.dims) != len(shape):
        raise StrategyError("MW444", f"Layouts {before} and {after} do not fit a tensor of shape {shape}.")
    if before == after:
        return ()
    ranks = mesh.product(before.axes | before.partial | after.axes | after.partial)
    even = not any(
        size % mesh.product(dim) for layout in (before, after) for size, dim in zip(shape, layout.dims, strict=True)
    )
    size = math.prod(shape)
    if even and size and (size % ranks**2 == 0 or size >= LARGE):
        pattern, dims = pattern_of(before, after, shape, mesh)
        return _steps(_pattern_moves(pattern), before, shape, dims)
    return _steps(_Padded(before, after, shape, mesh).moves(), before, shape, range(len(shape)))


def path_elements(path: ReshardingPath, mesh: Mesh) -> int:
    """Elements that the busiest rank sends along a path."""
    return sum(step.busiest(mesh) for step in path)


def _without_single(layout: Layout, mesh: Mesh) -> Layout:
    """The layout without axes of one rank."""

    def sliced(axes: Iterable[str]) -> Axes:
        return tuple(axis for axis in axes if mesh.sizes[axis] > 1)

    return Layout(tuple(map(sliced, layout.dims)), frozenset(sliced(layout.partial)))


@dataclass(frozen=True)
class Pattern:
    """What decides about a path where all slices are equal.

    Attributes:
        mesh: (axis, size) of the axes that either layout uses, outermost first.
        divisors: Per dim the greatest common divisor of its size and the number of ranks along `mesh`.
        before: Axes per dim.
        partial: Axes over which the tensor is partial before.
        after: Axes per dim of the target.
        remaining: Axes over which the target is partial.
    """

    mesh: tuple[tuple[str, int], ...]
    divisors: tuple[int, ...]
    before: Dims
    partial: frozenset[str]
    after: Dims
    remaining: frozenset[str]


def pattern_of(before: Layout, after: Layout, shape: tuple[int, ...], mesh: Mesh) -> tuple[Pattern, tuple[int, ...]]:
    """The pattern of two layouts, and the tensor's dim of each dim of the pattern. Dims behind the first have no order
    in a pattern, and those that cannot be sliced do not occur."""
    used = mesh.sorted(before.axes | before.partial | after.axes | after.partial)
    ranks = mesh.product(used)
    entries = [
        (dim > 0, math.gcd(size, ranks), have, want, dim)
        for dim, (size, have, want) in enumerate(zip(shape, before.dims, after.dims, strict=True))
    ]
    entries = sorted(entry for entry in entries if entry[1] > 1)
    pattern = Pattern(
        tuple((axis, mesh.sizes[axis]) for axis in used),
        tuple(entry[1] for entry in entries),
        tuple(entry[2] for entry in entries),
        before.partial,
        tuple(entry[3] for entry in entries),
        after.partial,
    )
    return pattern, tuple(entry[4] for entry in entries)


class _Move(NamedTuple):
    """A `Step` between layouts of the search: what it does, and the layout that it leaves behind."""

    kind: str
    axes: Axes
    dim: int
    source: int
    dims: Dims
    partial: frozenset[str]


@cache
def _pattern_moves(pattern: Pattern) -> tuple[_Move, ...]:
    return _Even(pattern).moves()


def _steps(moves: Iterable[_Move], before: Layout, shape: tuple[int, ...], order: Sequence[int]) -> ReshardingPath:
    """The moves as steps of a tensor; `order` is the tensor's dim of each dim of the search."""
    steps, now = [], before
    for move in moves:
        dims = list(now.dims)
        for dim, axes in zip(order, move.dims, strict=True):
            dims[dim] = axes
        after = Layout(tuple(dims), move.partial)
        dim = order[move.dim] if order and move.kind not in (ALL_REDUCE, EXCHANGE) else 0
        source = order[move.source] if move.kind == ALL_TO_ALL else 0
        steps.append(Step(move.kind, move.axes, dim, source, now, after, shape))
        now = after
    return tuple(steps)


class _Products(dict[Iterable[str], int]):
    """The number of slices that axes make together, by the axes."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes

    def __missing__(self, axes: Iterable[str]) -> int:
        self[axes] = made = math.prod(map(self.sizes.__getitem__, axes))
        return made


@cache
def _products(mesh: tuple[tuple[str, int], ...]) -> Callable[[Iterable[str]], int]:
    """As `Mesh.product`, looked up: a search asks for few products many times."""
    return _Products(dict(mesh)).__getitem__


class _PathSearch:
    """The search from `start` to `target`; what a step sends depends on the kind of tensor."""

    def __init__(self, mesh: tuple[tuple[str, int], ...], start: State, target: State) -> None:
        self.start, self.target, self.product = start, target, _products(mesh)
        self.order = {name: position for position, (name, _) in enumerate(mesh)}
        self.wanted = frozenset(axis for dim in target[0] for axis in dim)

    def divides(self, dim: int, axes: Axes) -> bool:
        """Whether a dim can be cut into equal slices over `axes`."""
        raise NotImplementedError

    def padded(self, dim: int, axes: Axes) -> bool:
        """Whether a dim of a layout on the way has padding."""
        return False

    def sent(self, state: State, move: _Move) -> int:
        """Elements that the busiest rank sends."""
        raise NotImplementedError

    def bound(self, state: State) -> int:
        """Elements that the busiest rank at least has to send from here on."""
        return 0

    def sorted(self, axes: frozenset[str]) -> Axes:
        return tuple(sorted(axes, key=self.order.__getitem__))

    def moves(self) -> tuple[_Move, ...]:
        """The cheapest moves. Raises StrategyError if the target cannot be reached."""
        order, best = count(), {self.start: (0, 0, 0)}
        parents: dict[State, tuple[State, _Move]] = {}
        queue: list[tuple[int, int, int, int, State, bool]]
        queue = [(self.bound(self.start), 0, 0, next(order), self.start, False)]

        def reach(state: State, cost: tuple[int, int, int], parent: State, move: _Move) -> None:
            if cost < best.get(state, (math.inf, 0, 0)):
                best[state], parents[state] = cost, (parent, move)
                heapq.heappush(queue, (cost[0] + self.bound(state), *cost[1:], next(order), state, False))

        while queue:
            _, steps, exchanges, _, now, exchange_next = heapq.heappop(queue)
            sent = best[now][0]
            if exchange_next:  # only here, where an exchange may be the cheapest way on, are its elements counted
                if best[now] == (sent, steps - 1, exchanges - 1):
                    move = self._exchange(now)
                    reach(self.target, (sent + self.sent(now, move), steps, exchanges), now, move)
                continue
            if now == self.target:
                return self._back(parents)
            if (steps, exchanges) != best[now][1:]:
                continue
            for move in self._moves(now):
                reach((move.dims, move.partial), (sent + self.sent(now, move), steps + 1, exchanges), now, move)
            if now[1] == self.target[1] and not (now[1] & self.wanted):
                heapq.heappush(queue, (sent + self.bound(now), steps + 1, exchanges + 1, next(order), now, True))
        before, after = (Layout(*state) for state in (self.start, self.target))
        raise StrategyError("MW444", f"No redistribution leads from layout {before} to {after}.")

    def _back(self, parents: dict[State, tuple[State, _Move]]) -> tuple[_Move, ...]:
        path, state = [], self.target
        while state != self.start:
            state, move = parents[state]
            path.append(move)
        return tuple(reversed(path))

    def _exchange(self, now: State) -> _Move:
        """One all-to-all-v, among ranks that differ along an axis that the layouts place differently."""
        same = {
            axis
            for dim, (x, y) in enumerate(zip(now[0], self.target[0], strict=True))
            if x == y or not (self.padded(dim, x) or self.padded(dim, y))
            for axis in x[: common_prefix(x, y)]
        }
        axes = frozenset(axis for dim in now[0] for axis in dim) | self.wanted
        return _Move(EXCHANGE, self.sorted(axes - same), 0, 0, self.target[0], now[1])

    def _moves(self, state: State) -> Iterator[_Move]:
        """Every step from `state` that leads towards the target, but for an exchange."""
        dims, partial = state
        pending = partial - self.target[1]
        sliced = frozenset[str]().union(*dims)
        reduced, free = self.sorted(pending), self.sorted(self.wanted - sliced - partial)
        if pending:
            yield _Move(ALL_REDUCE, reduced, 0, 0, dims, partial - pending)
        for dim, have in enumerate(dims):  # the detours
            if reduced and self.divides(dim, have + reduced):
                yield _Move(REDUCE_SCATTER, reduced, dim, 0, _with(dims, dim, have + reduced), partial - pending)
            if free and self.divides(dim, have + free):
                yield _Move(SLICE, free, dim, 0, _with(dims, dim, have + free), partial)
        for dim, (have, want) in enumerate(zip(dims, self.target[0], strict=True)):
            if have == want:
                continue
            same, padded, pads = common_prefix(have, want), self.padded(dim, have), self.padded(dim, want)
            for cut in (0,) if padded else range(0 if pads else same, len(have)):
                tail, gathered = have[cut:], _with(dims, dim, have[:cut])
                yield _Move(ALL_GATHER, tail, dim, 0, gathered, partial)
                if self.target[1].issuperset(tail):
                    yield _Move(PAD, tail, dim, 0, gathered, partial.union(tail))
            if same == len(have) and not (have and (padded or pads)):
                for end in (len(want),) if pads else range(same + 1, len(want) + 1):
                    yield from self._sliced(state, dim, want[same:end], sliced)

    def _sliced(self, state: State, dim: int, added: Axes, sliced: frozenset[str]) -> Iterator[_Move]:
        """The steps that give a dim the axes that the target wants next."""
        dims, partial = state
        grown = _with(dims, dim, dims[dim] + added)
        if (partial - self.target[1]).issuperset(added):
            yield _Move(REDUCE_SCATTER, added, dim, 0, grown, partial.difference(added))
        elif (sliced | partial).isdisjoint(added):
            yield _Move(SLICE, added, dim, 0, grown, partial)
        else:
            for other, axes in enumerate(dims):
                left = axes[: -len(added)]
                if (
                    other != dim
                    and axes[-len(added) :] == added
                    and common_prefix(axes, self.target[0][other]) <= len(left)
                    and not (left and self.padded(other, axes))
                ):
                    yield _Move(ALL_TO_ALL, added, dim, other, _with(grown, other, left), partial)


def _with(dims: Dims, dim: int, axes: Axes) -> Dims:
    return (*dims[:dim], axes, *dims[dim + 1 :])


class _Padded(_PathSearch):
    """A search for a tensor with padded slices, or with so few elements that the volume of a step is rounded."""

    def __init__(self, before: Layout, after: Layout, shape: tuple[int, ...], mesh: Mesh) -> None:
        super().__init__(mesh.axes, (before.dims, before.partial), (after.dims, after.partial))
        self.shape, self.mesh = shape, mesh

    def divides(self, dim: int, axes: Axes) -> bool:
        return self.shape[dim] % self.product(axes) == 0

    def padded(self, dim: int, axes: Axes) -> bool:
        return not self.divides(dim, axes)

    def sent(self, state: State, move: _Move) -> int:
        after = Layout(move.dims, move.partial)
        return Step(move.kind, move.axes, move.dim, move.source, Layout(*state), after, self.shape).busiest(self.mesh)


class _Even(_PathSearch):
    """A search for one pattern. The lower bound of the remaining traffic is what the busiest rank must receive: the
    part of its target slice that it does not hold, on average; a sum over n ranks adds n - 1 messages per element."""

    def __init__(self, pattern: Pattern) -> None:
        super().__init__(pattern.mesh, (pattern.before, pattern.partial), (pattern.after, pattern.remaining))
        self.pattern = pattern
        self.ranks = math.prod([size for _, size in pattern.mesh])
        self.unit = self.ranks * self.ranks
        """Elements of the tensor: every share of it that a step may send is an integer."""
        self.slice = self.unit // self.product(self.wanted)

    def divides(self, dim: int, axes: Axes) -> bool:
        return self.pattern.divisors[dim] % self.product(axes) == 0

    def sent(self, state: State, move: _Move) -> int:
        if move.kind in LOCAL:
            return 0
        if move.kind == EXCHANGE:
            return self._exchanged(state[0])
        n = self.product(move.axes)
        local = self.unit
        for dim in state[0]:
            local //= self.product(dim)
        if move.kind == ALL_GATHER:
            return local * (n - 1)
        return local // n * (n - 1) * (2 if move.kind == ALL_REDUCE else 1)

    def bound(self, state: State) -> int:
        dims, partial = state
        if self.target[1]:
            return 0
        if partial:
            return self.unit * (self.product(partial) - 2) // self.ranks + self.slice
        return self._missing(dims)

    def _missing(self, dims: Dims) -> int:
        """Elements of its slice of the target that a rank at least does not hold, on average."""
        now = frozenset[str]().union(*dims)
        cut = 1
        for have, want in zip(dims, self.target[0], strict=True):
            if have == want:
                cut *= self.product(have)
                continue
            same = common_prefix(have, want)
            own, other = have[same:], want[same:]
            if self.wanted.isdisjoint(own) or now.isdisjoint(other):  # independent positions
                cut *= self.product(have) * self.product(other)
            else:
                cut *= self.product(have[:same]) * max(self.product(own), self.product(other))
        return max(self.slice - self.unit // cut, 0)

    def _exchanged(self, dims: Dims) -> int:
        """Elements of an exchange. Where in no dim both layouts slice on, all ranks send the same, and no rank receives
        what it has."""
        if all(common_prefix(x, y) == min(len(x), len(y)) for x, y in zip(dims, self.target[0], strict=True)):
            return self._missing(dims)
        sent, total = exchange_share(self.pattern.mesh, dims, self.target[0])
        return sent * self.unit // total
