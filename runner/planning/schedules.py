"""The schedule that `parallel.pipeline.schedule=auto` stands for: made for the predicted times of a plan's stages and
the memory of a rank.

More memory than the stand-in (`lowering.schedule_of`) needs on its busiest rank is only taken where that saves at least
`WORTH` of the time.
"""

from __future__ import annotations

from collections.abc import Sequence

from runner.config.schema import Config
from runner.planning.estimate import Estimate
from strategies.core.errors import StrategyError
from strategies.lowering.pipeline_schedule import KINDS, Schedule, make_schedule
from strategies.lowering.pipeline_synthesis import Problem, synthesise
from strategies.lowering.pipeline_timeline import makespan

WORTH = 0.01
UPDATE = "update"
"""The phase of a step in which no activation is stored."""


def synthesised(config: Config, step: Estimate, limits: Sequence[int]) -> Schedule:
    """The schedule of `schedule=auto`. None of the named ones that fit is faster.

    Args:
        config: without open keys.
        step: the estimate under the stand-in.
        limits: bytes of a rank, by group; what `step` needs is allowed in any case.
    """
    assert step.schedule is not None
    section, memories = config.parallel.pipeline, step.memories
    running = [max(size for phase, size in one.peaks.items() if phase != UPDATE) for one in memories]
    numbers = range(len(step.stages))
    sizes = [step.activations(number) for number in numbers]
    named = []
    for kind in KINDS:
        try:
            named.append(make_schedule(kind, step.groups, section.parts, section.virtual))
        except StrategyError:
            continue  # other numbers of stages or micro-batches
    best: tuple[float, Schedule] | None = None
    allowed = [max(limit, size) for limit, size in zip(limits, running, strict=True)]
    for most in ([min(max(running), size) for size in allowed], allowed):
        problem = Problem(
            step.stage_times,
            [number % step.groups for number in numbers],
            section.parts,
            sizes,
            [one.activations + size - now for one, size, now in zip(memories, most, running, strict=True)],
            splits=not config.train.compile,
        )
        found = synthesise(problem, [step.schedule, *named])
        assert found is not None, "the memory of the stand-in is allowed"
        seconds = makespan(found, problem.times)
        if best is None or seconds < (1 - WORTH) * best[0]:
            best = seconds, found
    assert best is not None
    return best[1]
