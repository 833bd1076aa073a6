"""The optimizer parallel of each ZeRO stage: replicated updates at stage 0, from stage 1 on DeepSpeed or our own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from strategies.core.errors import StrategyError
from strategies.core.program import Program
from strategies.optimizer.elementwise import check_slices
from strategies.optimizer.loss_scale import scale_of
from strategies.optimizer.replicated import BucketedUpdates
from strategies.optimizer.settings import BUCKET, COMPLETE, MASTER, own_sizes
from strategies.optimizer.sharded import ShardedUpdates
from strategies.optimizer.updates import (
    DEFAULT_BUCKETS,
    BucketLimits,
    Engine,
    Groups,
    OptimizerFactory,
    Precision,
    Updates,
)
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
    engine: Engine = "deepspeed",
) -> Updates:
    """Make the optimizer parallel of one ZeRO stage. Collective.

    Args:
        stage: 0 to 3.
        module: built from `program`.
        program: lowered with `sharded_optimizer=stage > 0`.
        communicator: with the groups of `axes_needed(program)`.
        optimizer_factory: makes a torch optimizer from torch's parameter groups.
        groups: see `Updates`.
        clip: see `Updates`.
        accumulate: see `Updates`.
        evaluation: see `Updates`.
        short: see `Updates`.
        peers: see `Updates`.
        precision: dtype of the parameters in the program.
        zero_options: options of DeepSpeed's ZeRO config; the native engine knows those of `own_sizes`.
        cut: limits of gradient buckets, at stage 0.
        overlap: reduce gradients during backward, without DeepSpeed.
        offload: what DeepSpeed keeps on the host or on a disk.
        loss_scale: constant factor on the loss in fp16; None: one that adapts.
        engine: from stage 1 on.

    Raises:
        StrategyError: the stage cannot do it (precision, optimizer, options, shapes).
    """
    shared: dict[str, Any] = {
        "clip": clip, "accumulate": accumulate, "evaluation": evaluation, "short": short, "peers": peers
    }  # fmt: skip
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    check_slices(optimizer_factory, groups, program, stage, device, staged=peers is not None)
    given = module, program, communicator, optimizer_factory, groups
    scale = scale_of(loss_scale) if precision == "fp16" else None
    if stage == 0 or not program.trainable_names:  # of a frozen stage of a pipeline ZeRO has nothing to divide
        return BucketedUpdates(*given, cut=cut, overlap=overlap, scale=scale, **shared)
    if peers is not None and stage > 1:
        raise StrategyError(
            "MW451",
            f"ZeRO stage {stage} cuts up the gradients of every micro-batch, of which a pipeline has several under "
            "way; use parallel.zero.stage=1 or 0.",
        )
    if engine == "native":
        _check_native(zero_options or {}, offload)
        bucket, complete = own_sizes(zero_options or {})
        limit = None if bucket is None else MASTER * bucket
        return ShardedUpdates(
            *given, stage=stage, scale=scale, limit=limit, complete=complete, overlap=overlap, **shared
        )
    return ZeroUpdates(
        *given,
        stage=stage,
        precision=precision,
        options=zero_options or {},
        offload=offload,
        loss_scale=loss_scale,
        **shared,
    )


def _check_native(options: Mapping[str, Any], offload: Offload) -> None:
    """Raises StrategyError for what the native engine lacks."""
    lacking = [f"parallel.zero.options.{name}" for name in options if name not in (BUCKET, COMPLETE)]
    lacking += [
        f"parallel.offload of {name}" for name in ("optimizer", "parameters") if getattr(offload, name) != "none"
    ]
    if lacking:
        raise StrategyError(
            "MW453",
            f"parallel.zero.engine = 'native' has no {' and no '.join(lacking)}, which DeepSpeed does; use "
            "parallel.zero.engine=deepspeed, or drop it.",
        )
