"""Time of a sharded step against the same hand-written step with torch.distributed (same collectives), as a ratio.

    python benchmarks/step_overhead.py [--ranks 2] [--width 2048] [--rows 512] [--repetitions 30]

A two-layer tensor-parallel network: column-wise linear, relu, row-wise linear, reduce-scatter, mean squared
error, SGD with momentum. Both versions run in the same processes, one step of each in turn; the ratio of the medians,
without the first three steps, is printed. Goal: at most 1.02 for steps of 10 ms and more.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner import launch

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
    import torch
    import torch.distributed as dist
    from torch import nn

    from strategies.capture import Objective, capture
    from strategies.core.program import LoweringOptions
    from strategies.core.request import OperatorStrategy, Request
    from strategies.core.steps import LOCAL
    from strategies.lowering.lowering import lower
    from strategies.optimizer.stages import make_updates
    from strategies.optimizer.updates import axes_needed
    from strategies.planner.planner import make_plan
    from strategies.runtime.communicator import Communicator
    from strategies.runtime.module_tree import build

    shape = Shape(**options)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.relu, self.down = (
                nn.Linear(shape.width, shape.width, False),
                nn.ReLU(),
                nn.Linear(shape.width, shape.width, False),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.down(self.relu(self.up(x)))
            return out

    torch.manual_seed(0)
    n, net = shape.ranks, Net()
    x, y = torch.randn(shape.rows, shape.width), torch.randn(shape.rows, shape.width)
    graph = capture(Objective(net, nn.MSELoss(), ("0", "1"), ("1",)), (x, y), training=True).graph
    strategies = {
        "up": OperatorStrategy(((1, 1), (n, 1)), None),
        "relu": OperatorStrategy(((1, n),), None),
        "down": OperatorStrategy(((1, n), (1, n)), None),
    }
    program = lower(
        graph,
        make_plan(graph, Request("semi_auto", n, strategies=strategies, dataset_strategy="full_batch")),
        LoweringOptions(partial_loss=True),
    )
    axes = [s.axes for r in program.redistributions for c in (r.forward, r.backward) for s in c if s.kind not in LOCAL]
    communicator = Communicator(program.mesh, rank.rank, [*axes, *axes_needed(program)])
    up, down = (net.up.weight.detach().chunk(n, 0)[rank.rank], net.down.weight.detach().chunk(n, 1)[rank.rank])
    tensors = {"up.weight": nn.Parameter(up.clone()), "down.weight": nn.Parameter(down.clone())}
    module = build(program, tensors, communicator, "cpu")
    updates = make_updates(
        0,
        module,
        program,
        communicator,
        lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        [{"names": ["up.weight", "down.weight"]}],
    )

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
    gap = max((a - b).abs().max().item() for a, b in ((tensors["up.weight"], first), (tensors["down.weight"], second)))
    return found | {"gap": gap}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("ranks", 2), ("width", 2048), ("rows", 512), ("repetitions", 30)):
        parser.add_argument(f"--{name}", type=int, default=value)
    shape = Shape(**vars(parser.parse_args()))
    if shape.repetitions <= WARM_UP:
        parser.error(f"--repetitions must be more than {WARM_UP}: the first {WARM_UP} warm up and are not timed.")
    with tempfile.TemporaryDirectory() as folder:
        found = launch.run_ranks(
            "benchmarks.step_overhead:measure",
            vars(shape),
            world_size=shape.ranks,
            run_dir=Path(folder),
            device="cpu",
            timeout=300,
            threads=1,
        )
    ours, by_hand = found["ours"] * 1e3, found["by_hand"] * 1e3
    print(f"ours {ours:.2f} ms, hand-written {by_hand:.2f} ms, ratio {ours / by_hand:.3f}")
    print(f"largest difference of the weights after {shape.repetitions} steps: {found['gap']:.1e}")


if __name__ == "__main__":
    main()
