"""How a step goes on after backward, as far as its memory asks: optimizer parallel, micro-batches, buckets, offload."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from strategies.core.program import Program
from strategies.optimizer.updates import DEFAULT_BUCKETS, BucketLimits, Engine, Groups, OptimizerFactory
from strategies.runtime.offload import NO_OFFLOAD, Offload

MASTER = 4
"""Bytes of an element of a master."""


@dataclass(frozen=True)
class OptimizerSettings:
    """`stage` is the ZeRO stage, `factory` and `groups` make the optimizer (groups None: one of all that learns),
    `accumulate` are the micro-batches of a step. Stage 0 cuts gradients into buckets as `cut` says and adds them during
    backward with `overlap`; from stage 1 on a bucket holds `bucket` elements (None: the usual number). `engine` is
    that of the stages from 1 on."""

    stage: int = 0
    factory: OptimizerFactory = torch.optim.SGD
    groups: Groups | None = None
    accumulate: int = 1
    cut: BucketLimits = DEFAULT_BUCKETS
    overlap: bool = False
    bucket: int | None = None
    offload: Offload = NO_OFFLOAD
    device: str = "cpu"
    engine: Engine = "deepspeed"

    @property
    def limit(self) -> int | None:
        """Bytes of a bucket of the native engine."""
        return None if self.bucket is None else MASTER * self.bucket

    @property
    def native(self) -> bool:
        """Whether ZeRO is our own."""
        return self.stage > 0 and self.engine == "native"

    def groups_for(self, program: Program) -> Groups:
        """The groups of the optimizer, for this program."""
        return [{"names": list(program.trainable_names)}] if self.groups is None else self.groups
