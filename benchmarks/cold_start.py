"""Time from the command to the first optimizer step on 8 ranks, against 8 plain processes that only form a process
group.

    python benchmarks/cold_start.py [--recipe ffn_auto] [--repetitions 3]

Baseline: as many processes started one by one, which import torch, form a gloo group and add one number; the minimum
for any launcher without a shared import. Both run alternately; the ratio of the medians is printed, with a breakdown of
our time. Goal: at most 8 s on 2 cores.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MEET = """
import sys, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=int(sys.argv[3]))
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


def ours(recipe: str, folder: Path) -> tuple[float, str]:
    """Seconds until metrics.jsonl has its first line, and the command's breakdown of them."""
    words = [
        f"+recipe={recipe}",
        "train.steps=1",
        f"hydra.run.dir={folder}",
        "evaluate.metric=null",
        "evaluate.args={}",
    ]
    started = time.perf_counter()
    command = subprocess.Popen([sys.executable, "-m", "runner", *words], stdout=subprocess.PIPE, encoding="utf-8")
    first = None
    while command.poll() is None:
        if first is None and (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size:
            first = time.perf_counter() - started
        time.sleep(0.01)
    assert command.stdout is not None
    first_step = re.search(r"first step after .*", command.stdout.read())
    if command.returncode or first is None or first_step is None:
        raise SystemExit(f"the run of {recipe} failed")
    return first, first_step[0]


def baseline(ranks: int, folder: Path) -> float:
    started = time.perf_counter()
    store = str(folder / "store")
    processes = [
        subprocess.Popen([sys.executable, "-W", "ignore", "-c", MEET, store, str(rank), str(ranks)])
        for rank in range(ranks)
    ]
    if any(process.wait() for process in processes):
        raise SystemExit("the baseline failed")
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="ffn_auto")
    parser.add_argument("--ranks", type=int, default=8, help="of the baseline; a recipe says its own")
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    first, plain, first_step = [], [], ""
    for _ in range(options.repetitions):
        with tempfile.TemporaryDirectory() as folder:
            seconds, first_step = ours(options.recipe, Path(folder) / "run")
            first.append(seconds)
            plain.append(baseline(options.ranks, Path(folder)))
    mine, other = statistics.median(first), statistics.median(plain)
    print(f"first step of {options.recipe} {mine:.2f} s, {options.ranks} plain processes {other:.2f} s")
    print(f"ratio {mine / other:.2f}")
    print(f"of the last round: {first_step}")


if __name__ == "__main__":
    main()
