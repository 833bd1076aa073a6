"""What a config says about collectives, in the engine's terms: what may be joined or run beside computation, how
gradients are cut into buckets, and what DeepSpeed is told of it.

Invariant: only what is asked for differs from DeepSpeed's own choice, and the user's options for ZeRO come last.
"""

from __future__ import annotations

from typing import Any

from runner.config.schema import Config
from strategies.core.graph import OperatorGraph
from strategies.core.plan import Plan
from strategies.core.program import Program
from strategies.cost.roofline import flops_of
from strategies.lowering.fusion import KINDS, LARGEST
from strategies.lowering.overlap import overlap
from strategies.optimizer.updates import BucketLimits


def joined(config: Config) -> dict[str, int]:
    """The most bytes of one call, for every kind of collective that may be joined."""
    found = {}
    for kind in KINDS:
        one = getattr(config.parallel.comm_fusion, kind)
        if one.mode != "none":
            found[kind] = one.bytes if one.mode == "size" else LARGEST
    return found


def beside_computation(program: Program, graph: OperatorGraph, plan: Plan, config: Config) -> Program:
    """`program` of `graph` with its redistributions beside what does not need them. A compiler would take the pieces
    apart again, so what is compiled communicates at once."""
    if not config.parallel.comm_async or config.train.compile:
        return program
    return overlap(program, flops_of(graph, plan), by_unit=config.parallel.zero.stage == 3)


def cut(config: Config) -> BucketLimits:
    """How the gradients are cut into buckets at stage 0."""
    one = config.parallel.comm_fusion.all_reduce
    if isinstance(one.config, tuple):
        return BucketLimits(at=one.config)
    return BucketLimits(0) if one.mode == "none" else BucketLimits(one.bytes)


def overlapped(config: Config) -> bool:
    """Whether gradients are added during backward. A module that communicates by itself may run parts of backward
    twice, so that nobody knows when a gradient is complete."""
    return config.parallel.comm_overlap and config.parallel.mode not in ("stand_alone", "hybrid")


def zero_options(config: Config) -> dict[str, Any]:
    """The options for DeepSpeed's ZeRO: sizes of its buckets where sizes are asked for, then the user's own."""
    zero, fusion = config.parallel.zero, config.parallel.comm_fusion
    reduced = fusion.reduce_scatter if zero.known == 3 else fusion.all_reduce
    sizes = {"reduce_bucket_size": reduced}
    if zero.known < 3:
        sizes["allgather_bucket_size"] = fusion.all_gather
    wanted = {key: one.bytes // 4 for key, one in sizes.items() if one.mode == "size" and one.bytes is not None}
    return {key: max(elements + elements % 2, 2) for key, elements in wanted.items()} | dict(zero.options)
