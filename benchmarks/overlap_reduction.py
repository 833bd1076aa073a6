"""The gradients of a data-parallel GPT over a slow link: without the link, gradient by gradient, in buckets after
backward and in buckets during backward.

The link is so slow that the buckets take `SHARE` of a step without it. The overlapped share is (after - during) /
(after - without); it also follows from the exposed communication after backward, 1 - waiting during / waiting after.
"""

from __future__ import annotations

import statistics
from contextlib import nullcontext
from typing import Any

from benchmarks.slow_link import Link, agreed, slowed

RANKS, LAYERS, WIDTH, ROWS, LENGTH = 2, 6, 256, 8, 64
LATENCY, SHARE = 5e-4, 0.4
FIRST = 6
"""Steps of each variant before those that count; the first variant's say how slow the link must be."""


def measure(rank: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Seconds per step and calls of every variant, and whether the weights are equal at the end."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from models.gpt import GPT
    from models.losses import NextTokenLoss
    from strategies.capture import Objective, capture
    from strategies.core.program import LoweringOptions
    from strategies.core.request import Request
    from strategies.core.steps import LOCAL
    from strategies.lowering.lowering import lower
    from strategies.optimizer.stages import make_updates
    from strategies.optimizer.updates import DEFAULT_BUCKETS, BucketLimits, axes_needed
    from strategies.planner.planner import make_plan
    from strategies.runtime.communicator import Communicator
    from strategies.runtime.module_tree import build
    from strategies.runtime.simulate import shard

    torch.manual_seed(0)
    net = GPT(256, LENGTH, WIDTH, LAYERS, 4)
    tokens, labels = (torch.randint(256, (RANKS * ROWS, LENGTH)) for _ in range(2))
    captured = capture(Objective(net, NextTokenLoss(), ("0", "1"), ("1",)), (tokens, labels), training=True)
    plan = make_plan(captured.graph, Request("data_parallel", RANKS))
    program = lower(captured.graph, plan, LoweringOptions(partial_loss=True))
    axes = [s.axes for r in program.redistributions for c in (r.forward, r.backward) for s in c if s.kind not in LOCAL]
    inputs = [source for source in program.sources if source.kind == "input"]
    entries = [
        shard(tensor, program.layouts[source.id], program.mesh)[rank.rank]
        for source, tensor in zip(inputs, (tokens, labels), strict=True)
    ]
    names = [source.name for source in captured.graph.of_kind("parameter")]

    def trained(cut: BucketLimits, overlap: bool) -> tuple[Any, dict[str, torch.Tensor], Communicator]:
        communicator = Communicator(program.mesh, rank.rank, [*axes, *axes_needed(program)])
        tensors = {}
        for source in program.sources:
            if source.kind != "input":
                tensor = captured.tensors[source.name].detach()
                piece = shard(tensor, program.layouts[source.id], program.mesh)[rank.rank]
                tensors[source.name] = nn.Parameter(piece) if source.kind == "parameter" else piece
        module = build(program, tensors, communicator, "cpu")
        updates = make_updates(
            0,
            module,
            program,
            communicator,
            lambda groups: torch.optim.SGD(groups, lr=0.01),
            [{"names": names}],
            cut=cut,
            overlap=overlap,
        )
        return updates, tensors, communicator

    variants = {
        "without": trained(DEFAULT_BUCKETS, False),
        "by gradient": trained(BucketLimits(0), False),
        "after": trained(DEFAULT_BUCKETS, False),
        "during": trained(DEFAULT_BUCKETS, True),
    }
    link = Link(LATENCY, float("inf"), options["clock"])
    waiting: dict[str, list[float]] = {way: [] for way in variants}

    def step(way: str) -> float:
        updates, _, _ = variants[way]
        dist.barrier()
        with nullcontext() if way == "without" else slowed(link):
            started = link.now()
            updates.backward(updates.module(*entries))
            backward_over = link.now()
            updates.reduce()
            waiting[way].append(link.now() - backward_over)
            updates.update(measure=False)
            return link.now() - started

    alone = agreed(statistics.median([step("without") for _ in range(FIRST)]))
    size = sum(tensor.numel() for name, tensor in variants["after"][1].items() if name in names) * 4
    link.bandwidth = size / (SHARE * alone)
    for way in ("by gradient", "after", "during"):
        for _ in range(FIRST):
            step(way)
    times: dict[str, list[float]] = {way: [] for way in variants}
    for repetition in range(options["repetitions"]):
        for way in list(variants)[:: 1 if repetition % 2 else -1]:
            times[way].append(step(way))
    steps = FIRST + options["repetitions"]
    first = variants["after"][1]
    gap = max((tensors[name] - first[name]).abs().max().item() for _, tensors, _ in variants.values() for name in names)
    return {
        "seconds": {way: agreed(statistics.median(values)) for way, values in times.items()},
        "waiting": {way: agreed(statistics.median(values[FIRST:])) for way, values in waiting.items()},
        "calls": {
            way: one.calls["all_reduce"] // steps - program.calls["all_reduce"] for way, (_, _, one) in variants.items()
        },
        "gap": gap,
    }


def table(found: dict[str, Any]) -> str:
    seconds, calls = found["seconds"], found["calls"]
    lines = [
        f"  {way:12} {value * 1e3:8.1f} ms, {value / seconds['without']:.2f} of without; {calls[way]} calls"
        for way, value in seconds.items()
    ]
    hidden = (seconds["after"] - seconds["during"]) / (seconds["after"] - seconds["without"])
    unseen = 1 - found["waiting"]["during"] / found["waiting"]["after"]
    lines.append(f"  hidden behind backward: {hidden:.2f} by steps, {unseen:.2f} by waiting (goal 0.70)")
    lines.append(f"  {calls['by gradient'] / calls['during']:.1f} times fewer calls than gradients (goal 10)")
    lines.append(f"  largest difference of the weights: {found['gap']:.1e}")
    return "\n".join(lines)
