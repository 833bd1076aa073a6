"""A tensor-parallel GPT over a slow link, where a step communicates as long as it computes: without batch splits, and
with two and four interleaved splits.

Every layer has two all-reduces forward and two backward, for which everything after them waits unless there is another
split. The gain is the median step without splits over that with splits.
"""

from __future__ import annotations

import statistics
from contextlib import nullcontext
from typing import Any

from benchmarks.slow_link import Link, agreed, slowed

RANKS, LAYERS, WIDTH, ROWS, LENGTH = 2, 4, 384, 16, 64
LATENCY, SHARE = 5e-4, 1.0
FIRST = 2
"""Steps of each way before those that count."""


def measure(rank: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Seconds per step, by number of splits and with or without the link, and the largest difference of gradients."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from models.gpt import GPT
    from models.losses import NextTokenLoss
    from strategies.capture import Objective, capture
    from strategies.core.program import LoweringOptions
    from strategies.core.request import OperatorStrategy, Request
    from strategies.core.steps import LOCAL
    from strategies.cost.roofline import flops_of
    from strategies.lowering.batch_splits import split_batch
    from strategies.lowering.lowering import lower
    from strategies.lowering.overlap import overlap
    from strategies.planner.planner import make_plan
    from strategies.runtime.communicator import Communicator
    from strategies.runtime.module_tree import build
    from strategies.runtime.simulate import shard

    torch.manual_seed(0)
    net = GPT(256, LENGTH, WIDTH, LAYERS, 4)
    batch = tuple(torch.randint(256, (ROWS, LENGTH)) for _ in range(2))
    objective = Objective(net, NextTokenLoss(), ("0", "1"), ("1",))
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

    def made(copies: int, early: bool) -> tuple[Any, dict[str, torch.Tensor], Communicator]:
        graph, own = captured.graph, plan
        if copies > 1:
            part = capture(objective, [entry[: ROWS // copies] for entry in batch], training=True).graph
            found = split_batch(graph, part, plan, copies, ROWS // copies)
            graph, own = found.graph, found.plan
        program = lower(graph, own, LoweringOptions(partial_loss=True))
        program = overlap(program, flops_of(graph, own)) if early else program
        chains = [chain for one in program.redistributions for chain in (one.forward, one.backward)]
        axes = [step.axes for chain in chains for step in chain if step.kind not in LOCAL]
        communicator = Communicator(program.mesh, rank.rank, axes)
        tensors = {}
        for source in program.sources:
            if source.kind != "input":
                value = captured.tensors[source.name].detach()
                piece = shard(value, program.layouts[source.id], program.mesh)[rank.rank]
                tensors[source.name] = nn.Parameter(piece) if source.kind == "parameter" else piece
        return build(program, tensors, communicator, "cpu"), tensors, communicator

    programs = {"one batch, in order": made(1, False), "one batch": made(1, True)}
    programs |= {f"{copies} copies": made(copies, True) for copies in (2, 4)}
    links = {way: Link(LATENCY, float("inf"), options["clock"]) for way in programs}

    def step(way: str, linked: bool) -> float:
        module, tensors, _ = programs[way]
        for tensor in tensors.values():
            tensor.grad = None
        dist.barrier()
        with slowed(links[way]) if linked else nullcontext():
            started = links[way].now()
            module(*batch).backward()
            return links[way].now() - started

    first = "one batch, in order"
    alone = agreed(statistics.median([step(first, False) for _ in range(FIRST)]))
    communicator = programs[first][2]
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
    truth = programs[first][1]
    largest = max(one.grad.abs().max() for one in truth.values() if one.grad is not None)
    gaps = [
        (tensor.grad - truth[name].grad).abs().max() / largest
        for _, tensors, _ in programs.values()
        for name, tensor in tensors.items()
        if isinstance(tensor, nn.Parameter)
    ]
    return {
        "seconds": {one: agreed(statistics.median(values)) for one, values in times.items()},
        "calls": {way: communicator.calls["all_reduce"] for way, (_, _, communicator) in programs.items()},
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
