"""The collectives that turn one layout into another: the cheapest chain, as pure data.

A chain is a tuple of `Step`s; the real engine and the simulator carry out the same steps. Bytes are counted as sent per
rank. The search is uniform-cost over layouts (bytes first, then the number of steps). It takes steps that lead towards
the target (a dim grows only by the axes that the target wants next, and shrinks only by axes that the target does not
have there), and two detours that an exchange puts right: a reduce-scatter along any dim, and a slice along any dim over
axes that slice the target, so that replicas share the work. Invariant, held by a test against a search without these
limits: no chain with as many collectives sends less, as long as only axes of the target slice.

A dim that does not divide (its slices are padded, see `layout`) is cut by all its axes at once and joined from all of
them at once: the slices of slices would be others. Padding is made when a whole dim is cut and dropped when it is
joined.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import count

from strategies.core.errors import StrategyError
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.steps import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    EXCHANGE,
    PAD,
    REDUCE_SCATTER,
    SLICE,
    Chain,
    Step,
    common,
    exchange_step,
    is_padded,
)
from strategies.resharding.patterns import Pattern, pattern_chain


def _moves(now: Layout, target: Layout, shape: tuple[int, ...], mesh: Mesh) -> Iterator[Step]:
    """Every step from `now` that leads towards `target`."""
    pending = now.partial - target.partial

    def step(
        kind: str,
        axes: tuple[str, ...],
        dim: int,
        dims: dict[int, tuple[str, ...]],
        partial: frozenset[str],
        source: int = 0,
    ) -> Step:
        changed = tuple(dims.get(d, old) for d, old in enumerate(now.dims))
        return Step(kind, axes, dim, source, now, Layout(changed, partial), shape)

    reduced, free = mesh.sorted(pending), mesh.sorted(target.axes - now.axes - now.partial)
    if pending:
        yield step(ALL_REDUCE, reduced, 0, {}, now.partial - pending)
    for dim, (size, have) in enumerate(zip(shape, now.dims, strict=True)):  # the detours
        if reduced and size % mesh.product(have + reduced) == 0:
            yield step(REDUCE_SCATTER, reduced, dim, {dim: have + reduced}, now.partial - pending)
        if free and size % mesh.product(have + free) == 0:
            yield step(SLICE, free, dim, {dim: have + free}, now.partial)
    for dim, (size, have, want) in enumerate(zip(shape, now.dims, target.dims, strict=True)):
        if have == want:
            continue
        same, padded, pads = common(have, want), is_padded(size, have, mesh), is_padded(size, want, mesh)
        for cut in (0,) if padded else range(0 if pads else same, len(have)):
            keep, tail = have[:cut], have[cut:]
            yield step(ALL_GATHER, tail, dim, {dim: keep}, now.partial)
            if set(tail) <= target.partial:
                yield step(PAD, tail, dim, {dim: keep}, now.partial | set(tail))
        if same < len(have) or (have and (padded or pads)):
            continue
        for end in (len(want),) if pads else range(same + 1, len(want) + 1):
            added = want[same:end]
            grown = {dim: have + added}
            if set(added) <= pending:
                yield step(REDUCE_SCATTER, added, dim, grown, now.partial - set(added))
            elif not set(added) & (now.axes | now.partial):
                yield step(SLICE, added, dim, grown, now.partial)
            else:
                for other, axes in enumerate(now.dims):
                    left = axes[: -len(added)]
                    if (
                        other != dim
                        and axes[-len(added) :] == added
                        and common(axes, target.dims[other]) <= len(left)
                        and not (left and is_padded(shape[other], axes, mesh))
                    ):
                        yield step(ALL_TO_ALL, added, dim, grown | {other: left}, now.partial, other)
    if now.partial == target.partial and now.axes | target.axes and not (now.partial & target.axes):
        yield exchange_step(now, target, shape, mesh)


def _without_single(layout: Layout, mesh: Mesh) -> Layout:
    return Layout(tuple(_sliced(dim, mesh) for dim in layout.dims), frozenset(_sliced(layout.partial, mesh)))


def _sliced(axes: Iterable[str], mesh: Mesh) -> tuple[str, ...]:
    """`axes` without those of one rank."""
    return tuple(axis for axis in axes if mesh.sizes[axis] > 1)


@cache
def chain(before: Layout, after: Layout, shape: tuple[int, ...], mesh: Mesh) -> Chain:
    """The cheapest steps from `before` to `after` for a tensor of global `shape`.

    `after.partial` may hold axes that are partial in `before`, or that slice `before` at the end of a dim (those are
    padded). Raises StrategyError if the target cannot be reached.
    """
    if 1 in mesh.sizes.values():  # an axis of one rank slices nothing and needs no collective
        before, after = _without_single(before, mesh), _without_single(after, mesh)
    if len(before.dims) != len(shape) or len(after.dims) != len(shape):
        raise StrategyError("MW444", f"Layouts {before} and {after} do not fit a tensor of shape {shape}.")
    if before == after:
        return ()
    ranks = mesh.product(before.axes | before.partial | after.axes | after.partial)
    even = all(
        size % mesh.product(dim) == 0
        for layout in (before, after)
        for size, dim in zip(shape, layout.dims, strict=True)
    )
    size = math.prod(shape)
    if even and size and (size % ranks**2 == 0 or size >= LARGE):
        return _instantiated(before, after, shape, mesh)
    return _searched(before, after, shape, mesh)


LARGE = 65536
"""Elements from which on a share that is rounded does not matter."""


def _instantiated(before: Layout, after: Layout, shape: tuple[int, ...], mesh: Mesh) -> Chain:
    """The chain of the pattern of even layouts. Dims but the first have no order in a pattern, and those that can not
    be cut do not occur."""
    pattern, places = pattern_of(before, after, shape, mesh)
    steps, now = [], before
    for move in pattern_chain(pattern):
        dims = list(now.dims)
        for place, axes in zip(places, move.dims, strict=True):
            dims[place] = axes
        then = Layout(tuple(dims), move.partial)
        dim, source = (places[move.dim], places[move.source]) if places else (0, 0)
        if move.kind != ALL_TO_ALL:
            source = 0
        if move.kind in (ALL_REDUCE, EXCHANGE):
            dim = 0
        steps.append(Step(move.kind, move.axes, dim, source, now, then, shape))
        now = then
    return tuple(steps)


def pattern_of(before: Layout, after: Layout, shape: tuple[int, ...], mesh: Mesh) -> tuple[Pattern, tuple[int, ...]]:
    """What decides about a chain, and which dim of the tensor each dim of the pattern is."""
    used = mesh.sorted(before.axes | before.partial | after.axes | after.partial)
    ranks = mesh.product(used)
    found = [
        (dim > 0, math.gcd(size, ranks), have, want, dim)
        for dim, (size, have, want) in enumerate(zip(shape, before.dims, after.dims, strict=True))
    ]
    found = sorted(entry for entry in found if entry[1] > 1)
    pattern = Pattern(
        tuple((axis, mesh.sizes[axis]) for axis in used),
        tuple(entry[1] for entry in found),
        tuple(entry[2] for entry in found),
        before.partial,
        tuple(entry[3] for entry in found),
        after.partial,
    )
    return pattern, tuple(entry[4] for entry in found)


def _searched(before: Layout, after: Layout, shape: tuple[int, ...], mesh: Mesh) -> Chain:
    """The cheapest chain by uniform-cost search, for any layouts."""
    order, best = count(), {before: (0, 0, 0)}
    queue: list[tuple[tuple[int, int, int], int, Layout, Chain]] = [((0, 0, 0), next(order), before, ())]
    while queue:
        cost, _, now, steps = heapq.heappop(queue)
        if now == after:
            return steps
        if cost > best[now]:
            continue
        for step in _moves(now, after, shape, mesh):
            if best.get(step.after, (math.inf,))[0] < cost[0]:
                continue  # cheaper already, whatever this step sends
            reached = (cost[0] + step.busiest(mesh), cost[1] + 1, cost[2] + (step.kind == EXCHANGE))
            if reached < best.get(step.after, (math.inf, 0, 0)):
                best[step.after] = reached
                heapq.heappush(queue, (reached, next(order), step.after, (*steps, step)))
    raise StrategyError("MW444", f"No redistribution leads from layout {before} to {after}.")


def elements(steps: Chain, mesh: Mesh) -> int:
    """Elements that the busiest rank sends in a chain."""
    return sum(step.busiest(mesh) for step in steps)
