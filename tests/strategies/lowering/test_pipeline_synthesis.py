"""Synthesised schedules: complete, free of deadlocks, within memory, never slower than named ones, near optima."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import permutations, product

import pytest

from strategies.lowering.pipeline_schedule import (
    BACKWARD,
    FORWARD,
    INPUT,
    ROUND_ROBIN,
    WEIGHT,
    Action,
    Schedule,
    as_text,
    from_text,
    gradient_passes,
    make_schedule,
    owners_of,
    peak_activations,
)
from strategies.lowering.pipeline_synthesis import ScheduleProblem, synthesise
from strategies.lowering.pipeline_timeline import StageTimes, makespan
from strategies.runtime.pipeline_stage import arrivals

NAMED = (("1f1b", 1), ("zero_bubble", 1), ("interleaved_1f1b", 2), ("zero_bubble", 2), ("zbv", 2))


def table(seed: int, *, large: bool) -> tuple[list[StageTimes], list[float], int]:
    """Random times and sizes of two halves of every stage, even or not, and a number of micro-batches."""
    draw = random.Random(seed)
    groups = draw.choice((2, 3, 4, 6, 8) if large else (2, 3))
    spread, weight, send = draw.choice((0.0, 0.3, 1.0, 3.0)), draw.choice((0.0, 0.5, 1.0, 1.5)), draw.choice((0.0, 0.2))

    def some(mean: float) -> float:
        return mean * (1 + spread * draw.random())

    times = [StageTimes(some(1.0) + send, some(1.0) + send, some(weight)) for _ in range(2 * groups)]
    sizes = [some(1.0) for _ in times]
    return times, sizes, groups * draw.choice((1, 2, 3) if large else (1, 2))


def cut(values: Sequence[float], virtual: int) -> list[float]:
    """Values of half stages as those of the stages of a schedule with `virtual` ones per group."""
    return list(values) if virtual == 2 else [a + b for a, b in zip(values[::2], values[1::2], strict=True)]


def check(schedule: Schedule, problem: ScheduleProblem) -> None:
    """Every pass once, forward first, in the order of micro-batches, within memory; a rank gets what it waits for."""
    for group, actions in enumerate(schedule):
        for stage in (stage for stage, own in enumerate(problem.groups) if own == group):
            halves = [half for action in actions if action.stage == stage for half in gradient_passes(action)]
            for computation in (FORWARD, INPUT, WEIGHT):
                assert [half.micro_batch for half in halves if half.computation == computation] == list(
                    range(problem.micro_batches)
                )
            assert len(halves) == 3 * problem.micro_batches
            for number in range(problem.micro_batches):
                computations = [half.computation for half in halves if half.micro_batch == number]
                assert computations == [FORWARD, INPUT, WEIGHT]
        assert peak_activations(actions, problem.sizes) <= problem.limits[group] * (1 + 1e-6)
        assert from_text(as_text(actions)) == actions
    for group in range(len(schedule)):
        for ahead in (True, False):
            coming = [one for other in range(len(schedule)) for one in arrivals(schedule, other, group, ahead=ahead)]
            computations, step = ((FORWARD,), -1) if ahead else ((BACKWARD, INPUT), 1)
            sources = {stage + 1: owner for stage, owner in enumerate(problem.groups)}  # by one more than the stage
            waited = [
                (a.stage, a.micro_batch)
                for a in schedule[group]
                if a.computation in computations and sources.get(a.stage + 1 + step, group) != group
            ]
            assert sorted(coming) == sorted(waited)


def never_slower(seed: int, *, large: bool) -> list[float]:
    """Seconds of synthesised schedules relative to named ones at the memory of these, of one random table."""
    halves, half_sizes, micro_batches = table(seed, large=large)
    groups, found = len(halves) // 2, []
    for kind, virtual in NAMED:
        computations = ([getattr(one, computation) for one in halves] for computation in ("forward", "input", "weight"))
        times = [
            StageTimes(*one) for one in zip(*(cut(computation, virtual) for computation in computations), strict=True)
        ]
        sizes = cut(half_sizes, virtual)
        named = make_schedule(kind, groups, micro_batches, virtual)
        most = max(peak_activations(actions, sizes) for actions in named)
        problem = ScheduleProblem(times, owners_of(named), micro_batches, sizes, [most] * groups)
        made = synthesise(problem, [named])
        assert made is not None
        check(made, problem)
        seconds = makespan(made, times)
        assert problem.lower_bound * (1 - 1e-9) <= seconds <= makespan(named, times) * (1 + 1e-9)
        found.append(seconds / makespan(named, times))
    return found


def test_never_slower_than_named_schedules_at_their_memory() -> None:
    ratios = [never_slower(seed, large=False) for seed in range(12)]
    means = [sum(of_kind) / len(ratios) for of_kind in zip(*ratios, strict=True)]
    assert means[0] < 0.93 and max(means) < 1


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 500, 50))
def test_never_slower_over_500_tables(first: int) -> None:
    ratios = [never_slower(seed, large=True) for seed in range(first, first + 50)]
    assert all(sum(of_kind) / len(ratios) < 1 for of_kind in zip(*ratios, strict=True))


def test_without_named_schedules_the_order_is_found_anew() -> None:
    even = [StageTimes(1.0, 1.0, 1.0)] * 4
    for micro_batches in (4, 8):
        problem = ScheduleProblem(even, range(4), micro_batches, [1.0] * 4, [4.0] * 4)
        made = synthesise(problem)
        assert made is not None
        check(made, problem)
        assert makespan(made, even) <= 1.08 * makespan(make_schedule("zero_bubble", 4, micro_batches), even)


def test_more_memory_leaves_nothing_to_wait_for() -> None:
    """With 2 s - 1 micro-batches in a group only the forwards before its first are waited for (ZB-H2)."""
    even = [StageTimes(1.0, 1.0, 1.0)] * 4
    problem = ScheduleProblem(even, range(4), 12, [1.0] * 4, [7.0] * 4)
    made = synthesise(problem)
    assert made is not None
    check(made, problem)
    assert makespan(made, even) == problem.lower_bound == 3 * 12 + 3


def test_of_equally_fast_schedules_the_one_that_stores_least() -> None:
    times = [StageTimes(number, number, number) for number in (1.0, 6.0, 4.0)]
    problem = ScheduleProblem(times, range(3), 6, [1.0] * 3, [8.0] * 3)
    made = synthesise(problem, [make_schedule("1f1b", 3, 6)])
    assert made is not None and makespan(made, times) == 109.0
    assert max(peak_activations(actions, [1.0] * 3) for actions in made) == 4.0  # that with the most took 6


def optimum(problem: ScheduleProblem) -> float:
    """By trying every order of two groups with a stage each."""
    orders = []
    for stage in range(2):
        passes = [(computation, n) for computation in (FORWARD, INPUT, WEIGHT) for n in range(problem.micro_batches)]
        own = set()
        for order in permutations(passes):
            at = {one: index for index, one in enumerate(order)}
            numbers = range(problem.micro_batches)
            if all(at[FORWARD, n] < at[INPUT, n] < at[WEIGHT, n] for n in numbers) and all(
                at[computation, n] < at[computation, n + 1]
                for computation in (FORWARD, INPUT, WEIGHT)
                for n in numbers[:-1]
            ):
                actions = tuple(Action(computation, n, stage) for computation, n in order)
                if peak_activations(actions, problem.sizes) <= problem.limits[stage]:
                    own.add(actions)
        orders.append(sorted(own, key=as_text))
    best = float("inf")
    for schedule in product(*orders):
        try:
            best = min(best, makespan(schedule, problem.times))
        except ValueError:
            continue  # groups wait for one another
    return best


def test_small_cases_are_optimal() -> None:
    draw = random.Random(1)
    for limit in (1.0, 2.0):
        for _ in range(5):
            times = [StageTimes(draw.random(), draw.random(), draw.random()) for _ in range(2)]
            problem = ScheduleProblem(times, (0, 1), 2, [1.0, 1.0], [limit, limit])
            made = synthesise(problem)
            assert made is not None
            assert makespan(made, times) == pytest.approx(optimum(problem))


def test_backward_in_one_piece() -> None:
    """As torch.compile demands."""
    times = [StageTimes(1.0, 1.5, 0.5), StageTimes(2.0, 1.0, 1.0), StageTimes(1.0, 1.0, 1.0)]
    named = make_schedule("1f1b", 3, 6)
    problem = ScheduleProblem(times, range(3), 6, [1.0] * 3, [3.0] * 3, splits=False)
    made = synthesise(problem, [named])
    assert made is not None and {action.computation for actions in made for action in actions} == {FORWARD, BACKWARD}
    check(made, problem)
    assert problem.lower_bound <= makespan(made, times) <= makespan(named, times)


def test_halves_are_only_run_apart_where_that_helps() -> None:
    even = [StageTimes(1.0, 1.0, 1.0)] * 2
    made = synthesise(ScheduleProblem(even, range(2), 4, [1.0] * 2, [2.0] * 2))
    assert made is not None
    assert as_text(made[0]).count("B") >= 3  # nothing waits for stage 0
    assert makespan(made, even) == 3 * 4 + 1


def test_too_little_memory() -> None:
    assert synthesise(ScheduleProblem([StageTimes(1.0, 1.0, 1.0)] * 2, (0, 1), 2, [1.0, 1.0], [1.0, 0.5])) is None


def test_virtual_stages_leave_room_for_a_micro_batch_to_pass() -> None:
    """With the least memory one micro-batch follows another."""
    times = [StageTimes(1.0, 1.0, 1.0)] * 6
    problem = ScheduleProblem(times, [0, 1, 0, 1, 0, 1], 4, [1.0] * 6, [3.0, 3.0])
    made = synthesise(problem)
    assert made is not None
    check(made, problem)


def test_the_same_schedule_every_time() -> None:
    halves, sizes, count = table(3, large=True)
    problem = ScheduleProblem(
        halves, [stage % (len(halves) // 2) for stage in range(len(halves))], count, sizes, [30.0] * (len(halves) // 2)
    )
    assert synthesise(problem) == synthesise(problem)


@pytest.mark.parametrize("kind", ROUND_ROBIN)
def test_values_arrive_in_the_order_in_which_named_schedules_need_them(kind: str) -> None:
    schedule = make_schedule(kind, 3, 6, 2)
    for group, actions in enumerate(schedule):
        needed = [(a.stage, a.micro_batch) for a in actions if a.computation == FORWARD and a.stage]
        assert arrivals(schedule, (group - 1) % 3, group, ahead=True) == needed
