"""Bytes of memory that a rank needs, by part, and where in a step the most are needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from strategies.memory.trace import Traced
from strategies.optimizer.settings import OptimizerSettings


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. From step to step there are parameters and buffers of the model, gradients that a sharded
    optimizer keeps a place for, the optimizer's states and copies of weights, and `buffers` for communication. A step
    adds at most `activations`, of all micro-batches that are under way, and `gradients`; `peaks` are the most at one
    moment of each phase. `host` and `disk` are what offload and placed operators put there instead, at most."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    held: int
    peaks: dict[str, int]
    host: int
    disk: int

    @property
    def peak_in(self) -> str:
        """The phase of the step in which the most is needed."""
        return max(self.peaks, key=lambda name: self.peaks[name])

    @property
    def peak(self) -> int:
        return self.peaks[self.peak_in]

    def told(self) -> dict[str, Any]:
        """For plan.json. `total` is the sum of the parts, which are not all there at one moment."""
        parts = {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.activations,
        }
        total = sum(parts.values()) + self.buffers
        more = {"buffers": self.buffers, "held": self.held, "peak": self.peak, "peak_in": self.peak_in}
        return {**parts, **more, "peaks": dict(self.peaks), "host": self.host, "disk": self.disk, "total": total}


def memory(traced: Traced, settings: OptimizerSettings) -> Memory:
    """What a step needs that was `traced`."""
    to_disk = settings.offload.activations == "disk"
    stands = traced.stands
    return Memory(
        stands.parameters,
        stands.gradients + traced.gradients,
        stands.optimizer,
        traced.kept,
        stands.buffers,
        stands.total,
        {name: stands.total + most for name, most in traced.peaks.items()},
        stands.host + max(0 if to_disk else traced.away, traced.host_in_update),
        stands.disk + (traced.away if to_disk else 0),
    )
