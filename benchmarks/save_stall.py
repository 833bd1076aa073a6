"""What a background save costs the training thread, with and without saves in one run.

    python -m benchmarks.save_stall [--ranks 1] [--device cpu|cuda] [--width 384] [--layers 24] [--rows 32]
        [--rounds 12]

Windows of `WINDOW` steps alternate in the same processes, one without a save and one that begins with a save, so that
other load on the machine affects both. What is measured is the training thread alone: the call of `save`, the steps,
and waiting for copies. A thread's time is CPU time, time in which it could run and other programs had the cores, and
time in which it is blocked: by the interpreter's lock, by copies, by other ranks. With one rank nothing but a save
blocks it, so CPU and blocked seconds are what a save costs whatever else runs on the machine. Medians over the rounds,
of the rank on which they are largest. Goal: 1 % of a step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.checkpoint import Run
from runner import checkpoint as checkpoints
from runner import launch

WINDOW = 10
"""Steps of a window: those between two saves."""
KINDS = ("clock", "cpu", "queued", "blocked")


def now() -> dict[str, float]:
    """Seconds of this thread, by kind; `queued` is what the kernel says that it has waited for a core."""
    clock, cpu = time.perf_counter(), time.thread_time()
    queued = int(Path("/proc/thread-self/schedstat").read_text(encoding="utf-8").split()[1]) / 1e9
    return {"clock": clock, "cpu": cpu, "queued": queued, "blocked": clock - cpu - queued}


def measure(rank: Any, payload: dict[str, Any]) -> dict[str, Any]:
    """Median seconds of a window without a save, of what a save adds to it, and of the call, by kind; of the slowest
    rank."""
    run = Run(rank, payload["width"], payload["layers"], payload["rows"], "wall")
    folder, wanted = Path(payload["folder"]), checkpoints.SaveOptions(keep=2)
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    for name, value in (("width", 384), ("layers", 24), ("rows", 32), ("rounds", 12)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = launch.run_ranks(
            "benchmarks.save_stall:measure",
            vars(options) | {"folder": folder},
            world_size=options.ranks,
            run_dir=Path(folder),
            device=options.device,
            timeout=600,
            threads=1,
        )
    (plain, extra, call), header = found["seconds"], ("by the clock", "CPU", "waiting for a core", "blocked")
    print(f"| ms of the training thread | {' | '.join(header)} |\n|---|{'---:|' * len(header)}")
    for name, own, count in (("a step", plain, WINDOW), ("a save", extra, 1), ("of that the call", call, 1)):
        print(f"| {name} | {' | '.join(f'{1e3 * one / count:.2f}' for one in own)} |")
    step = (plain[1] + plain[3]) / WINDOW
    print(f"\nCPU and blocked: a save costs {(extra[1] + extra[3]) / step:.1%} of a step, ")
    print(f"{(extra[1] + extra[3]) / step / WINDOW:.2%} of every step; {found['bytes'] / 1e6:.1f} MB per rank")


if __name__ == "__main__":
    main()
