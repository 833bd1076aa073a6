"""Schedules: complete, free of deadlocks, in torch's order, with known bubbles and activations."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from strategies.core.errors import StrategyError
from strategies.lowering.pipeline_schedule import (
    BACKWARD,
    FORWARD,
    INPUT,
    KINDS,
    ROUND_ROBIN,
    V_SHAPED,
    WEIGHT,
    Action,
    Schedule,
    gradient_passes,
    in_a_v,
    in_one_process,
    last_stage,
    make_schedule,
    owners_of,
    peak_activations,
    round_robin,
    stages_of,
)
from strategies.lowering.pipeline_timeline import StageTimes, bubble

SIZES = [(2, 2), (2, 5), (3, 3), (4, 8), (4, 4), (3, 5), (8, 16)]
COMPUTATIONS = {"FORWARD": FORWARD, "FULL_BACKWARD": BACKWARD, "BACKWARD_INPUT": INPUT, "BACKWARD_WEIGHT": WEIGHT}
TORCH = {
    "interleaved_1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "zero_bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
}


def every(kinds: tuple[str, ...] = KINDS) -> list[tuple[str, int, int, int]]:
    """Valid (kind, groups, micro-batches, virtual stages)."""
    found = []
    for kind in kinds:
        for groups, micro_batches in SIZES:
            for virtual in (1, 2, 3) if kind in ROUND_ROBIN else (1 + (kind == V_SHAPED),):
                if kind not in ROUND_ROBIN or micro_batches % max(1, micro_batches // groups) == 0:
                    found.append((kind, groups, micro_batches, virtual))
    return found


@pytest.mark.parametrize("case", every(), ids=str)
def test_every_micro_batch_runs_forward_and_backward_once_in_order(case: tuple[str, int, int, int]) -> None:
    _, groups, micro_batches, virtual = case
    schedule = make_schedule(*case)
    owners = in_a_v(groups) if case[0] == V_SHAPED else round_robin(groups, virtual)
    assert last_stage(schedule) == groups * virtual - 1
    for group, actions in enumerate(schedule):
        for stage in stages_of(group, owners):
            mine = [action for action in actions if action.stage == stage]
            for directions in ({FORWARD}, {BACKWARD, INPUT}, {BACKWARD, WEIGHT}):
                assert [a.micro_batch for a in mine if a.computation in directions] == list(range(micro_batches))
            assert sum(len(gradient_passes(action)) for action in mine) == 3 * micro_batches
        assert all(owners[action.stage] == group for action in actions)
    assert owners_of(schedule) == owners


@pytest.mark.parametrize("case", every(tuple(TORCH)), ids=str)
def test_the_order_is_that_of_torch(case: tuple[str, int, int, int]) -> None:
    kind, groups, micro_batches, virtual = case
    arguments = SimpleNamespace(
        n_local_stages=virtual,
        microbatches_per_round=micro_batches // max(1, micro_batches // groups),
        pp_group_size=groups,
        num_stages=groups * virtual,
        _n_microbatches=micro_batches,
    )
    for group, actions in enumerate(make_schedule(*case)):
        theirs = TORCH[kind]._calculate_single_rank_operations(arguments, group)
        merged = torch_schedules._merge_bw([one for one in theirs if one is not None])
        assert [(a.computation, a.micro_batch, a.stage) for a in actions] == [
            (COMPUTATIONS[one.computation_type.name], one.microbatch_index, one.stage_index) for one in merged
        ]


def run_with_blocking_receives(schedule: Schedule) -> None:
    """Every group runs its own list; messages of a link arrive in the order in which they were sent, and a
    receive blocks until the next one."""
    owners, last = owners_of(schedule), last_stage(schedule)
    links: dict[tuple[int, str], deque[tuple[int, int]]] = {
        (group, computation): deque() for group in range(len(schedule)) for computation in (FORWARD, BACKWARD)
    }  # by receiving group
    left = [deque(actions) for actions in schedule]
    while any(left):
        moved = False
        for group, actions in enumerate(left):
            while actions:
                computation, number, stage = actions[0].computation, actions[0].micro_batch, actions[0].stage
                ahead = computation == FORWARD
                receives = computation != WEIGHT and stage != (0 if ahead else last)
                link = links[group, FORWARD if ahead else BACKWARD]
                if receives and not link:
                    break
                if receives:
                    assert link.popleft() == (stage, number), "another message comes first"
                if computation != WEIGHT and stage != (last if ahead else 0):
                    other = stage + (1 if ahead else -1)
                    links[owners[other], FORWARD if ahead else BACKWARD].append((other, number))
                actions.popleft()
                moved = True
        assert moved, f"all wait: {[list(actions)[:1] for actions in left]}"
    assert not any(links.values())


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != V_SHAPED])
def test_blocking_receives_never_wait_in_a_circle(kind: str) -> None:
    tried = 0
    for groups in range(2, 9):
        for micro_batches in range(groups, 4 * groups + 1):
            for virtual in (1, 2, 3, 4) if kind in ROUND_ROBIN else (1,):
                if kind in ROUND_ROBIN and micro_batches % (micro_batches // groups):
                    continue
                run_with_blocking_receives(make_schedule(kind, groups, micro_batches, virtual))
                tried += 1
    assert tried > 100


def test_messages_in_another_order_are_noticed() -> None:
    schedule = make_schedule("gpipe", 2, 2)
    crossed = (schedule[0], (schedule[1][1], schedule[1][0], *schedule[1][2:]))
    with pytest.raises(AssertionError, match="another message comes first"):
        run_with_blocking_receives(crossed)


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved_1f1b"])
@pytest.mark.parametrize(("stages", "micro_batches"), [size for size in SIZES if size[1] % size[0] == 0])
@pytest.mark.parametrize("virtual", [1, 2, 3])
def test_bubble_of_equal_stages(kind: str, stages: int, micro_batches: int, virtual: int) -> None:
    if kind not in ROUND_ROBIN:
        virtual = 1
    found = bubble(make_schedule(kind, stages, micro_batches, virtual), [StageTimes(1.0, 1.0, 1.0)] * stages * virtual)
    assert found == pytest.approx((stages - 1) / (virtual * micro_batches + stages - 1))


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8), (8, 16)])
@pytest.mark.parametrize("virtual", [1, 2])
def test_zero_bubble_waits_a_third(stages: int, micro_batches: int, virtual: int) -> None:
    found = bubble(
        make_schedule("zero_bubble", stages, micro_batches, virtual), [StageTimes(1.0, 1.0, 1.0)] * stages * virtual
    )
    assert found == pytest.approx((stages - 1) / (3 * virtual * micro_batches + stages - 1))


def test_bubble_of_unequal_stages() -> None:
    schedule = make_schedule("gpipe", 2, 2)
    # 1 + 2 x 3 forward and 2 x 6 + 2 backward make 21; both are busy for 2 x 3 and 2 x 9 of 42
    assert bubble(schedule, [StageTimes(1.0, 1.0, 1.0), StageTimes(3.0, 3.0, 3.0)]) == pytest.approx(1 - 24 / 42)


def test_live_activations() -> None:
    assert [peak_activations(actions) for actions in make_schedule("gpipe", 4, 8)] == [8, 8, 8, 8]
    assert [peak_activations(actions) for actions in make_schedule("1f1b", 4, 8)] == [4, 3, 2, 1]
    assert [peak_activations(actions) for actions in make_schedule("interleaved_1f1b", 4, 8, 2)] == [11, 9, 7, 5]
    assert [peak_activations(actions) for actions in make_schedule("zero_bubble", 4, 8)] == [4, 4, 4, 4]
    assert [peak_activations(actions) for actions in make_schedule("zbv", 4, 8, 2)] == [8, 8, 8, 8]
    assert peak_activations(make_schedule("interleaved_1f1b", 2, 2, 2)[1], [1.0, 10.0, 1.0, 2.0]) == 22


def test_stages_that_wait_for_one_another() -> None:
    early = (Action(BACKWARD, 0, 0), Action(FORWARD, 0, 0))
    with pytest.raises(ValueError, match="wait for one another"):
        in_one_process((early, (Action(FORWARD, 0, 1), Action(BACKWARD, 0, 1))))


def test_invalid_schedules_are_refused() -> None:
    with pytest.raises(StrategyError, match="Did you mean '1f1b'"):
        make_schedule("1f1", 2, 2)
    with pytest.raises(StrategyError, match="one stage per rank, not 2; take interleaved_1f1b or zero_bubble"):
        make_schedule("1f1b", 2, 2, 2)
    with pytest.raises(StrategyError, match="has 2 stages per rank, not 1"):
        make_schedule("zbv", 2, 2)
    with pytest.raises(StrategyError, match=r"5 micro-batches cannot be cut into 2 rounds .* a multiple of 2"):
        make_schedule("zero_bubble", 2, 5)
