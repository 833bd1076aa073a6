"""How a step goes on after backward, as far as its memory asks: optimizer parallel, micro-batches, buckets, offload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from strategies.core.errors import StrategyError
from strategies.core.program import Program
from strategies.optimizer.kernels import Kernels
from strategies.optimizer.updates import DEFAULT_BUCKETS, BucketLimits, Engine, Groups, OptimizerFactory
from strategies.runtime.offload import NO_OFFLOAD, Offload

MASTER = 4
"""Bytes of an element of a master."""
BUCKET, COMPLETE = "reduce_bucket_size", "stage3_model_persistence_threshold"
"""Options of ZeRO that our own engine has too: elements of a bucket, and of what stays complete at stage 3, at most."""
PERSISTING = ("stage3_param_persistence_threshold", "param_persistence_threshold")
"""The names of DeepSpeed's option for the elements of a parameter that stays complete at stage 3, at most."""
KEEPING = ("persistence", "prefetch", "max_live", "max_reuse")
"""Words in the names of options that decide how long parameters are complete at stage 3."""


@dataclass(frozen=True)
class OptimizerSettings:
    """`stage` is the ZeRO stage, `factory` and `groups` make the optimizer (groups None: one of all that learns),
    `accumulate` are the micro-batches of a step. Stage 0 cuts gradients into buckets as `cut` says and adds them during
    backward with `overlap`; from stage 1 on a bucket holds `bucket` elements (None: the usual number). `engine` is
    that of the stages from 1 on, `complete` how many elements stay complete at stage 3: of our own all together, of
    DeepSpeed's those of a parameter that does, at most. A pipeline stage may run backward in two halves, `split`.
    Callbacks keep `copies` of what is updated."""

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
    complete: int = 0
    split: bool = False
    copies: int = 0

    @property
    def limit(self) -> int | None:
        """Bytes of a bucket of the native engine."""
        return None if self.bucket is None else MASTER * self.bucket

    @property
    def native(self) -> bool:
        """Whether ZeRO is our own."""
        return self.stage > 0 and self.engine == "native"

    @property
    def kernels(self) -> Kernels:
        """What updates the parameters: on a GPU, DeepSpeed leaves it to torch's defaults."""
        if self.device == "cpu":
            return "loop"
        return "foreach" if self.stage and not self.native else "fused"

    def groups_for(self, program: Program) -> Groups:
        """The groups of the optimizer, for this program."""
        return [{"names": list(program.trainable_names)}] if self.groups is None else self.groups


def keeps(options: Mapping[str, Any]) -> bool:
    """Whether options of ZeRO decide how long parameters are complete at stage 3."""
    return any(word in name for name in options for word in KEEPING)


def persisting(options: Mapping[str, Any]) -> int:
    """The elements of a parameter that stays complete at DeepSpeed's stage 3, at most; 0 where another option limits
    them too, so that nobody knows which."""
    value = next((options[name] for name in PERSISTING if name in options), 0)
    return int(value) if isinstance(value, (int, float)) and COMPLETE not in options else 0


def own_sizes(options: Mapping[str, Any]) -> tuple[int | None, int]:
    """The elements of a bucket of our own engine (None: the usual number), and how many stay complete at stage 3.
    Raises StrategyError for any other value."""
    for name, least in ((BUCKET, 1), (COMPLETE, 0)):
        value = options.get(name, least)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise StrategyError(
                "MW452", f"parallel.zero.options.{name} = {value!r} must be a number of elements, {least} or more."
            )
    return options.get(BUCKET), options.get(COMPLETE, 0)
