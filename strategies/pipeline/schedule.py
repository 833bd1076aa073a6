"""In which order every stage runs forward and backward of its micro-batches: plain lists, made by pure functions.

Invariant: every stage runs every micro-batch forward once and, later, backward once, in the order of the micro-batches,
so that neighbouring stages send and receive in one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from strategies.errors import StrategyError, closest

Kind = Literal["gpipe", "1f1b"]
KINDS: tuple[str, ...] = get_args(Kind)
FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Action:
    """One pass of one micro-batch through one stage."""

    way: Literal["forward", "backward"]
    micro_batch: int


Schedule = tuple[tuple[Action, ...], ...]
"""The actions of every stage, first stage first."""


def make_schedule(kind: str, stages: int, micro_batches: int) -> Schedule:
    """`gpipe` runs everything forward, then everything backward; `1f1b` starts backward as soon as it can, so that
    stage s holds the activations of no more than `stages - s` micro-batches. Raises StrategyError for other kinds."""
    if kind not in KINDS:
        raise StrategyError(f"There is no pipeline schedule {kind!r}.{closest(kind, KINDS)}")
    return tuple(
        _alternating(micro_batches if kind == "gpipe" else min(stages - stage - 1, micro_batches), micro_batches)
        for stage in range(stages)
    )


def _alternating(ahead: int, micro_batches: int) -> tuple[Action, ...]:
    """`ahead` micro-batches forward, then one forward and one backward in turn, then backward what is left."""
    forward = [Action("forward", number) for number in range(micro_batches)]
    backward = [Action("backward", number) for number in range(micro_batches)]
    found, rest = forward[:ahead], forward[ahead:]
    for one, other in zip(rest, backward, strict=False):
        found += [one, other]
    return (*found, *backward[len(rest) :])


def in_one_process(schedule: Schedule) -> tuple[tuple[int, Action], ...]:
    """All actions as (stage, action), each after those whose results it needs. Raises ValueError if a stage waits
    forever."""
    found: dict[tuple[int, Action], None] = {}
    left = [list(actions) for actions in schedule]
    while any(left):
        before = len(found)
        for stage, actions in enumerate(left):
            while actions and all(one in found for one in _needed(stage, actions[0], len(schedule))):
                found[stage, actions.pop(0)] = None
        if len(found) == before:
            raise ValueError(f"the stages wait for one another: {[actions[:1] for actions in left]}")
    return tuple(found)


def _needed(stage: int, action: Action, stages: int) -> list[tuple[int, Action]]:
    """What must have run before an action, in its own stage or a neighbour."""
    if action.way == FORWARD:
        return [(stage - 1, action)] if stage else []
    after = [(stage + 1, action)] if stage + 1 < stages else []
    return [(stage, Action("forward", action.micro_batch)), *after]


def makespan(schedule: Schedule, work: Sequence[float]) -> float:
    """When the last stage is done: `work` is the time of one forward pass by stage, backward takes twice as long, and
    sends take no time."""
    ends: dict[tuple[int, Action], float] = {}
    free = [0.0] * len(schedule)
    for stage, action in in_one_process(schedule):
        ready = max([free[stage], *(ends[one] for one in _needed(stage, action, len(schedule)))])
        free[stage] = ends[stage, action] = ready + work[stage] * (1 if action.way == FORWARD else 2)
    return max(free)


def bubble(schedule: Schedule, work: Sequence[float]) -> float:
    """The predicted share of the time in which a stage waits, over all stages. Equal stages give (s - 1) / (m + s - 1)
    for m micro-batches."""
    busy = sum(work[stage] * 3 * len(actions) / 2 for stage, actions in enumerate(schedule))
    return 1 - busy / (makespan(schedule, work) * len(schedule))


def held(actions: Sequence[Action]) -> int:
    """The most micro-batches whose activations a stage holds at one time."""
    now = most = 0
    for action in actions:
        now += 1 if action.way == FORWARD else -1
        most = max(most, now)
    return most
