"""The schedule that `parallel.pipeline.schedule=auto` stands for: made for the predicted times of a plan's stages and
the memory of a rank, under the placement of stages that is faster.

More memory than the first stand-in (`lowering.schedules_of`) needs on its busiest rank is only taken where that saves
at least `WORTH` of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from runner.config.schema import Config
from runner.planning.estimate import Estimate
from strategies.core.errors import StrategyError
from strategies.lowering.pipeline_schedule import KINDS, make_schedule, owners_of
from strategies.lowering.pipeline_synthesis import ScheduleProblem, synthesise
from strategies.lowering.pipeline_timeline import makespan

WORTH = 0.01
TRIES = 4
"""Schedules that are made where those before need more memory than there is."""
UPDATE = "update"
"""The phase of a step in which no activation is stored."""


def synthesised(config: Config, steps: Sequence[Estimate], limits: Sequence[int]) -> Estimate:
    """The step under the schedule of `schedule=auto`. None of the named ones that fit is faster.

    Args:
        config: without open keys.
        steps: the estimates under the stand-ins, each with a placement of its own.
        limits: bytes of a rank, by group; what the first of `steps` needs is allowed in any case.
    """
    running = _running(steps[0])
    allowed = [max(limit, size) for limit, size in zip(limits, running, strict=True)]
    best: tuple[float, Estimate] | None = None
    for most in ([min(max(running), size) for size in allowed], allowed):
        made = [found for step in steps if (found := _made(config, step, most)) is not None]
        seconds, step = min(made, key=lambda one: one[0])
        if best is None or seconds < (1 - WORTH) * best[0]:
            best = seconds, step
    assert best is not None
    return best[1]


def _running(step: Estimate) -> list[int]:
    """Bytes of a rank while micro-batches are under way, by group."""
    return [max(size for phase, size in one.peaks.items() if phase != UPDATE) for one in step.memories]


def _made(config: Config, step: Estimate, most: Sequence[int]) -> tuple[float, Estimate] | None:
    """Seconds of the fastest schedule that is found for the placement of `step`, whose ranks have `most` bytes, and the
    step under it; None where that is too little."""
    assert step.schedule is not None
    section, memories = config.parallel.pipeline, step.memories
    sizes, between = zip(*(step.stored_by(number) for number in range(len(step.stages))), strict=True)
    named = []
    for kind in KINDS:
        try:
            schedule = make_schedule(kind, step.groups, section.parts, section.virtual)
        except StrategyError:
            continue  # other numbers of stages or micro-batches
        if owners_of(schedule) == step.owners:
            named.append(schedule)
    room = [one.activations + size - now for one, size, now in zip(memories, most, _running(step), strict=True)]
    problem = ScheduleProblem(
        step.stage_times,
        step.owners,
        section.parts,
        sizes,
        room,
        splits=not config.train.compile,
        between=between,
    )
    for _ in range(TRIES):
        found = synthesise(problem, [step.schedule, *named])
        if found is None:
            break
        made = replace(step, schedule=found, traced={})
        beyond = [max(now - size, 0) for now, size in zip(_running(made), most, strict=True)]
        if not any(beyond):
            return makespan(found, problem.times), made
        # what a pass adds for the moment differs from that of the stand-in
        problem = replace(problem, limits=[size - more for size, more in zip(problem.limits, beyond, strict=True)])
    fits = all(now <= size for now, size in zip(_running(step), most, strict=True))
    return (makespan(step.schedule, problem.times), step) if fits else None
