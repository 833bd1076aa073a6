"""A schedule for the times of given stages within given memory: list scheduling, then local search.

A list scheduler runs in every group that is free the most urgent pass that is ready, keeps a forward back that the
memory has no room for, and computes weight gradients where it would wait. Its rules leave room for choice, so all are
tried (`RULES`), beside given schedules. Local search then changes the order in the groups that nothing but their own
order delays: a pass on the critical path is moved before another of its block, or behind the block (Nowicki and
Smutnicki, 1996, for job shops). Weight gradients that nobody waits for are at last computed with their input gradients.

Invariant: every schedule that is returned has a timeline and keeps the memory of every group, and none is slower than
the given ones that do. The same input gives the same schedule.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product

from strategies.lowering.pipeline_schedule import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Pass, Schedule
from strategies.lowering.pipeline_timeline import StageTimes

F, B, W = range(3)
"""Forward, input gradient and weight gradient, as in Qi et al. (2023)."""
EVALUATIONS = 1500
"""Of local search, for one schedule."""
TRIES = 60
"""Moves from one schedule, at most."""
STEP_BACK = 1.02
"""How much longer than the best a schedule may be on the way to a better one."""
ROUNDING = 1e-9
SLIGHT = 1e-3
"""How much slower than the fastest a schedule may be that stores less, as long as no given one is faster."""
Orders = list[list[int]]
"""Passes of every group by number, see `ScheduleProblem.number`."""


@dataclass(frozen=True)
class ScheduleProblem:
    """The problem to schedule.

    Attributes:
        times: By stage.
        groups: The group of ranks that runs a stage, by stage.
        micro_batches: Their number.
        sizes: What a micro-batch stores in a stage from forward to backward, or to the first half of it, by stage.
        limits: How much of that a group may store at once, by group.
        splits: Whether a backward pass may be run in two halves.
        between: What a micro-batch stores between the two halves, by stage; empty: as much as before.
    """

    times: Sequence[StageTimes]
    groups: Sequence[int]
    micro_batches: int
    sizes: Sequence[float]
    limits: Sequence[float]
    splits: bool = True
    between: Sequence[float] = ()

    def number(self, stage: int, micro_batch: int, computation: int) -> int:
        return (stage * self.micro_batches + micro_batch) * 3 + computation

    def stage(self, number: int) -> int:
        return number // (3 * self.micro_batches)

    def micro_batch(self, number: int) -> int:
        return number // 3 % self.micro_batches

    @property
    def count(self) -> int:
        """The number of passes."""
        return 3 * len(self.times) * self.micro_batches

    @cached_property
    def seconds(self) -> list[float]:
        """Seconds of every pass. Where backward is not split, `B` stands for both halves, and no `W` is ever run."""
        found: list[float] = []
        for one in self.times:
            own = one.forward, one.input, one.weight
            found += (own if self.splits else (own[0], own[1] + own[2], 0.0)) * self.micro_batches
        return found

    @cached_property
    def before(self) -> list[int]:
        """The pass of a neighbouring stage, or of the same stage, that every pass needs; -1: none."""
        found = []
        for stage, micro_batch, computation in product(range(len(self.times)), range(self.micro_batches), range(3)):
            if computation == F:
                found.append(self.number(stage - 1, micro_batch, F) if stage else -1)
            elif computation == B and stage < len(self.times) - 1:
                found.append(self.number(stage + 1, micro_batch, B))
            else:
                found.append(self.number(stage, micro_batch, computation - 1))
        return found

    @cached_property
    def stored(self) -> list[float]:
        """The bytes that every pass adds to the memory of its group."""
        found: list[float] = []
        for size, later in zip(self.sizes, self.between or self.sizes, strict=True):
            found += ((size, later - size, -later) if self.splits else (size, -size, 0.0)) * self.micro_batches
        return found

    @cached_property
    def remaining(self) -> list[float]:
        """The seconds from the begin of every pass to the end of its micro-batch, if nothing waits."""
        found = [0.0] * self.count
        for micro_batch in range(self.micro_batches):
            left = 0.0
            for stage in range(len(self.times)):
                left += self.seconds[self.number(stage, micro_batch, B)]
                found[self.number(stage, micro_batch, B)] = left
                found[self.number(stage, micro_batch, W)] = self.seconds[self.number(stage, micro_batch, W)]
            for stage in reversed(range(len(self.times))):
                left += self.seconds[self.number(stage, micro_batch, F)]
                found[self.number(stage, micro_batch, F)] = left
        return found

    @cached_property
    def lower_bound(self) -> float:
        """Seconds that no schedule beats: a group's own work, behind the forwards before its first stage; and one
        micro-batch forth and back."""
        bound, head = self.remaining[0], 0.0
        if not self.splits:
            bound = max(bound, sum(one.forward + one.input + one.weight for one in self.times))
        seen: set[int] = set()
        for stage, group in enumerate(self.groups):
            if group not in seen:
                seen.add(group)
                own = (one for one, other in zip(self.times, self.groups, strict=True) if other == group)
                bound = max(bound, head + self.micro_batches * sum(one.forward + one.input + one.weight for one in own))
            head += self.times[stage].forward
        return bound

    def peak(self, order: Sequence[int]) -> float:
        """What a group stores at most; halves of backward that follow one another may be one pass."""
        now = most = 0.0
        stored = self.stored
        for number, following in zip(order, (*order[1:], -1), strict=True):
            now += stored[number]
            if now > most and (number % 3 != B or following != number + 1):
                most = now
        return most

    def fits(self, order: Sequence[int], group: int) -> bool:
        """Whether the group has memory for that."""
        return self.peak(order) <= self.limits[group] * (1 + ROUNDING)


def synthesise(
    problem: ScheduleProblem, starts: Sequence[Schedule] = (), evaluations: int = EVALUATIONS
) -> Schedule | None:
    """The fastest schedule that is found, and of those that are slower by less than `SLIGHT` the one that stores least;
    None where the memory is too little for a single micro-batch.

    Args:
        problem: The problem to schedule.
        starts: Other schedules of the same stages, none of which is faster if it keeps the memory.
        evaluations: Of local search.
    """
    candidates = [(_numbers(problem, start), True) for start in starts]
    candidates += [(order, False) for rules in RULES if (order := _listed(problem, *rules)) is not None]
    valued: list[tuple[float, Orders]] = []
    fastest_given = math.inf
    for orders, given in candidates:
        if all(problem.fits(order, group) for group, order in enumerate(orders)):
            ends = end_times(problem, orders, problem.seconds)
            if ends is not None:
                valued.append((max(ends), orders))
                fastest_given = min(fastest_given, max(ends)) if given else fastest_given
    if not valued:
        return None
    seconds, best = min(valued, key=lambda one: one[0])
    if seconds > problem.lower_bound * (1 + ROUNDING):
        best = _improved(problem, best, evaluations)
        seconds = max(end_times(problem, best, problem.seconds) or [seconds])
        valued.append((seconds, best))
    near = [orders for taken, orders in valued if taken <= min(seconds * (1 + SLIGHT), fastest_given)]
    return _schedule(problem, min(near or [best], key=lambda orders: max(map(problem.peak, orders))))


def _numbers(problem: ScheduleProblem, schedule: Schedule) -> Orders:
    """A schedule as orders, where both halves of a backward pass are apart."""
    computations: dict[Pass, tuple[int, ...]] = {FORWARD: (F,), BACKWARD: (B, W), INPUT: (B,), WEIGHT: (W,)}
    if not problem.splits:
        computations = {FORWARD: (F,), BACKWARD: (B,), INPUT: (B,), WEIGHT: ()}
    return [
        [
            problem.number(action.stage, action.micro_batch, computation)
            for action in actions
            for computation in computations[action.computation]
        ]
        for actions in schedule
    ]


def end_times(problem: ScheduleProblem, orders: Orders, seconds: Sequence[float]) -> list[float] | None:
    """When every pass ends; None where groups wait for one another."""
    before, ends = problem.before, [-1.0] * problem.count
    at, free = [0] * len(orders), [0.0] * len(orders)
    waiting: dict[int, int] = {}
    ready = list(range(len(orders)))
    while ready:
        group = ready.pop()
        order, index, now = orders[group], at[group], free[group]
        while index < len(order):
            number = order[index]
            first = before[number]
            if first >= 0:
                end = ends[first]
                if end < 0:
                    waiting[first] = group
                    break
                if end > now:
                    now = end
            now += seconds[number]
            ends[number] = now
            index += 1
            if number in waiting:
                ready.append(waiting.pop(number))
        at[group], free[group] = index, now
    return None if waiting else ends


# List scheduling

Rule = tuple[bool, bool, float, float]
RULES: tuple[Rule, ...] = tuple(product((True, False), (True, False), (0.0, 0.5, 1.0), (0.5, 1.0)))
"""Whether backward comes before forward; whether later stages come first; how much of a weight gradient may delay what
is about to arrive; and the share of the memory that is used."""


def _listed(
    problem: ScheduleProblem, backward_first: bool, deep_first: bool, delay: float, share: float
) -> Orders | None:
    """The order of a list scheduler with these rules; None where it has no room."""
    stages, count = len(problem.times), problem.micro_batches
    number, seconds = problem.number, problem.seconds
    groups = 1 + max(problem.groups)
    own = [[stage for stage in range(stages) if problem.groups[stage] == group] for group in range(groups)]
    needed = [sum(problem.sizes[stage] for stage in mine) for mine in own]
    limits = [
        max(share * limit, min(limit, least)) * (1 + ROUNDING)
        for limit, least in zip(problem.limits, needed, strict=True)
    ]
    done = [[0, 0, 0] for _ in range(stages)]  # passes that have started
    ends = [math.inf] * problem.count
    used, free = [0.0] * groups, [0.0] * groups
    orders: Orders = [[] for _ in range(groups)]
    events = [(0.0, group) for group in range(groups)]
    expected = {*events}

    def expect(seconds: float, group: int) -> None:
        if (seconds, group) not in expected:
            expected.add((seconds, group))
            heapq.heappush(events, (seconds, group))

    def run(one: int, group: int, begin: float) -> None:
        done[problem.stage(one)][one % 3] += 1
        used[group] += problem.stored[one]
        orders[group].append(one)
        ends[one] = free[group] = begin + seconds[one]

    last = W if problem.splits else B  # frees memory

    def room(group: int, stage: int) -> bool:
        """Whether a forward leaves room for the oldest micro-batch to pass through the group's later stages."""
        micro_batch = done[stage][F]
        oldest = min(done[one][last] for one in own[group])
        reserved = 0.0
        if micro_batch > oldest:
            reserved = sum(problem.sizes[one] for one in own[group] if done[one][F] <= oldest)
        return used[group] + problem.sizes[stage] + reserved <= limits[group]

    def rank(computation: int, stage: int) -> tuple[float, ...]:
        """The priority of a pass: the smallest goes first."""
        late = (computation == B) != backward_first
        if computation == F:
            return late, -stage if deep_first else stage
        return (late, done[stage][B], -stage) if deep_first else (late, -stage)

    while events:
        now, group = heapq.heappop(events)
        expected.discard((now, group))
        if free[group] > now:
            continue
        ready: list[tuple[tuple[float, ...], int, int]] = []
        soon, blocked = math.inf, False
        for stage in own[group]:
            for computation in (F, B):
                index = done[stage][computation]
                if index == count or (computation == B and index >= done[stage][F]):
                    continue
                first = problem.before[number(stage, index, computation)]
                arrives = ends[first] if first >= 0 else 0.0
                if computation == F and not room(group, stage):
                    blocked = blocked or arrives <= now
                elif arrives <= now:
                    ready.append((rank(computation, stage), computation, stage))
                else:
                    soon = min(soon, arrives)
        weights = [
            (done[stage][W], W, stage) for stage in own[group] if problem.splits and done[stage][W] < done[stage][B]
        ]
        chosen: tuple[int, int] | None = None
        if ready:
            _, computation, stage = min(ready)
            chosen = computation, stage
        elif weights:
            _, computation, stage = min(weights)
            if blocked or now + (1 - delay) * seconds[number(stage, 0, W)] <= soon:
                chosen = computation, stage
        if chosen is None:
            if soon < math.inf:
                expect(soon, group)
            continue
        computation, stage = chosen
        run(number(stage, done[stage][computation], computation), group, now)
        alone = not seconds[number(stage, 0, W)] or used[group] > limits[group]  # between the halves there is no room
        if computation == B and problem.splits and alone:
            run(number(stage, done[stage][W], W), group, free[group])
        expect(free[group], group)
        for near in (stage - 1, stage + 1):
            if 0 <= near < stages and (other := problem.groups[near]) != group:
                expect(max(free[group], free[other]), other)
    return orders if all(passes[: last + 1] == [count] * (last + 1) for passes in done) else None


