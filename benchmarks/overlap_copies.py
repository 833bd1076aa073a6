"""A tensor-parallel GPT over a slow link, where a step communicates as long as it computes: without batch splits, and
with two and four interleaved splits.

Every layer has two all-reduces forward and two backward, for which everything after them waits unless there is another
split. The gain is the median step without splits over that with splits.
"""

from __future__ import annotations

import statistics
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.ranks import PARTIAL_LOSS, Built, built, small_gpt
from benchmarks.slow_link import Link, agreed, slowed
from strategies.capture import capture
from strategies.core.request import OperatorStrategy, Request
from strategies.cost.roofline import flops_of
from strategies.lowering.batch_splits import split_batch
from strategies.lowering.lowering import lower
from strategies.lowering.overlap import overlap
from strategies.planner.planner import make_plan

RANKS, LAYERS, WIDTH, ROWS, LENGTH = 2, 4, 384, 16, 64
LATENCY, SHARE = 5e-4, 1.0
FIRST = 2
"""Steps of each way before those that count."""


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    """Those of the parameters of a rank, by name."""
    return {name: one.grad for name, one in module.named_parameters() if one.grad is not None}


def measure(rank: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Seconds per step, by number of splits and with or without the link, and the largest difference of gradients."""
    objective, batch = small_gpt(ROWS, LENGTH, WIDTH, LAYERS)
    captured = capture(objective, batch, training=True)
    row, column = ((1, 1, 1), (1, RANKS)), ((1, 1, RANKS), (RANKS, 1))
    strategies = {
        "layers.*.attention.[qkv]_proj.matmul": OperatorStrategy(row, None),
        "layers.*.attention.o_proj.matmul": OperatorStrategy(column, None),
        "layers.*.feed_forward.up_proj.matmul": OperatorStrategy(row, None),
        "layers.*.feed_forward.down_proj.matmul": OperatorStrategy(column, None),
        "layers.*.add": OperatorStrategy(((1, 1, 1), (1, 1, 1)), None),
        "layers.*.*_norm": OperatorStrategy(((1, 1, 1), (1,), (1,)), None),
        "layers.*.*_dropout": OperatorStrategy(((1, 1, 1),), None),
        "loss.cross_entropy_loss": OperatorStrategy(((1, 1, 1), (1, 1)), None),
    }
    request = Request("auto", RANKS, mesh=(("tp", RANKS),), strategies=strategies, dataset_strategy="full_batch")
    plan = make_plan(captured.graph, request)

    def made(copies: int, early: bool) -> Built:
        graph, own = captured.graph, plan
        if copies > 1:
            part = capture(objective, [entry[: ROWS // copies] for entry in batch], training=True).graph
            found = split_batch(graph, part, plan, copies, ROWS // copies)
            graph, own = found.graph, found.plan
        program = lower(graph, own, PARTIAL_LOSS)
        program = overlap(program, flops_of(graph, own)) if early else program
        return built(program, captured.tensors, rank.rank)

    programs = {"one batch, in order": made(1, False), "one batch": made(1, True)}
    programs |= {f"{copies} copies": made(copies, True) for copies in (2, 4)}
    links = {way: Link(LATENCY, float("inf"), options["clock"]) for way in programs}

    def step(way: str, linked: bool) -> float:
        module = programs[way].module
        module.zero_grad()
        dist.barrier()
        with slowed(links[way]) if linked else nullcontext():
            started = links[way].now()
            module(*batch).backward()
            return links[way].now() - started

    first = "one batch, in order"
    alone = agreed(statistics.median([step(first, False) for _ in range(FIRST)]))
    communicator = programs[first].communicator
    sent, calls = communicator.sent["all_reduce"] / FIRST, communicator.calls["all_reduce"] / FIRST
    carried = sent * RANKS / (2 * (RANKS - 1))  # bytes of the tensors, which the link counts
    for link in links.values():
        link.bandwidth = carried / max(SHARE * alone - calls * LATENCY, 0.1 * alone)
    variants = [(way, linked) for linked in (False, True) for way in programs]
    times: dict[tuple[str, bool], list[float]] = {one: [] for one in variants}
    for repetition in range(-FIRST, options["repetitions"]):
        for one in variants[:: 1 if repetition % 2 else -1]:
            seconds = step(*one)
            if repetition >= 0:
                times[one].append(seconds)
    truth = gradients(programs[first].module)
    largest = max(one.abs().max() for one in truth.values())
    gaps = [
        (gradient - truth[name]).abs().max() / largest
        for program in programs.values()
        for name, gradient in gradients(program.module).items()
    ]
    return {
        "seconds": {one: agreed(statistics.median(values)) for one, values in times.items()},
        "calls": {way: program.communicator.calls["all_reduce"] for way, program in programs.items()},
        "gap": max(gap.item() for gap in gaps),
        "waited": {way: agreed(link.waited) / agreed(link.taken) for way, link in links.items()},
    }


def table(found: dict[str, Any]) -> str:
    seconds = found["seconds"]
    base = seconds["one batch, in order", True]
    programs = [way for way, linked in seconds if linked]
    lines = [
        f"  {way:20} {seconds[way, False] * 1e3:8.1f} ms without the link, {seconds[way, True] * 1e3:8.1f} ms over it: "
        f"{base / seconds[way, True]:.2f} times as fast as in order, {found['waited'][way]:.0%} of the link waited for"
        for way in programs
    ]
    best = max(base / seconds[way, True] for way in programs if "copies" in way)
    lines.append(f"  gained by copies: {best:.2f} (goal 1.20); largest difference of gradients {found['gap']:.1e}")
    return "\n".join(lines)
