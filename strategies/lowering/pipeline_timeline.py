"""When the groups of a pipeline run the passes of a schedule, from the seconds of every pass.

A group runs its actions in their order, each as soon as what it needs is there; sends are part of the pass that sends.
Invariant: a schedule whose groups wait for one another has no timeline, so what has one is free of deadlocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strategies.lowering.pipeline_schedule import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    Action,
    Pass,
    Schedule,
    gradient_passes,
    in_one_process,
    last_stage,
    needed,
    owners_of,
)


@dataclass(frozen=True)
class StageTimes:
    """Seconds of one micro-batch in one stage.

    Attributes:
        forward: Forward, with sending values on.
        input: The gradients that the stage before waits for, with sending them back.
        weight: The gradients of parameters.
    """

    forward: float
    input: float
    weight: float

    @property
    def total(self) -> float:
        """Seconds of all three."""
        return self.forward + self.input + self.weight

    def of(self, computation: Pass) -> float:
        """Seconds of a pass."""
        both = self.input + self.weight
        return {FORWARD: self.forward, BACKWARD: both, INPUT: self.input, WEIGHT: self.weight}[computation]


@dataclass(frozen=True)
class Span:
    """A pass with the seconds at which it begins and ends."""

    action: Action
    begin: float
    end: float


def timeline(schedule: Schedule, times: Sequence[StageTimes]) -> tuple[tuple[Span, ...], ...]:
    """The passes of every group, in their order.

    Raises:
        ValueError: groups wait for one another.
    """
    owners = owners_of(schedule)
    ends: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in schedule]
    last = last_stage(schedule)
    for action in in_one_process(schedule):
        own = spans[owners[action.stage]]
        begin = max([own[-1].end if own else 0.0, *(ends[one] for one in needed(action, last))])
        own.append(Span(action, begin, begin + times[action.stage].of(action.computation)))
        for half in gradient_passes(action):
            ends[half] = own[-1].end
    return tuple(map(tuple, spans))


def makespan(schedule: Schedule, times: Sequence[StageTimes]) -> float:
    """Seconds until the last group is done. Raises ValueError as `timeline`."""
    return max(spans[-1].end for spans in timeline(schedule, times))


def bubble(schedule: Schedule, times: Sequence[StageTimes]) -> float:
    """The share of the time in which a group waits, over all groups. Equal stages whose three passes take equally long
    give (s - 1) / (v m + s - 1) for m micro-batches, s groups and v stages of each, for gpipe, 1f1b and
    interleaved_1f1b where s divides m."""
    spans = timeline(schedule, times)
    busy = sum(span.end - span.begin for own in spans for span in own)
    return 1 - busy / (max(own[-1].end for own in spans) * len(schedule))
