"""The memory of a rank that runs several stages of a pipeline, from what each stage needs by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from strategies.lowering.pipeline.schedule import Action, held
from strategies.memory.parts import Memory, memory
from strategies.memory.trace import Traced
from strategies.optimizer.settings import OptimizerSettings


def group_memory(
    group: int, traces: Mapping[int, Traced], actions: Sequence[Action], groups: int, settings: OptimizerSettings
) -> Memory:
    """Of a rank of `group`, one of `groups`; `traces` are those of its stages at least, by number. A phase
    needs what stands of all its stages, the activations that the schedule holds at most, the gradients of the other
    stages, and what the one that runs adds for the moment. A parameter of two stages of one group is counted in both.
    """
    mine = {number: traced for number, traced in traces.items() if number % groups == group}
    every = {number: memory(traced, settings) for number, traced in mine.items()}
    own, sizes = list(every.values()), {number: one.activations for number, one in every.items()}
    stands, activations = sum(one.held for one in own), int(held(actions, sizes))
    grown = [traced.gradients for traced in mine.values()]

    def most(phase: str) -> int:
        if phase == "update":
            return stands + sum(one.peaks[phase] - one.held for one in own)
        ahead = [
            one.peaks[phase] - one.held - one.activations + sum(grown) - gradients
            for one, gradients in zip(own, grown, strict=True)
        ]
        return stands + activations + max(ahead)

    return Memory(
        sum(one.parameters for one in own),
        sum(one.gradients for one in own),
        sum(one.optimizer for one in own),
        activations,
        sum(one.buffers for one in own),
        stands,
        {phase: most(phase) for phase in own[0].peaks},
        sum(one.host for one in own),
        sum(one.disk for one in own),
    )
