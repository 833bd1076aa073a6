"""The order in which the ranks of a pipeline run forward and backward of their stages: plain lists, made by pure
functions.

`groups` of ranks share the stages. With several per group (virtual stages) they are dealt out round robin, so stage k
is run by group k % groups, or in a V, so group g runs the stages g and 2 groups - 1 - g. Invariant: every stage runs
every micro-batch forward once and, later, backward once, in the order of the micro-batches, and neighbouring groups
send and receive in one order, so waiting never goes in a circle.

The orders of interleaved_1f1b (Narayanan et al., 2021), zero_bubble (ZB-H1 of Qi et al., 2023, dealt out in the same
way) and zbv (ZB-V of Qi et al., 2024) are those of torch.distributed.pipelining.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, Literal, get_args

from strategies.core.errors import StrategyError, closest

Kind = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"]
KINDS: tuple[str, ...] = get_args(Kind)
ROUND_ROBIN = ("interleaved_1f1b", "zero_bubble")
"""The schedules in which a group of ranks may have several stages, dealt out round robin."""
V_SHAPED = "zbv"
"""The schedule with two stages per group, dealt out in a V."""
Pass = Literal["forward", "backward", "input", "weight"]
FORWARD: Pass = "forward"
BACKWARD: Pass = "backward"
INPUT: Pass = "input"
WEIGHT: Pass = "weight"


@dataclass(frozen=True)
class Action:
    """One pass of one micro-batch through one stage. `backward` is both halves at once: `input`, the gradients that the
    stage before waits for, and `weight`, those of parameters."""

    computation: Pass
    micro_batch: int
    stage: int


Schedule = tuple[tuple[Action, ...], ...]
"""The actions of every group of ranks, that of the first stage first."""
Owners = tuple[int, ...]
"""The group of ranks that runs a stage, by stage."""


def round_robin(groups: int, virtual: int) -> Owners:
    """Stage k on group k % groups, `virtual` stages each."""
    return tuple(range(groups)) * virtual


def in_a_v(groups: int) -> Owners:
    """Two stages each: the first half of the stages in the order of the groups, the other half on the way back."""
    return (*range(groups), *reversed(range(groups)))


def owners_of(schedule: Schedule) -> Owners:
    """The group that runs every stage."""
    owners = {action.stage: group for group, actions in enumerate(schedule) for action in actions}
    return tuple(owners[stage] for stage in range(len(owners)))


def owners_in(pipeline: Mapping[str, Any]) -> Owners:
    """That of `pipeline` in a plan.json, which earlier versions wrote without `groups`."""
    groups, virtual = int(pipeline["stages"]), int(pipeline.get("virtual_stages", 1))
    return tuple(map(int, pipeline.get("groups", round_robin(groups, virtual))))


def stages_of(group: int, owners: Sequence[int]) -> list[int]:
    """The stages that a group runs."""
    return [stage for stage, owner in enumerate(owners) if owner == group]


def rounds(groups: int, micro_batches: int) -> int:
    """The number of rounds in which the micro-batches of a `ROUND_ROBIN` schedule pass through a group's stages.

    A round has about `groups` micro-batches.

    Raises StrategyError where they do not divide into rounds of one size.
    """
    count = max(1, micro_batches // groups)
    if micro_batches % count:
        raise StrategyError(
            "MW432",
            f"{micro_batches} micro-batches cannot be cut into {count} rounds of one size for {groups} stages; take a "
            f"multiple of {groups}.",
        )
    return count


def make_schedule(kind: str, groups: int, micro_batches: int, virtual: int = 1) -> Schedule:
    """`gpipe` runs everything forward, then everything backward; `1f1b` starts backward as soon as it can, so that
    group g holds the activations of no more than `groups - g` micro-batches. `interleaved_1f1b` gives each group
    `virtual` stages, which makes the pipeline faster to fill; `zero_bubble` computes the gradients of parameters while
    it would wait; `zbv` does so with two stages per group in a V. Raises StrategyError for other kinds, and for numbers
    that do not fit the kind."""
    if kind not in KINDS:
        raise StrategyError("MW432", f"There is no pipeline schedule {kind!r}.{closest(kind, KINDS)}")
    if kind == V_SHAPED:
        if virtual != 2:
            raise StrategyError("MW432", f"The schedule {kind!r} has 2 stages per rank, not {virtual}.")
        return tuple(_in_a_v(group, groups, micro_batches) for group in range(groups))
    if virtual > 1 and kind not in ROUND_ROBIN:
        raise StrategyError(
            "MW432", f"The schedule {kind!r} has one stage per rank, not {virtual}; take {' or '.join(ROUND_ROBIN)}."
        )
    return tuple(_actions(kind, group, groups, micro_batches, virtual) for group in range(groups))


def _actions(kind: str, group: int, groups: int, micro_batches: int, virtual: int) -> tuple[Action, ...]:
    """The 1F1B order: warm-up forwards, then forward and backward in alternation, then the remaining backwards. Weight
    gradients follow `late` passes behind."""
    size = micro_batches // rounds(groups, micro_batches) if kind in ROUND_ROBIN else micro_batches
    count, behind = micro_batches * virtual, groups - 1 - group
    ahead = {
        "gpipe": count,
        "1f1b": behind,
        "interleaved_1f1b": (virtual - 1) * size + 2 * behind,
        "zero_bubble": (virtual - 1) * size + behind,
    }[kind]
    ahead, late = min(ahead, count), group if kind == "zero_bubble" else 0

    def action(computation: Pass, number: int) -> Action:
        turn, place = divmod(number, size * virtual)
        chunk = place // size
        stage = (chunk if computation == FORWARD else virtual - 1 - chunk) * groups + group
        return Action(computation, turn * size + place % size, stage)

    found = [action(FORWARD, number) for number in range(ahead)]
    for number in range(count):
        if ahead + number < count:
            found.append(action(FORWARD, ahead + number))
        found.append(action(INPUT if late else BACKWARD, number))
        if late and number >= late:
            found.append(action(WEIGHT, number - late))
    if late:
        found += [action(WEIGHT, number) for number in range(max(count - late, 0), count)]
    return tuple(found)


def _in_a_v(group: int, groups: int, micro_batches: int) -> tuple[Action, ...]:
    """The actions of ZB-V for a group. Both halves of a backward pass follow one another but where the pipeline drains:
    there weight gradients come last. Few micro-batches run in the order of more of them, without these."""
    down, up = group, 2 * groups - 1 - group
    started = dict.fromkeys(product((down, up), (FORWARD, INPUT, WEIGHT)), 0)
    found: list[Action] = []

    def run(stage: int, *computations: Pass) -> None:
        for computation in computations:
            found.append(Action(computation, started[stage, computation], stage))
            started[stage, computation] += 1

    count = max(2 * groups - 1, micro_batches)
    for _ in range(2 * (groups - group) - 1):
        run(down, FORWARD)
    for _ in range(group):
        run(up, FORWARD)
        run(down, FORWARD)
    for _ in range(groups - group):
        run(up, FORWARD, INPUT, WEIGHT)
    while started[up, FORWARD] < count:
        if started[down, FORWARD] < count:
            run(down, FORWARD)
        run(down, INPUT, WEIGHT)
        run(up, FORWARD, INPUT, WEIGHT)
    for _ in range(group):
        run(down, INPUT)
        run(up, INPUT)
    for _ in range(groups - group):
        run(down, INPUT, WEIGHT)
    for stage in (up, down):
        while started[stage, WEIGHT] < count:
            run(stage, WEIGHT)
    return _joined([action for action in found if action.micro_batch < micro_batches])


def _joined(actions: Sequence[Action]) -> tuple[Action, ...]:
    """`actions`, where both halves of a backward pass that follow one another are one."""
    found: list[Action] = []
    for action in actions:
        if found and action.computation == WEIGHT and found[-1] == replace(action, computation=INPUT):
            found[-1] = replace(action, computation=BACKWARD)
        else:
            found.append(action)
    return tuple(found)


def in_one_process(schedule: Schedule) -> tuple[Action, ...]:
    """All actions, each after those whose results it needs. Raises ValueError if a group waits forever."""
    found: dict[Action, None] = {}
    done: set[Action] = set()
    left = [list(actions) for actions in schedule]
    last = last_stage(schedule)
    while any(left):
        before = len(found)
        for actions in left:
            while actions and done.issuperset(needed(actions[0], last)):
                action = actions.pop(0)
                found[action] = None
                done.update(gradient_passes(action))
        if len(found) == before:
            raise ValueError(f"the stages wait for one another: {[actions[:1] for actions in left]}")
    return tuple(found)


def last_stage(schedule: Schedule) -> int:
    """The number of the last stage."""
    return max(action.stage for actions in schedule for action in actions)


def gradient_passes(action: Action) -> tuple[Action, ...]:
    """What an action does: `backward` does two things."""
    if action.computation != BACKWARD:
        return (action,)
    return Action(INPUT, action.micro_batch, action.stage), Action(WEIGHT, action.micro_batch, action.stage)


def needed(action: Action, last: int) -> tuple[Action, ...]:
    """What must have been done before an action, in its own stage or a neighbour, as `gradient_passes`."""
    number, stage = action.micro_batch, action.stage
    if action.computation == FORWARD:
        return (Action(FORWARD, number, stage - 1),) if stage else ()
    if action.computation == WEIGHT:
        return (Action(INPUT, number, stage),)
    own = Action(FORWARD, number, stage)
    return (own, Action(INPUT, number, stage + 1)) if stage < last else (own,)


LETTERS = {FORWARD: "F", BACKWARD: "B", INPUT: "I", WEIGHT: "W"}


def as_text(actions: Sequence[Action]) -> str:
    """Actions in the notation of torch.distributed.pipelining: stage, letter of the pass, micro-batch."""
    return " ".join(f"{action.stage}{LETTERS[action.computation]}{action.micro_batch}" for action in actions)


def from_text(text: str) -> tuple[Action, ...]:
    """The actions that `as_text` wrote."""
    computations = {letter: computation for computation, letter in LETTERS.items()}
    parts = (re.fullmatch(r"(\d+)([FBIW])(\d+)", word) for word in text.split())
    return tuple(Action(computations[one[2]], int(one[3]), int(one[1])) for one in parts if one is not None)


def split_stages(actions: Sequence[Action]) -> frozenset[int]:
    """The stages of a group that run some backward in two halves."""
    return frozenset(action.stage for action in actions if action.computation == INPUT)


Sizes = Sequence[float] | Mapping[int, float]
"""By stage."""


@cache
def places_of(schedule: Schedule) -> Mapping[tuple[int, int, bool], int]:
    """The place in its group's order of the pass of a stage and micro-batch that goes forward (True), or whose input
    gradients are sent back (False)."""
    return {
        (action.stage, action.micro_batch, action.computation == FORWARD): place
        for actions in schedule
        for place, action in enumerate(actions)
        if action.computation != WEIGHT
    }


def unreleased(schedule: Schedule, group: int, sizes: Sizes) -> Iterator[float]:
    """For every action of a group what it has sent back and keeps, because it does not know yet that it was received:
    every message shows that the passes before it have run. `sizes` are those of the gradients of a stage's inputs."""
    places, owners = places_of(schedule), owners_of(schedule)
    sent: list[tuple[int, int, float]] = []
    for action in schedule[group]:
        stage, number, ahead = action.stage, action.micro_batch, action.computation == FORWARD
        source = stage + (-1 if ahead else 1)
        if action.computation != WEIGHT and 0 <= source < len(owners):
            passed = places[source, number, ahead]
            sent = [one for one in sent if one[0] != owners[source] or one[1] > passed]
        yield sum(size for _, _, size in sent)
        if action.computation in (BACKWARD, INPUT) and stage and owners[stage - 1] != group:
            sent.append((owners[stage - 1], places[stage - 1, number, False], sizes[stage]))


def stored_before(actions: Sequence[Action], sizes: Sizes, between: Sizes) -> Iterator[tuple[Action, float, float]]:
    """Every action of a group, what its own micro-batch stores in its stage before it, and what all others store.

    Args:
        sizes: what a micro-batch stores from forward to backward, or to the first half of it.
        between: what it stores between the two halves.
    """
    stored: dict[tuple[int, int], float] = {}
    for action in actions:
        at = action.stage, action.micro_batch
        own = stored.pop(at, 0.0)
        yield action, own, sum(stored.values())
        if action.computation in (FORWARD, INPUT):
            stored[at] = (sizes if action.computation == FORWARD else between)[action.stage]


def peak_activations(actions: Sequence[Action], sizes: Sizes | None = None, between: Sizes | None = None) -> float:
    """The peak of the activations that a group stores: the number of passes, or the sum of their `sizes`. Between the
    two halves of a backward that is split, a pass stores as much as before, or what `between` says."""
    counted = dict.fromkeys((action.stage for action in actions), 1.0) if sizes is None else sizes
    stored = stored_before(actions, counted, counted if between is None else between)
    return max((own + others for action, own, others in stored if action.computation != FORWARD), default=0.0)
