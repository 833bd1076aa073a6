"""A training step whose samples take 20 ms each to read, against the same step with the data in memory, as a ratio.

    python -m benchmarks.data [--steps 60] [--workers 8]

Both train in one rank, a step of each in turn, on the same rows, so that what else the machine does slows both; the
median of the ratios of neighbouring steps is printed, without the first ten. The readers are those of training, with
`data.workers=8`, `auto` and 0. Goal: at most 1.02 with enough workers, as many as read the samples of a step in
the time of a step; the default of 8 read them in 40 ms.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from benchmarks.ranks import command_line, on_ranks
from runner.data.synthetic import Regression

WIDTH, LAYERS, ROWS = 2048, 6, 16
"""Of the network, and samples of a step."""
SECONDS = 0.02
WARM_UP = 10


class Slow(Regression):
    """Samples x [WIDTH], y [1], each of which takes `seconds` to read."""

    def __init__(self, seconds: float) -> None:
        super().__init__(256, WIDTH, 1)
        self._seconds = seconds

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self._seconds)
        return super().__getitem__(index)


def measure(rank: Any, options: dict[str, Any]) -> dict[str, float]:
    """The median ratio of steps, and the median seconds of both."""
    import torch
    from torch import nn

    from runner.config.schema import Data
    from runner.data.loader import LocalBatches
    from runner.data.order import Order
    from runner.data.reading import BatchReader, Load, RowRequest

    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)], nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    order = Order(256, ROWS, 0)

    def requests() -> Iterator[RowRequest]:
        for step in range(options["steps"]):
            yield RowRequest(tuple(order.rows(step)), order.epoch(step))

    def loader(seconds: float) -> Load:
        batches = LocalBatches(Slow(seconds), None, (((0, ROWS), (0, WIDTH)), ((0, ROWS), (0, 1))))
        return lambda request: batches.load(request.rows, request.epoch)

    def reader(seconds: float, workers: int | str) -> BatchReader:
        section = Data(target="benchmarks.data.Slow", workers=workers)  # type: ignore[arg-type]
        return BatchReader(loader(seconds), lambda: loader(seconds), requests(), section, pinned=False)

    times: list[list[float]] = [[], []]
    with ExitStack() as stack:
        sides = [reader(SECONDS, options["workers"]), reader(0.0, 0)]
        for side in sides:
            stack.enter_context(side.reading())
        for step in range(options["steps"]):
            seen: dict[int, Tensor] = {}
            for number in (step % 2, 1 - step % 2):
                started = time.perf_counter()
                x, y = sides[number].next()
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
                times[number].append(time.perf_counter() - started)
                seen[number] = x
            assert torch.equal(seen[0], seen[1]), "the rows differ"
    slow, memory = (one[WARM_UP:] for one in times)
    ratios = [one / other for one, other in zip(slow, memory, strict=True)]
    return {"ratio": statistics.median(ratios), "slow": statistics.median(slow), "memory": statistics.median(memory)}


def main() -> None:
    options = command_line(__doc__, steps=60, workers=8).parse_args()
    for workers in (options.workers, "auto", 0):
        found = on_ranks("benchmarks.data:measure", {"steps": options.steps, "workers": workers}, 1)
        print(
            f"data.workers={workers}: {1000 * found['slow']:.1f} ms a step, {1000 * found['memory']:.1f} ms with the "
            f"data in memory, ratio {found['ratio']:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
