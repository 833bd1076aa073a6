"""What a background save costs the training thread, with and without saves in one run.

    python -m benchmarks.save_stall [--ranks 1] [--device cpu|cuda] [--width 384] [--layers 24] [--rows 32]
        [--rounds 12]

Windows of `WINDOW` steps alternate in the same processes, one without a save and one that begins with a save, so that
other load on the machine affects both. Measured is the training thread alone: the call of `save`, the steps,
and waiting for copies. A thread's time is CPU time, time in which it could run and other programs had the cores, and
time in which it is blocked: by the interpreter's lock, by copies, by other ranks. With one rank nothing but a save
blocks it, so CPU and blocked seconds are what a save costs whatever else runs on the machine. Medians over the rounds,
of the rank on which they are largest. Goal: 1 % of a step.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.ranks import command_line, on_ranks
from runner import checkpoint as checkpoints
from strategies.core.graph import Ref, Source, TensorSpec
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.program import Program
from strategies.optimizer.stages import make_updates
from strategies.optimizer.updates import axes_needed
from strategies.runtime.communicator import Communicator

WINDOW = 10
"""Steps of a window: those between two saves."""
KINDS = ("clock", "cpu", "queued", "blocked")


class Run:
    """Data parallel training of square layers by AdamW."""

    def __init__(self, rank: Any, width: int, layers: int, rows: int) -> None:
        self.device = rank.device
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

    def step(self) -> None:
        self.updates.backward(self.module(self.batch).square().mean())
        self.updates.reduce()
        self.saver.wait_for_copies()
        self.updates.update(measure=False)
        if self.device != "cpu":
            torch.cuda.synchronize()


def now() -> dict[str, float]:
    """Seconds of this thread, by kind; `queued` is what the kernel says that it has waited for a core."""
    clock, cpu = time.perf_counter(), time.thread_time()
    queued = int(Path("/proc/thread-self/schedstat").read_text(encoding="utf-8").split()[1]) / 1e9
    return {"clock": clock, "cpu": cpu, "queued": queued, "blocked": clock - cpu - queued}


def measure(rank: Any, payload: dict[str, Any]) -> dict[str, Any]:
    """Median seconds of a window without a save, of what a save adds to it, and of the call, by kind; of the slowest
    rank."""
    run = Run(rank, payload["width"], payload["layers"], payload["rows"])
    folder, wanted = rank.run_dir, checkpoints.SaveOptions(keep=2)
    found: dict[str, list[dict[str, float]]] = {"plain": [], "beside": [], "call": []}

    def spent(before: dict[str, float]) -> dict[str, float]:
        return {kind: seconds - before[kind] for kind, seconds in now().items()}

    for number in range(payload["rounds"] + 1):
        for name in ("plain", "beside"):
            dist.barrier()
            begin = now()
            if name == "beside":
                run.saver.save(folder, number + 1, run.content, wanted)
                found["call"].append(spent(begin))
            for _ in range(WINDOW):
                run.step()
            found[name].append(spent(begin))
            run.saver.wait()
    run.saver.close()
    rounds = {name: own[1:] for name, own in found.items()}  # the first one makes buffers
    pairs = list(zip(rounds["beside"], rounds["plain"], strict=True))
    medians = [
        [statistics.median(one[kind] for one in rounds["plain"]) for kind in KINDS],
        [statistics.median(beside[kind] - plain[kind] for beside, plain in pairs) for kind in KINDS],
        [statistics.median(one[kind] for one in rounds["call"]) for kind in KINDS],
    ]
    slowest = torch.tensor(medians, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return {"seconds": slowest.tolist(), "bytes": run.saver.buffer_bytes}


def main() -> None:
    parser = command_line(__doc__, ranks=1, width=384, layers=24, rows=32, rounds=12)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    found = on_ranks("benchmarks.save_stall:measure", vars(options), options.ranks, options.device)
    (plain, extra, call), header = found["seconds"], ("by the clock", "CPU", "waiting for a core", "blocked")
    print(f"| ms of the training thread | {' | '.join(header)} |\n|---|{'---:|' * len(header)}")
    for name, own, count in (("a step", plain, WINDOW), ("a save", extra, 1), ("of that the call", call, 1)):
        print(f"| {name} | {' | '.join(f'{1e3 * one / count:.2f}' for one in own)} |")
    step = (plain[1] + plain[3]) / WINDOW
    print(f"\nCPU and blocked: a save costs {(extra[1] + extra[3]) / step:.1%} of a step, ")
    print(f"{(extra[1] + extra[3]) / step / WINDOW:.2%} of every step; {found['bytes'] / 1e6:.1f} MB per rank")


if __name__ == "__main__":
    main()
