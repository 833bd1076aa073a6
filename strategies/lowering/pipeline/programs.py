"""The programs of the stages, and what a group of ranks holds of all its stages together.

Invariant: stages of one group that use the same parameter leave its gradient open over the same axes, so that their
gradients can be added on the spot and over the ranks once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from strategies.core.program import LoweringOptions, Program
from strategies.lowering.lowering import lower
from strategies.lowering.pipeline.cutting import Stage


def stage_programs(
    stages: Sequence[Stage], groups: int, options: LoweringOptions, lower: Callable[..., Program] = lower
) -> tuple[Program, ...]:
    """The program of every stage, where stage k is run by group k % groups."""

    def lowered(stage: Stage, open_axes: dict[str, tuple[str, ...]]) -> Program:
        given = {"outputs": stage.sends, "ordinals": stage.ordinals, "open_axes": open_axes}
        return lower(stage.graph, stage.plan, options, **given)

    alone = [lowered(stage, {}) for stage in stages]
    found = []
    for stage, program in zip(stages, alone, strict=True):
        others = [alone[number] for number in range(stage.number % groups, len(stages), groups)]
        wanted = {
            name: program.mesh.sorted({axis for other in others for axis in other.reductions.get(name, ())})
            for name in program.reductions
        }
        found.append(program if wanted == program.reductions else lowered(stage, wanted))
    return tuple(found)


def joined(stages: Sequence[Stage], programs: Sequence[Program]) -> Program:
    """What the stages of one group hold and communicate, as one program: for weights, gradients and checkpoints, not to
    be run. Its outputs are those to which gradients come back."""
    first = programs[0]
    sources = {source.id: (source, program) for program in programs for source in program.sources}
    outputs = []
    for stage, program in zip(stages, programs, strict=True):
        pairs = zip(stage.graph.outputs, program.outputs, strict=True)
        outputs += [here for ref, here in pairs if ref in stage.returning]
    return Program(
        first.mesh,
        tuple(source for source, _ in sources.values()),
        {id: program.layouts[id] for id, (_, program) in sources.items()},
        tuple(instruction for program in programs for instruction in program.instructions),
        tuple(outputs),
        {name: axes for program in programs for name, axes in program.reductions.items()},
        first.parameter_order,
        any(program.random for program in programs),
        programs[-1].loss_axes,
        tuple(update for program in programs for update in program.updates),
    )
