"""Time of a sharded step against the same hand-written step with torch.distributed (same collectives), as a ratio.

    python benchmarks/step_overhead.py [--ranks 2] [--width 2048] [--rows 512] [--repetitions 30]

A two-layer tensor-parallel network: column-wise linear, relu, row-wise linear, reduce-scatter, mean squared
error, SGD with momentum. Both versions run in the same processes, one step of each in turn; the ratio of the medians,
without the first three steps, is printed. Goal: at most 1.02 for steps of 10 ms and more.
"""

from __future__ import annotations

import statistics
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.ranks import PARTIAL_LOSS, built, command_line, on_ranks
from strategies.capture import Objective, capture
from strategies.core.request import OperatorStrategy, Request
from strategies.lowering.lowering import lower
from strategies.planner.planner import make_plan

WARM_UP = 3
"""Steps that are not timed."""


@dataclass(frozen=True)
class Shape:
    ranks: int
    width: int
    rows: int
    repetitions: int


def measure(rank: Any, options: dict[str, int]) -> dict[str, float]:
    """Seconds per step of both versions on this rank, and the largest difference between their weights at the end."""
    shape = Shape(**options)

    torch.manual_seed(0)
    n, width = shape.ranks, shape.width
    layers = {"up": nn.Linear(width, width, False), "relu": nn.ReLU(), "down": nn.Linear(width, width, False)}
    net = nn.Sequential(OrderedDict(layers))
    x, y = torch.randn(shape.rows, width), torch.randn(shape.rows, width)
    graph = capture(Objective(net, nn.MSELoss(), ("0", "1"), ("1",)), (x, y), training=True).graph
    strategies = {
        "up": OperatorStrategy(((1, 1), (n, 1)), None),
        "relu": OperatorStrategy(((1, n),), None),
        "down": OperatorStrategy(((1, n), (1, n)), None),
    }
    program = lower(
        graph,
        make_plan(graph, Request("semi_auto", n, strategies=strategies, dataset_strategy="full_batch")),
        PARTIAL_LOSS,
    )
    own = built(program, dict(net.named_parameters()), rank.rank)
    module, updates = own.module, own.updates(lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    up, down = (own.tensors[f"{name}.weight"].detach() for name in ("up", "down"))

    class ScatterRows(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, partial: torch.Tensor) -> torch.Tensor:
            mine = partial.new_empty(partial.shape[0] // n, partial.shape[1])
            dist.reduce_scatter_tensor(mine, partial.contiguous())
            return mine

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            gathered = gradient.new_empty(gradient.shape[0] * n, gradient.shape[1])
            dist.all_gather_into_tensor(gathered, gradient.contiguous())
            return gathered

    first, second = nn.Parameter(up.clone()), nn.Parameter(down.clone())
    optimizer = torch.optim.SGD([first, second], lr=0.1, momentum=0.9)
    target = y.chunk(n, 0)[rank.rank]

    def by_hand() -> None:
        out = ScatterRows.apply(torch.relu(x @ first.t()) @ second.t())
        loss = nn.functional.mse_loss(out, target) / n
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        optimizer.step()
        optimizer.zero_grad()

    def ours() -> None:
        loss = module(x, y)
        updates.backward(loss)
        total = loss.detach().clone()
        dist.all_reduce(total)
        updates.step(measure=False)

    times: dict[str, list[float]] = {"ours": [], "by_hand": []}
    steps = [("ours", ours), ("by_hand", by_hand)]
    for _ in range(shape.repetitions):
        steps.reverse()  # the second one finds warmer caches
        for name, step in steps:
            dist.barrier()
            started = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - started)
    found = {name: statistics.median(values[WARM_UP:]) for name, values in times.items()}
    gap = max((a - b).abs().max().item() for a, b in zip(own.tensors.values(), (first, second), strict=True))
    return found | {"gap": gap}


def main() -> None:
    parser = command_line(__doc__, ranks=2, width=2048, rows=512, repetitions=30)
    shape = Shape(**vars(parser.parse_args()))
    if shape.repetitions <= WARM_UP:
        parser.error(f"--repetitions must be more than {WARM_UP}: the first {WARM_UP} warm up and are not timed.")
    found = on_ranks("benchmarks.step_overhead:measure", vars(shape), shape.ranks)
    ours, by_hand = found["ours"] * 1e3, found["by_hand"] * 1e3
    print(f"ours {ours:.2f} ms, hand-written {by_hand:.2f} ms, ratio {ours / by_hand:.3f}")
    print(f"largest difference of the weights after {shape.repetitions} steps: {found['gap']:.1e}")


if __name__ == "__main__":
    main()
