"""The memory of a rank that runs several stages of a pipeline, from what each stage needs by itself."""

from __future__ import annotations

from collections.abc import Sequence

from strategies.cost.activations import Traced
from strategies.cost.memory import Memory, memory
from strategies.cost.updating import Updating
from strategies.pipeline.schedule import Action, held


def group_memory(
    group: int, traces: Sequence[Traced], actions: Sequence[Action], groups: int, updating: Updating
) -> Memory:
    """Of a rank of `group`, one of `groups`; `traces` are those of all stages. A phase needs what stands of all its
    stages, the activations that the schedule holds at most, the gradients of the other stages, and what the one that
    runs adds for the moment. A parameter of two stages of one group is counted in both."""
    every = [memory(traced, updating) for traced in traces]
    own = every[group::groups]
    stands, activations = sum(one.held for one in own), int(held(actions, [one.activations for one in every]))
    grown = [traced.gradients for traced in traces[group::groups]]

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
