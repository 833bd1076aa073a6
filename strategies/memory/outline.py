"""What is known of a rank's memory without running anything, from the shapes of its tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from strategies.core.graph import ITEM_BYTES
from strategies.core.program import Program
from strategies.memory.trace import local_tensors, optimizer_need, parameters_of, persistent_bytes
from strategies.memory.zero import ZeroBuffers
from strategies.optimizer.buckets import buckets
from strategies.optimizer.settings import OptimizerSettings


class KnownBytes:
    """Of one program.

    Attributes:
        need: What the optimizer needs per element.
        sizes: Elements of every trainable parameter.
        zero: The stand-in for ZeRO, where there is any.
        persistent: What stays from step to step.
        joined: Bytes of the largest bucket of several gradients at stage 0.
    """

    def __init__(self, program: Program, settings: OptimizerSettings) -> None:
        tensors, self.need = local_tensors(program, "meta"), optimizer_need(program, settings)
        held = parameters_of(tensors)
        trained = [held[name] for name in program.trainable_names]
        self.sizes = [one.numel() for one in trained]
        self.zero = ZeroBuffers(program, held, self.need, settings) if settings.stage and trained else None
        self.persistent = persistent_bytes(program, tensors, self.need, self.zero)
        wide = ITEM_BYTES["float32"] if settings.stage == 0 else 0  # where weights have masters
        self._added = sum(one.numel() * max(one.itemsize, wide) for one in trained)
        sums = buckets(program, settings.cut) if settings.stage == 0 else ()
        self.joined = max((one.elements * ITEM_BYTES[one.dtype] for one in sums if len(one.names) > 1), default=0)

    @property
    def gradients(self) -> int:
        """Bytes of gradients that have been added up, at least."""
        return self._added if self.zero is None or self.zero.stage == 1 else 0

    @property
    def ending(self) -> int:
        """Bytes at the end of backward: stage 1 of ZeRO copies all gradients at once."""
        if self.zero is None or self.zero.stage > 1:
            return 0
        return int(self.bucket) * self.zero.dtype.itemsize + self.copied(self.trainable)

    def update(self, gradients: int) -> int:
        """The most while the optimizer works on so many bytes of gradients."""
        return gradients + self.need.during(self.sizes) if self.zero is None else self.zero.during_update()

    @property
    def bucket(self) -> float:
        """Elements of a bucket of ZeRO."""
        return math.inf if self.zero is None else self.zero.bucket

    @property
    def trainable(self) -> int:
        """Elements of all trainable parameters."""
        return sum(self.sizes)

    def copied(self, elements: int) -> int:
        """Bytes of the copies of a bucket while it is added up."""
        return 0 if self.zero is None else elements * sum(dtype.itemsize for dtype in self.zero.copied)


@dataclass(frozen=True)
class Outline:
    """Bytes of a rank that are there at least.

    Attributes:
        persistent: From step to step; the others are beside it.
        gradients: Between two micro-batches.
        ending: At the end of the last backward.
        update: In the update.
    """

    persistent: int
    gradients: int
    ending: int
    update: int

    def least(self, stored: int) -> int:
        """Bytes at the peak, at least, where so many are stored for backward."""
        return self.persistent + max(self.gradients + stored, self.ending, self.update)

    @classmethod
    def together(cls, stages: Sequence[Outline]) -> Outline:
        """Of programs that one rank runs in turn."""
        return cls(
            sum(one.persistent for one in stages),
            sum(one.gradients for one in stages),
            max(one.ending for one in stages),
            sum(one.update for one in stages),
        )


def outline(program: Program, settings: OptimizerSettings) -> Outline:
    """Of a program, which may have no trainable parameter."""
    known = KnownBytes(program, settings)
    added = known.gradients if settings.accumulate > 1 else 0
    return Outline(known.persistent.total, added, known.ending, known.update(known.gradients))
