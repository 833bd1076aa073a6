"""Where the time of a step of ZeRO stage 3 goes: our two engines, DeepSpeed alone and FSDP2, one step of each in turn.

    python -m benchmarks.zero_parts [--model gpt|llama|vit] [--rounds 15] [--ranks 4] [--out docs]

Model, data and optimizer are those of `benchmarks.peers`. Forward, backward and what follows it are separated by the
calls of autograd's engine, and the time in which a rank waits for a collective by the handles of torch.distributed.
Written: OUT/images/zero_parts.svg; the table is printed. CPU and gloo only.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from benchmarks.peers import sides
from benchmarks.peers.measure import WARM, config_of
from benchmarks.peers.parts import FAMILIES, PARTS, Size, data_parallel
from runner import launch
from runner.launch.orders import RankContext
from runner.planning.prepare import prepare

PHASES = ("forward", "backward", "update")
KINDS = tuple(f"{phase}{more}" for phase in PHASES for more in ("", ", waiting"))
COLOURS = dict(zip(KINDS, ("#3f51b5", "#9fa8da", "#00897b", "#80cbc4", "#ef6c00", "#ffcc80"), strict=True))
SIDES = {
    "native": "native, the default",
    "fsdp2": "FSDP2",
    "alone": "DeepSpeed alone",
    "deepspeed": "our DeepSpeed engine",
}
Seconds = dict[str, float]
LEFT, WIDTH, ROW = 150, 560, 26
"""Pixels left of the bars, of the longest bar, and of a row."""


class Clock:
    """Adds up the seconds of a step by part."""

    def __init__(self) -> None:
        self.phase, self.since, self.seconds = "forward", 0.0, dict.fromkeys(KINDS, 0.0)

    def begin(self) -> None:
        """A step begins."""
        self.seconds, self.since, self.phase = dict.fromkeys(KINDS, 0.0), time.perf_counter(), "forward"

    def enter(self, phase: str) -> None:
        """All since the last entry, but for the waiting, was part of the phase before."""
        now = time.perf_counter()
        self.seconds[self.phase] += now - self.since
        self.since, self.phase = now, phase

    def waited(self, seconds: float) -> None:
        """A rank has waited for a collective."""
        self.seconds[f"{self.phase}, waiting"] += seconds
        self.since += seconds


@contextmanager
def clocked() -> Iterator[Clock]:
    """Yields the clock of the steps inside."""
    clock, autograd, work = Clock(), cast(Any, torch.autograd), cast(Any, dist.Work)
    backward, wait = autograd._engine_run_backward, work.wait

    def run(*args: Any, **kwargs: Any) -> Any:
        clock.enter("backward")
        try:
            return backward(*args, **kwargs)
        finally:
            clock.enter("update")

    def waits(handle: Any, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return wait(handle, *args, **kwargs)
        finally:
            clock.waited(time.perf_counter() - started)

    autograd._engine_run_backward, work.wait = run, waits
    try:
        yield clock
    finally:
        autograd._engine_run_backward, work.wait = backward, wait


def measure(rank: RankContext, payload: Mapping[str, Any]) -> dict[str, list[Seconds]]:
    """The seconds of every round by part, by side, of rank 0."""
    native, deepspeed = (payload["comparisons"][engine] for engine in ("native", "deepspeed"))
    steps: dict[str, Callable[[], Any]] = {
        "native": sides.ours(native, rank),
        "fsdp2": sides.fsdp2(native, rank),
        "alone": sides.deepspeed(3, native, rank),
        "deepspeed": sides.ours(deepspeed, rank),
    }
    rounds: dict[str, list[Seconds]] = {name: [] for name in steps}
    with clocked() as clock:
        for number in range(WARM + payload["rounds"]):
            for name in list(steps)[:: 1 if number % 2 else -1]:
                dist.barrier()
                clock.begin()
                steps[name]()
                clock.enter("update")
                if number >= WARM:
                    rounds[name].append(clock.seconds)
    return rounds


def run(family: str, size: Size, ranks: int, rounds: int) -> dict[str, list[Seconds]]:
    """Those of a model."""
    part, comparisons = PARTS["zero3_native"], {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for engine in ("native", "deepspeed"):
            own = dataclasses.replace(part, parallel=data_parallel(3, engine))
            prepared = prepare(config_of(own, family, size, ranks, "cpu"), folder, say=lambda line: None)
            comparisons[engine] = sides.Comparison(part.case(family, size), prepared, folder, 1)
        measured: dict[str, list[Seconds]] = launch.run_ranks(
            "benchmarks.zero_parts:measure",
            {"comparisons": comparisons, "rounds": rounds},
            world_size=ranks,
            run_dir=folder,
            device="cpu",
            timeout=300,
            threads=1,
        )
    return measured


def medians(rounds: Mapping[str, list[Seconds]]) -> dict[str, Seconds]:
    """The median of every part over the rounds, as a share of the median step of DeepSpeed alone."""
    total = statistics.median(sum(one.values()) for one in rounds["alone"])
    return {
        name: {kind: statistics.median(one[kind] for one in steps) / total for kind in KINDS}
        for name, steps in rounds.items()
    }


def table(rounds: Mapping[str, list[Seconds]]) -> str:
    """The shares, in markdown; totals are the medians of the ratios within a round."""
    lines = [f"| | total | {' | '.join(KINDS)} |", f"|---|---:|{'---:|' * len(KINDS)}"]
    for name, parts in medians(rounds).items():
        pairs = zip(rounds[name], rounds["alone"], strict=True)
        ratio = statistics.median(sum(own.values()) / sum(other.values()) for own, other in pairs)
        lines.append(f"| {SIDES[name]} | {ratio:.2f} | {' | '.join(f'{parts[kind]:.2f}' for kind in KINDS)} |")
    return "\n".join(lines)


def plot(shares: Mapping[str, Seconds]) -> str:
    """A bar of parts per side, as SVG."""
    scale = WIDTH / max(sum(one.values()) for one in shares.values())
    parts, top = [], 10.0
    for name, one in shares.items():
        x = float(LEFT)
        parts.append(f'<text x="{LEFT - 8}" y="{top + 14:g}" text-anchor="end">{SIDES[name]}</text>')
        for kind in KINDS:
            box = f'x="{x:.1f}" y="{top:g}" width="{scale * one[kind]:.1f}" height="{ROW - 8}"'
            parts.append(f'<rect {box} fill="{COLOURS[kind]}"><title>{kind}: {one[kind]:.2f}</title></rect>')
            x += scale * one[kind]
        parts.append(f'<text x="{x + 6:.1f}" y="{top + 14:g}">{sum(one.values()):.2f}</text>')
        top += ROW
    for number, kind in enumerate(KINDS):
        x, y = LEFT + 190 * (number // 2), top + 8 + 18 * (number % 2)
        parts.append(f'<rect x="{x}" y="{y:g}" width="11" height="11" fill="{COLOURS[kind]}"/>')
        parts.append(f'<text x="{x + 16}" y="{y + 10:g}">{kind}</text>')
    box = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 50} {top + 48:g}" role="img">'
    style = "<style>text{font:12px system-ui,sans-serif;fill:#1d2430}</style>"
    return "\n".join([box + style, *parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.zero_parts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", choices=FAMILIES, default="gpt")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("docs"))
    options = parser.parse_args()
    launch.warm()
    load = os.getloadavg()[0]
    rounds = run(options.model, Size(), options.ranks, options.rounds)
    (options.out / "images").mkdir(parents=True, exist_ok=True)
    (options.out / "images" / "zero_parts.svg").write_text(plot(medians(rounds)), encoding="utf-8")
    print(f"{time.strftime('%Y-%m-%d')}, load {load:.1f} before, {os.cpu_count()} cores, {options.rounds} rounds\n")
    print(table(rounds))


if __name__ == "__main__":
    main()
