"""How much of the time to add gradients hides behind backward, over a slow link, and how many calls it takes.

    python benchmarks/overlap.py [--ranks 2] [--width 256] [--layers 6] [--rows 8] [--rounds 7] [--share 0.4]

A GPT, data parallel, four ways in turn in the same processes: without the link, gradient by gradient, in buckets after
backward, and in buckets during backward. The link is made so slow that the buckets take `share` of the step without it.
Hidden is (after - during) / (after - without), of the best step of each; on a machine that is busy with other work it
is better told by what the ranks wait for when backward is over: 1 - waiting during / waiting after. Goals: at least 0.7
hidden, at least 10 times fewer calls than there are gradients, weights equal to the bit.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.slow_link import Link, slowed
from runner import launch

LATENCY = 5e-4
FIRST = 8
"""Steps of each way before those that count; the first way's tell how slow the link must be."""


def measure(rank: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Seconds per step and calls of every way, and whether the weights are equal at the end."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from models.gpt import GPT
    from models.losses import NextTokenLoss
    from strategies.capture import Objective, capture
    from strategies.engine.communicator import Communicator
    from strategies.engine.lowering import lower
    from strategies.engine.partition import build
    from strategies.engine.program import Options
    from strategies.engine.simulate import shard
    from strategies.engine.updates import CHOSEN, Cut, axes_needed, make_updates
    from strategies.planner import make_plan
    from strategies.redistribution import LOCAL
    from strategies.request import Request

    torch.manual_seed(0)
    n, length = options["ranks"], 64
    net = GPT(256, length, options["width"], options["layers"], 4)
    tokens, labels = (torch.randint(256, (n * options["rows"], length)) for _ in range(2))
    captured = capture(Objective(net, NextTokenLoss(), ("0", "1"), ("1",)), (tokens, labels), training=True)
    plan = make_plan(captured.graph, Request("data_parallel", n))
    program = lower(captured.graph, plan, Options(partial_loss=True))
    axes = [s.axes for r in program.redistributions for c in (r.forward, r.backward) for s in c if s.kind not in LOCAL]
    inputs = [source for source in program.sources if source.kind == "input"]
    entries = [
        shard(whole, program.layouts[source.id], program.mesh)[rank.rank]
        for source, whole in zip(inputs, (tokens, labels), strict=True)
    ]
    names = [source.name for source in captured.graph.of_kind("parameter")]

    def trained(cut: Cut, overlap: bool) -> tuple[Any, dict[str, torch.Tensor], Communicator]:
        communicator = Communicator(program.mesh, rank.rank, [*axes, *axes_needed(program)])
        tensors = {}
        for source in program.sources:
            if source.kind != "input":
                piece = shard(captured.tensors[source.name].detach(), program.layouts[source.id], program.mesh)[
                    rank.rank
                ]
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

    ways = {
        "without": trained(CHOSEN, False),
        "by gradient": trained(Cut(0), False),
        "after": trained(CHOSEN, False),
        "during": trained(CHOSEN, True),
    }
    link = Link(LATENCY, float("inf"))

    waiting: dict[str, list[float]] = {way: [] for way in ways}

    def step(way: str) -> float:
        updates, _, _ = ways[way]
        dist.barrier()
        with nullcontext() if way == "without" else slowed(link):
            started = time.perf_counter()
            updates.backward(updates.module(*entries))
            backward_over = time.perf_counter()
            updates.reduce()
            waiting[way].append(time.perf_counter() - backward_over)
            updates.update(measure=False)
            return time.perf_counter() - started

    alone = torch.tensor(min(step("without") for _ in range(FIRST)))
    dist.all_reduce(alone, dist.ReduceOp.MAX)
    size = sum(tensor.numel() for name, tensor in ways["after"][1].items() if name in names) * 4
    link.bandwidth = size / (options["share"] * alone.item())
    for way in ("by gradient", "after", "during"):
        for _ in range(FIRST):
            step(way)
    times: dict[str, list[float]] = {way: [] for way in ways}
    for round_ in range(options["rounds"]):
        for way in list(ways)[:: 1 if round_ % 2 else -1]:
            times[way].append(step(way))
    calls = {way: communicator.calls["all_reduce"] for way, (_, _, communicator) in ways.items()}
    steps = FIRST + options["rounds"]
    first = ways["after"][1]
    gap = max((tensors[name] - first[name]).abs().max().item() for _, tensors, _ in ways.values() for name in names)
    program_calls = program.calls["all_reduce"]
    return {
        "seconds": {way: min(values) for way, values in times.items()},
        "waiting": {way: statistics.median(values[FIRST:]) for way, values in waiting.items()},
        "calls": {way: count // steps - program_calls for way, count in calls.items()},
        "gap": gap,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("ranks", 2), ("width", 256), ("layers", 6), ("rows", 8), ("rounds", 7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--share", type=float, default=0.4)
    options = vars(parser.parse_args())
    with tempfile.TemporaryDirectory() as folder:
        found = launch.run_ranks(
            "benchmarks.overlap:measure",
            options,
            world_size=options["ranks"],
            run_dir=Path(folder),
            device="cpu",
            timeout=300,
            threads=1,
        )
    seconds, calls = found["seconds"], found["calls"]
    for way, value in seconds.items():
        print(f"{way:12} {value * 1e3:8.1f} ms, {value / seconds['without']:.2f} of without; {calls[way]} calls")
    hidden = (seconds["after"] - seconds["during"]) / (seconds["after"] - seconds["without"])
    unseen = 1 - found["waiting"]["during"] / found["waiting"]["after"]
    print(f"hidden behind backward: {hidden:.2f} by steps, {unseen:.2f} by waiting")
    print(f"{calls['by gradient'] / calls['during']:.1f} times fewer calls than gradients")
    print(f"largest difference of the weights: {found['gap']:.1e}")


if __name__ == "__main__":
    main()