# Local search


def _improved(problem: ScheduleProblem, orders: Orders, evaluations: int) -> Orders:
    """The best orders that moves on the critical path find."""
    draw, seconds = random.Random(0), problem.seconds
    ends = end_times(problem, orders, seconds)
    assert ends is not None
    now, length = orders, max(ends)
    best, most = now, length

    def moved(group: int, index: int, to: int) -> tuple[Orders, list[float]] | None:
        """The orders after a move and their times, if it is possible."""
        order = [*now[group]]
        if not _allowed(problem, order, index, to):
            return None  # another move came first
        order.insert(to, order.pop(index))
        if not problem.fits(order, group):
            return None
        tried = [*now[:group], order, *now[group + 1 :]]
        tried_ends = end_times(problem, tried, seconds)
        return None if tried_ends is None else (tried, tried_ends)

    while evaluations > 0 and most > problem.lower_bound * (1 + ROUNDING):
        moves = list(_moves(problem, now, ends))
        draw.shuffle(moves)
        changed = False
        for move in moves[:TRIES]:
            evaluations -= 1
            if (made := moved(*move)) is not None and max(made[1]) <= length * (1 + ROUNDING):
                shorter, changed = max(made[1]) < length * (1 - ROUNDING), True
                (now, ends), length = made, max(made[1])
                if shorter:
                    break
        if length < most * (1 - ROUNDING):
            best, most = now, length
        elif not changed:
            if not moves:
                break
            made = moved(*draw.choice(moves))  # a step back, to leave a local minimum
            if made is not None and max(made[1]) <= STEP_BACK * most:
                (now, ends), length = made, max(made[1])
    return best


