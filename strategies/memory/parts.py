"""Bytes of memory that a rank needs, by part, the peak of every phase of a step, and what to change where it is too
much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strategies.lowering.pipeline_schedule import FORWARD, Schedule, peak_activations, stored_before, unreleased
from strategies.memory.trace import Traced
from strategies.optimizer.settings import OptimizerSettings


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        parameters: Parameters and buffers of the model.
        gradients: Gradients after backward, and those for which ZeRO reserves memory.
        optimizer: The optimizer's states and copies of weights.
        activations: Of all micro-batches that are under way.
        buffers: Of communication, and on a GPU the workspaces of products.
        persistent: Stay from step to step, of all parts.
        peaks: The most at one moment, by phase.
        host: On the host, at most, by offload and placed operators.
        disk: On the disk, at most.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    persistent: int
    peaks: dict[str, int]
    host: int
    disk: int

    @property
    def peak_in(self) -> str:
        """The phase of the step with the highest peak."""
        return max(self.peaks, key=lambda name: self.peaks[name])

    @property
    def peak(self) -> int:
        """The most at one moment."""
        return self.peaks[self.peak_in]

    @property
    def by_part(self) -> dict[str, int]:
        """The parts by name; not all of them are there at one moment."""
        names = ("parameters", "gradients", "optimizer", "activations", "buffers")
        return {name: getattr(self, name) for name in names}

    def to_json(self) -> dict[str, Any]:
        """The entry of plan.json. `total` is the sum of the parts."""
        more = {"held": self.persistent, "peak": self.peak, "peak_in": self.peak_in, "peaks": dict(self.peaks)}
        return {**self.by_part, **more, "host": self.host, "disk": self.disk, "total": sum(self.by_part.values())}


def memory(traced: Traced, settings: OptimizerSettings) -> Memory:
    """The bytes of a rank whose step was traced."""
    to_disk = settings.offload.activations == "disk"
    persistent = traced.persistent
    return Memory(
        persistent.parameters,
        persistent.gradients + traced.gradients,
        persistent.optimizer,
        traced.kept,
        persistent.buffers,
        persistent.total,
        {name: persistent.total + most for name, most in traced.peaks.items()},
        persistent.host + max(0 if to_disk else traced.offloaded, traced.host_in_update),
        persistent.disk + (traced.offloaded if to_disk else 0),
    )


def group_memory(traces: Mapping[int, Traced], schedule: Schedule, group: int, settings: OptimizerSettings) -> Memory:
    """The bytes of a rank that runs several stages of a pipeline.

    A pass needs what stays of all its stages, their gradients, what other passes have stored before it, and what it
    adds for the moment; of the first backward of a stage more than it takes, as if there were gradients before. A
    parameter of two stages of one group counts in both.

    Args:
        traces: At least those of its stages, by the stage's number; of `split_stages` with `settings.split`.
        schedule: Of all groups.
        group: Its number.
        settings: Of the optimizer step.
    """
    actions = schedule[group]
    numbers = sorted({action.stage for action in actions})
    stages = {number: memory(traces[number], settings) for number in numbers}
    persistent = sum(one.persistent for one in stages.values())
    several = settings.accumulate > 1  # then a trace has the gradients of earlier micro-batches from its begin on
    gradients: dict[int, int] = {}  # of stages that have gone backward
    sizes = {number: one.activations for number, one in stages.items()}
    between = {number: traces[number].between for number in numbers}
    peaks = {phase: 0 for one in stages.values() for phase in one.peaks}
    back = unreleased(schedule, group, {number: traces[number].returned for number in numbers})
    for (action, _, others), sent in zip(stored_before(actions, sizes, between), back, strict=True):
        one, own = stages[action.stage], traces[action.stage].gradients
        ahead = action.computation == FORWARD
        phase = "forward" if ahead else "backward"
        if not ahead:
            gradients[action.stage] = own
        running = one.peaks[phase] - one.persistent - own * (several or not ahead)
        peaks[phase] = max(peaks[phase], persistent + sum(gradients.values()) + int(others + sent) + running)
    peaks["update"] = persistent + sum(one.peaks["update"] - one.persistent for one in stages.values())
    every = stages.values()
    return Memory(
        sum(one.parameters for one in every),
        sum(one.gradients for one in every),
        sum(one.optimizer for one in every),
        int(peak_activations(actions, sizes, between)),
        sum(one.buffers for one in every),
        persistent,
        peaks,
        sum(one.host for one in every),
        sum(one.disk for one in every),
    )


def over(needed: Memory, limit: int, settings: OptimizerSettings, *, recomputes: bool, all_of_it: bool = False) -> str:
    """Why a plan does not fit, and what would help first.

    Args:
        needed: What it needs.
        limit: Bytes of a rank.
        settings: Of the optimizer step.
        recomputes: Whether some layers are recomputed already.
        all_of_it: Whether all layers are that may be.
    """
    order = ("activations", "optimizer", "parameters", "gradients", "buffers")
    parts = {name: needed.by_part[name] for name in order}
    reducible = [name for name in order if name != "buffers" or settings.stage]  # cuBLAS's own have one size
    largest = max(reducible, key=lambda name: parts[name])
    shown = ", ".join(f"{name} {in_words(size)}" for name, size in parts.items() if size)
    if (rest := needed.peak - sum(parts.values())) > 0:
        shown += f", {in_words(rest)} for a moment, in operators and gradients on their way"
    what = "even with all repeated layers recomputed the plan" if all_of_it else "the plan"
    return (
        f"parallel.memory_limit = {in_words(limit)} per rank, but {what} needs {in_words(needed.peak)} at once, in "
        f"{needed.peak_in} ({shown}). The largest part is {largest}: "
        f"{_advice(largest, settings, recomputes or all_of_it)}, more ranks, or a higher limit."
    )


def _advice(part: str, settings: OptimizerSettings, recomputes: bool) -> str:
    stage, offload, advice = settings.stage, settings.offload, []
    if part == "activations":
        advice += ["parallel.pipeline.schedule=1f1b, which stores less"] if settings.split else []
        advice += [] if recomputes else ["parallel.recompute=auto"]
        advice += ["more train.accumulate"]
        advice += ["parallel.offload.activations.to=host"] if offload.activations == "none" else []
    elif part == "buffers":
        advice += ["a smaller parallel.zero.options.reduce_bucket_size"]
    else:
        least = {"optimizer": 1, "gradients": 2, "parameters": 3}[part]
        advice += [f"parallel.zero.stage={least}"] if stage < least else []
        name = "parameters" if part == "parameters" else "optimizer"
        advice += [f"parallel.offload.{name}=host"] if getattr(offload, name) == "none" and stage >= least else []
        advice += ["sliced weights (parallel.strategies)"]
    return "choose " + ", ".join(advice)


def in_words(count: int) -> str:
    """Bytes as people write them."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.4g} {units[0]}"
