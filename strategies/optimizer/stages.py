"""The optimizer parallel of each ZeRO stage: replicated updates at stage 0, DeepSpeed from stage 1 on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from strategies.core.errors import StrategyError
from strategies.core.program import Program
from strategies.optimizer.loss_scale import scale_of
from strategies.optimizer.replicated import BucketedUpdates
from strategies.optimizer.updates import DEFAULT_BUCKETS, BucketLimits, Groups, OptimizerFactory, Precision, Updates
from strategies.optimizer.zero.zero import ZeroUpdates
from strategies.runtime.communicator import Communicator
from strategies.runtime.offload import NO_OFFLOAD, Offload
from strategies.runtime.peers import Peers


def make_updates(
    stage: int,
    module: nn.Module,
    program: Program,
    communicator: Communicator,
    optimizer_factory: OptimizerFactory,
    groups: Groups,
    *,
    clip: float | None = None,
    accumulate: int = 1,
    precision: Precision = "fp32",
    evaluation: nn.Module | None = None,
    short: nn.Module | None = None,
    zero_options: Mapping[str, Any] | None = None,
    cut: BucketLimits = DEFAULT_BUCKETS,
    overlap: bool = False,
    offload: Offload = NO_OFFLOAD,
    peers: Peers | None = None,
    loss_scale: float | None = None,
) -> Updates:
    """The optimizer parallel of ZeRO stage 0-3 for `module`, which was built from `program` (lowered with
    `sharded_optimizer=stage > 0`). `clip` is the largest norm of the global gradient, `accumulate` the number of
    micro-batches per step. At stage 0 gradients are added in buckets that are cut by `cut`, with `overlap` during
    backward; DeepSpeed has options of its own for both. `short` is a second program on the same parameters. `peers` are
    the other stages of a pipeline. In fp16 the loss is multiplied by `loss_scale`, or by one that adapts.

    Raises StrategyError for what the stage cannot do (precision, optimizer, options, shapes).
    """
    if stage == 0:
        return BucketedUpdates(
            module,
            program,
            communicator,
            optimizer_factory,
            groups,
            clip=clip,
            accumulate=accumulate,
            evaluation=evaluation,
            short=short,
            cut=cut,
            overlap=overlap,
            peers=peers,
            scale=scale_of(loss_scale) if precision == "fp16" else None,
        )
    if peers is not None and stage > 1:
        raise StrategyError(
            "MW451",
            f"ZeRO stage {stage} cuts up the gradients of every micro-batch, of which a pipeline has several under "
            "way; use parallel.zero.stage=1 or 0.",
        )
    return ZeroUpdates(
        module,
        program,
        communicator,
        optimizer_factory,
        groups,
        stage=stage,
        clip=clip,
        accumulate=accumulate,
        precision=precision,
        evaluation=evaluation,
        short=short,
        options=zero_options or {},
        offload=offload,
        loss_scale=loss_scale,
        peers=peers,
    )
