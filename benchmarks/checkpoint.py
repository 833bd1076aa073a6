"""The overhead of a background save, as a ratio measured in one run: the additional step time during a background save
over the time of a blocking save.

    python -m benchmarks.checkpoint [--ranks 1] [--device cpu|cuda] [--width 1024] [--layers 24] [--repetitions 9]
        [--clock wall|cpu]

Repetitions of plain steps, a blocking save and a background save alternate in the same processes, so that other load on
machine affects all of them; every figure is a median. Goal: at most 5 %. A background save needs host memory for one
copy of a rank's shards.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner import checkpoint as checkpoints
from runner import launch
from strategies.core.graph import Ref, Source, TensorSpec
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.program import Program
from strategies.optimizer.stages import make_updates
from strategies.optimizer.updates import axes_needed
from strategies.runtime.communicator import Communicator

PLAIN = 6
"""Steps without a save per round."""
CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
"""On a machine with more work than cores, the clock of the training thread: it counts neither waiting for a core nor
for the disk, which makes a blocking save look cheaper than it is."""


class Run:
    """Data parallel training of square layers by AdamW."""

    def __init__(self, rank: Any, width: int, layers: int, rows: int, clock: str) -> None:
        self.device, self.clock = rank.device, CLOCKS[clock]
        module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).to(self.device)
        mesh = Mesh((("dp", rank.world_size),))
        names = [name for name, _ in module.named_parameters()]
        sources = tuple(Source(name, "parameter", name, TensorSpec((width, width), "float32"), True) for name in names)
        axes = mesh.sorted(mesh.names)
        layouts = {name: Layout.replicated(2) for name in names}
        open_axes = dict.fromkeys(names, axes)
        program = Program(mesh, sources, layouts, (), tuple(map(Ref, names)), open_axes, tuple(names), False)
        communicator = Communicator(mesh, rank.rank, axes_needed(program))
        groups = [{"names": names}]
        updates = make_updates(0, module, program, communicator, lambda given: torch.optim.AdamW(given), groups)
        config = {"world_size": mesh.size, "train": {"seed": 0}}
        self.module, self.updates = module, updates
        self.content = checkpoints.Content(program, communicator, {}, updates, None, {}, config)
        self.saver = checkpoints.Saver()
        self.batch = torch.randn(rows, width, device=self.device)

    def step(self) -> float:
        """Run one step and return its seconds."""
        started = self.clock()
        self.updates.backward(self.module(self.batch).square().mean())
        self.updates.reduce()
        self.saver.wait_for_copies()
        self.updates.update(measure=False)
        if self.device != "cpu":
            torch.cuda.synchronize()
        return self.clock() - started


def measure(rank: Any, payload: dict[str, Any]) -> dict[str, Any]:
    """Medians over the repetitions, and checkpoint bytes, of this rank."""
    run = Run(rank, payload["width"], payload["layers"], payload["rows"], payload["clock"])
    saver, wanted = run.saver, checkpoints.SaveOptions(keep=2)
    waiting = checkpoints.Saver(background=False)
    folder, number = Path(payload["folder"]), 0
    found: dict[str, list[float]] = {"step": [], "blocking": [], "extra": [], "call": [], "under way": [], "ratio": []}
    for repetition in range(payload["repetitions"] + 1):
        plain = statistics.median(run.step() for _ in range(PLAIN))
        number += 1
        started = run.clock()
        waiting.save(folder, number, run.content, wanted)
        blocking = run.clock() - started
        run.step()
        number += 1
        started = run.clock()
        saver.save(folder, number, run.content, wanted)
        call = run.clock() - started
        steps = 0
        while saver.busy or not steps:
            run.step()
            steps += 1
        under_way = run.clock() - started
        saver.wait()
        after = statistics.median(run.step() for _ in range(PLAIN))
        plain = (plain + after) / 2
        if repetition:  # the first one makes buffers and imports
            extra = under_way - steps * plain
            values = (plain, blocking, extra, call, under_way, extra / blocking)
            for name, value in zip(found, values, strict=True):
                found[name].append(value)
    medians: dict[str, Any] = {name: statistics.median(values) for name, values in found.items()}
    return medians | {"resident": saver.buffer_bytes, "parameters": sum(one.numel() for one in run.module.parameters())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    for name, value in (("width", 1024), ("layers", 24), ("rows", 256), ("repetitions", 9)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = launch.run_ranks(
            "benchmarks.checkpoint:measure",
            vars(options) | {"folder": folder},
            world_size=options.ranks,
            run_dir=Path(folder),
            device=options.device,
            timeout=600,
            threads=1,
        )
    shown = {name: f"{1000 * measured[name]:.0f} ms" for name in ("step", "blocking", "call", "under way", "extra")}
    print(
        f"{measured['parameters']:,} parameters, {options.ranks} ranks on {options.device}, by the "
        f"{options.clock} clock: "
        f"step {shown['step']}; blocking save {shown['blocking']}; in the background {shown['under way']}, the "
        f"call {shown['call']}; steps longer by {shown['extra']} together; ratio {measured['ratio']:.3f}; "
        f"{measured['resident']:,} bytes more in the host's memory"
    )


if __name__ == "__main__":
    main()