def _moves(problem: ScheduleProblem, orders: Orders, ends: Sequence[float]) -> Iterator[tuple[int, int, int]]:
    """Moves (group, index, new index) of passes in the blocks of a critical path."""
    for group, first, last in _blocks(problem, orders, ends):
        order = orders[group]
        for index in range(first, last + 1):
            for to in (*range(max(first, index - 8), index), *range(index + 1, min(len(order), last + 4))):
                if to != index and _allowed(problem, order, index, to):
                    yield group, index, to


def _allowed(problem: ScheduleProblem, order: Sequence[int], index: int, to: int) -> bool:
    """Whether a pass may be moved: its stage keeps the order of micro-batches, and of the passes of each."""
    number = order[index]
    computation, stage, micro_batch = number % 3, problem.stage(number), problem.micro_batch(number)
    for other in order[to:index] if to < index else order[index + 1 : to + 1]:
        if problem.stage(other) == stage and (other % 3 == computation or problem.micro_batch(other) == micro_batch):
            return False
    return True


def _blocks(problem: ScheduleProblem, orders: Orders, ends: Sequence[float]) -> Iterator[tuple[int, int, int]]:
    """The parts (group, first, last index) of a critical path in which a group runs pass after pass."""
    places = {number: (group, index) for group, order in enumerate(orders) for index, number in enumerate(order)}
    number = max(range(problem.count), key=ends.__getitem__)
    group, last = places[number]
    first = last
    while True:
        number = orders[group][first]
        begin = ends[number] - problem.seconds[number]
        slack = ROUNDING * ends[number]
        if first and ends[orders[group][first - 1]] >= begin - slack:
            first -= 1
            continue
        yield group, first, last
        earlier = problem.before[number]
        if earlier < 0 or begin <= slack:
            return
        group, last = places[earlier]
        first = last


