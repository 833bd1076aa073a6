"""The gradients of a data-parallel GPT over a slow link: without the link, gradient by gradient, in buckets after
backward and in buckets during backward.

The link is so slow that the buckets take `SHARE` of a step without it. The overlapped share is (after - during) /
(after - without); it also follows from the exposed communication after backward, 1 - waiting during / waiting after.
"""

from __future__ import annotations

import statistics
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import PARTIAL_LOSS, Built, built, small_gpt
from benchmarks.slow_link import Link, agreed, slowed
from strategies.capture import capture
from strategies.core.request import Request
from strategies.lowering.lowering import lower
from strategies.optimizer.updates import DEFAULT_BUCKETS, BucketLimits, Updates
from strategies.planner.planner import make_plan
from strategies.runtime.slices import entries_of

RANKS, LAYERS, WIDTH, ROWS, LENGTH = 2, 6, 256, 8, 64
LATENCY, SHARE = 5e-4, 0.4
FIRST = 6
"""Steps of each variant before those that count; the first variant's say how slow the link must be."""


def measure(rank: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Seconds per step and calls of every variant, and whether the weights are equal at the end."""
    objective, batch = small_gpt(RANKS * ROWS, LENGTH, WIDTH, LAYERS)
    captured = capture(objective, batch, training=True)
    program = lower(captured.graph, make_plan(captured.graph, Request("data_parallel", RANKS)), PARTIAL_LOSS)
    entries, names = entries_of(batch, program, rank.rank), program.trainable_names

    def trained(cut: BucketLimits, overlap: bool) -> tuple[Updates, Built]:
        own = built(program, captured.tensors, rank.rank)
        return own.updates(lambda groups: torch.optim.SGD(groups, lr=0.01), cut=cut, overlap=overlap), own

    variants = {
        "without": trained(DEFAULT_BUCKETS, False),
        "by gradient": trained(BucketLimits(0), False),
        "after": trained(DEFAULT_BUCKETS, False),
        "during": trained(DEFAULT_BUCKETS, True),
    }
    link = Link(LATENCY, float("inf"), options["clock"])
    waiting: dict[str, list[float]] = {way: [] for way in variants}

    def step(way: str) -> float:
        updates, _ = variants[way]
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
    size = sum(tensor.numel() for name, tensor in variants["after"][1].tensors.items() if name in names) * 4
    link.bandwidth = size / (SHARE * alone)
    for way in ("by gradient", "after", "during"):
        for _ in range(FIRST):
            step(way)
    times: dict[str, list[float]] = {way: [] for way in variants}
    for repetition in range(options["repetitions"]):
        for way in list(variants)[:: 1 if repetition % 2 else -1]:
            times[way].append(step(way))
    steps = FIRST + options["repetitions"]
    first = variants["after"][1].tensors
    gap = max((own.tensors[name] - first[name]).abs().max().item() for _, own in variants.values() for name in names)
    return {
        "seconds": {way: agreed(statistics.median(values)) for way, values in times.items()},
        "waiting": {way: agreed(statistics.median(values[FIRST:])) for way, values in waiting.items()},
        "calls": {
            way: own.communicator.calls["all_reduce"] // steps - program.calls["all_reduce"]
            for way, (_, own) in variants.items()
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
