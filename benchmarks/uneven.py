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

import argparse
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from runner import launch

ROWS = 30
LAYERS, WIDTH, LENGTH = 4, 192, 64
FIRST = 3
"""Steps of each variant before those that count."""


def measure(rank: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The rows and median seconds per step of both variants, and the largest difference of their weights at the end."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from models.gpt import GPT
    from models.losses import NextTokenLoss
    from runner.planning.batch_rows import divided
    from strategies.capture import Objective, capture
    from strategies.core.program import LoweringOptions
    from strategies.core.request import Request
    from strategies.core.steps import LOCAL
    from strategies.lowering.lowering import lower
    from strategies.optimizer.stages import make_updates
    from strategies.optimizer.updates import DEFAULT_BUCKETS, axes_needed
    from strategies.planner.planner import make_plan
    from strategies.runtime.communicator import Communicator
    from strategies.runtime.module_tree import build
    from strategies.runtime.transfer import cut

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

    torch.manual_seed(0)
    ranks = rank.world_size
    pace = options["pace"] * (2 if rank.rank == ranks - 1 else 1)
    net = GPT(256, LENGTH, WIDTH, LAYERS, 4)
    batch = [torch.randint(256, (ROWS, LENGTH)) for _ in range(2)]
    captured = capture(Objective(net, NextTokenLoss(), ("0", "1"), ("1",)), batch, training=True)
    plan = make_plan(captured.graph, Request("data_parallel", ranks))
    lines = [(1.0, 1.0)] * (ranks - 1) + [(2.0, 2.0)]
    rows = {"equal": (ROWS // ranks,) * ranks, "by speed": divided(ROWS, lines, (ROWS,) * ranks)}
    names = [source.name for source in captured.graph.of_kind("parameter")]

    def trained(own: tuple[int, ...]) -> tuple[Any, list[torch.Tensor], dict[str, torch.Tensor], Paced]:
        seen = replace(plan, batch_rows=own).of_rank(rank.rank)
        program = lower(captured.graph, seen, LoweringOptions(partial_loss=True))
        paths = [path for one in program.redistributions for path in (one.forward, one.backward)]
        axes = [step.axes for path in paths for step in path if step.kind not in LOCAL]
        communicator = Paced(program.mesh, rank.rank, [*axes, *axes_needed(program)])
        tensors = {}
        for source in program.sources:
            if source.kind != "input":
                tensor = captured.tensors[source.name].detach().clone()
                tensors[source.name] = nn.Parameter(tensor) if source.kind == "parameter" else tensor
        inputs = [source for source in program.sources if source.kind == "input"]
        entries = [
            cut(tensor, program.layouts[source.id], program.mesh, rank.rank)
            for source, tensor in zip(inputs, batch, strict=True)
        ]
        module = build(program, tensors, communicator, "cpu")
        updates = make_updates(
            *(0, module, program, communicator, lambda groups: torch.optim.SGD(groups, lr=0.01), [{"names": names}]),
            cut=DEFAULT_BUCKETS,
            overlap=False,
        )
        return updates, entries, tensors, communicator

    variants = {name: trained(own) for name, own in rows.items()}

    def step(name: str) -> float:
        """Seconds of the slowest rank."""
        updates, entries, _, communicator = variants[name]
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
    (_, _, equal, _), (_, _, uneven, _) = variants.values()
    late = torch.tensor(sum(communicator.late for *_, communicator in variants.values()), dtype=torch.float64)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--pace", type=float, default=9.0)
    options = vars(parser.parse_args())
    with tempfile.TemporaryDirectory() as folder:
        found = launch.run_ranks(
            "benchmarks.uneven:measure",
            options,
            world_size=options["ranks"],
            run_dir=Path(folder),
            device="cpu",
            timeout=600,
            threads=1,
        )
    print(table(found))


if __name__ == "__main__":
    main()
