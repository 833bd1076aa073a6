"""The gain of slices by speed, as the ratio of one run: a data-parallel GPT, the last of its ranks at half speed.

    python -m benchmarks.uneven [--ranks 3] [--repetitions 10] [--pace 9]

Every rank plays a device that takes `--pace` seconds for what its process computes in one second of a core, the last
one twice as many: before each collective and at the end of a step a rank waits until its device would be there. So by
the wall clock ranks that share cores, with one another or with other work, are as fast as their devices, as long as
each gets 1 of `--pace` parts of a core; `--pace 1` slows down the last one alone. Both variants, equal slices and
slices by speed, alternate in the same processes from the same weights, and are judged by the median of the slowest
rank's steps. Ideal is 1.67 for three ranks and 1.5 for two; the goal is 1.4.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import PARTIAL_LOSS, Built, built, command_line, on_ranks, small_gpt
from runner.planning.batch_rows import divided
from strategies.capture import capture
from strategies.core.request import Request
from strategies.lowering.lowering import lower
from strategies.optimizer.updates import Updates
from strategies.planner.planner import make_plan
from strategies.runtime.communicator import Communicator
from strategies.runtime.slices import entries_of

ROWS = 30
LAYERS, WIDTH, LENGTH = 4, 192, 64
FIRST = 3
"""Steps of each variant before those that count."""


def measure(rank: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The rows and median seconds per step of both variants, and the largest difference of their weights at the end."""

    class Paced(Communicator):
        """That of a rank whose process computes faster than its device."""

        began = used = late = 0.0

        def _call(self, kind: int, group: Any, later: bool, call: Any, *args: Any) -> Any:
            self.wait()
            super()._call(kind, group, False, call, *args)
            self.resume()
            return SimpleNamespace(wait=lambda *_: None) if later else None

        def resume(self) -> None:
            """The device begins to compute."""
            self.began, self.used = time.perf_counter(), time.thread_time()

        def wait(self) -> None:
            """Until the device has computed what the process has."""
            ends = self.began + pace * (time.thread_time() - self.used)
            self.late += max(0.0, time.perf_counter() - ends)
            time.sleep(max(0.0, ends - time.perf_counter()))

    ranks = rank.world_size
    pace = options["pace"] * (2 if rank.rank == ranks - 1 else 1)
    objective, batch = small_gpt(ROWS, LENGTH, WIDTH, LAYERS)
    captured = capture(objective, batch, training=True)
    plan = make_plan(captured.graph, Request("data_parallel", ranks))
    lines = [(1.0, 1.0)] * (ranks - 1) + [(2.0, 2.0)]
    names = [source.name for source in captured.graph.of_kind("parameter")]
    rows = {"equal": (ROWS // ranks,) * ranks, "by speed": divided(ROWS, lines, (ROWS,) * ranks)}

    def trained(own: tuple[int, ...]) -> tuple[Updates, list[torch.Tensor], Built]:
        program = lower(captured.graph, replace(plan, batch_rows=own).of_rank(rank.rank), PARTIAL_LOSS)
        made = built(program, captured.tensors, rank.rank, Paced)
        updates = made.updates(lambda groups: torch.optim.SGD(groups, lr=0.01))
        return updates, entries_of(batch, program, rank.rank), made

    variants = {name: trained(own) for name, own in rows.items()}

    def step(name: str) -> float:
        """Seconds of the slowest rank."""
        updates, entries, own = variants[name]
        communicator: Any = own.communicator
        dist.barrier()
        communicator.resume()
        started = communicator.began
        updates.backward(updates.module(*entries))
        updates.reduce()
        updates.update(measure=False)
        communicator.wait()
        seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item()

    times: dict[str, list[float]] = {name: [] for name in variants}
    for repetition in range(FIRST + options["repetitions"]):
        for name in list(variants)[:: 1 if repetition % 2 else -1]:
            times[name].append(step(name))
    equal, uneven = (own.tensors for *_, own in variants.values())
    paced: list[Any] = [own.communicator for *_, own in variants.values()]
    late = torch.tensor(sum(communicator.late for communicator in paced), dtype=torch.float64)
    dist.all_reduce(late, dist.ReduceOp.MAX)
    return {
        "rows": {name: list(own) for name, own in rows.items()},
        "seconds": {name: statistics.median(values[FIRST:]) for name, values in times.items()},
        "late": late.item() / sum(map(sum, times.values())),
        "gap": max((equal[name] - uneven[name]).abs().max().item() for name in names),
    }


def table(found: dict[str, Any]) -> str:
    """The rows, milliseconds and rows per second of both variants, and their ratio."""
    lines = ["| rows of the ranks | ms per step | rows per second |", "|---|---|---|"]
    for name, seconds in found["seconds"].items():
        lines.append(f"| {name}: {found['rows'][name]} | {1e3 * seconds:.1f} | {ROWS / seconds:.1f} |")
    ratio = found["seconds"]["equal"] / found["seconds"]["by speed"]
    ends = (
        f"{ratio:.2f} times the throughput; weights differ by {found['gap']:.1e} at most",
        f"the process that got the least of a core was behind its device for {found['late']:.1%} of the time",
    )
    return "\n".join([*lines, "", *ends])


def main() -> None:
    parser = command_line(__doc__, ranks=3, repetitions=10)
    parser.add_argument("--pace", type=float, default=9.0)
    options = vars(parser.parse_args())
    found = on_ranks("benchmarks.uneven:measure", options, options["ranks"])
    print(table(found))


if __name__ == "__main__":
    main()