# Results


def _schedule(problem: ScheduleProblem, orders: Orders) -> Schedule:
    """Orders as a schedule, in which halves of backward that follow one another are one pass wherever that delays
    nothing, or there is no memory for what is stored between them."""
    seconds = [*problem.seconds]
    ends = end_times(problem, orders, seconds)
    assert ends is not None
    most = max(ends) * (1 + ROUNDING)
    for group, order in enumerate(orders):
        now = 0.0
        for one, following in pairwise(order):
            now += problem.stored[one]
            if one % 3 == B and following == one + 1:
                apart = seconds[one], seconds[following]
                seconds[one], seconds[following] = sum(apart), 0.0
                ends = end_times(problem, orders, seconds)
                assert ends is not None
                if now > problem.limits[group] * (1 + ROUNDING):
                    most = max(most, max(ends) * (1 + ROUNDING))
                elif max(ends) > most:
                    seconds[one], seconds[following] = apart
    return tuple(tuple(_actions(problem, order, seconds)) for order in orders)


def _actions(problem: ScheduleProblem, order: Sequence[int], seconds: Sequence[float]) -> Iterator[Action]:
    pairs = zip(order, (*order[1:], -1), strict=True)
    joined = {
        one
        for one, following in pairs
        if one % 3 == B and (not problem.splits or (following == one + 1 and not seconds[following]))
    }
    for number in order:
        computation, stage, micro_batch = number % 3, problem.stage(number), problem.micro_batch(number)
        if computation == W and number - 1 in joined:
            continue
        yield Action((FORWARD, BACKWARD if number in joined else INPUT, WEIGHT)[computation], micro_batch, stage)
