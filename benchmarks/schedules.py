"""Synthesised pipeline schedules against named ones: over random cost tables, against DualPipe's bubble, and measured.

    python -m benchmarks.schedules [--tables 500] [--first 0] [--repetitions 7] [--only PART...] [--svg FILE]

tables: every named schedule against the one that is made for the same stages in the memory of its busiest group.
dualpipe: its bubble is (PP/2 - 1)(F&B + B - 3W) with PP + 1 micro-batches in memory, and it holds the parameters twice;
synthesised schedules get as many or one less, but none of the second copy's memory. measured: ranks on gloo run a
network of small layers by each schedule; a pass waits as long as its stage is said to take, so ranks that share cores
do not slow each other.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.ranks import built_stage, command_line, on_ranks
from runner.report.schedule import drawing
from strategies.capture import Objective, capture
from strategies.lowering.pipeline_schedule import (
    Schedule,
    in_a_v,
    make_schedule,
    owners_of,
    peak_activations,
    round_robin,
)
from strategies.lowering.pipeline_synthesis import ScheduleProblem, synthesise
from strategies.lowering.pipeline_timeline import StageTimes, makespan, timeline
from strategies.runtime.peers import Peers
from strategies.runtime.pipeline_stage import RankStage, StageRunner

NAMED = ("1f1b", "zero_bubble", "interleaved_1f1b", "zero_bubble x 2", "zbv")
RANKS, MICRO_BATCHES = 4, 8
SECONDS = 0.01
STAGES = ((1.0, 1.0, 1.0), (1.0, 1.0, 1.0), (1.0, 1.0, 1.0), (1.8, 1.6, 1.4))
"""Forward, input and weight gradients of the measured stages: the last one has the output layer and the loss."""


def table(seed: int) -> tuple[list[StageTimes], list[float], int]:
    """Random seconds and sizes of the halves of every stage, even or not, and a number of micro-batches."""
    draw = random.Random(seed)
    groups, spread = draw.choice((2, 3, 4, 6, 8)), draw.choice((0.0, 0.3, 1.0, 3.0))
    weight, send = draw.choice((0.5, 1.0, 1.5)), draw.choice((0.0, 0.2))

    def some(mean: float) -> float:
        return mean * (1 + spread * draw.random())

    times = [StageTimes(some(1.0) + send, some(1.0) + send, some(weight)) for _ in range(2 * groups)]
    return times, [some(1.0) for _ in times], groups * draw.choice((1, 2, 3))


def compared(kind: str, seed: int) -> float:
    """Seconds of the synthesised schedule relative to the named one."""
    halves, sizes, micro_batches = table(seed)
    groups = len(halves) // 2
    if kind in ("1f1b", "zero_bubble"):
        pairs = zip(halves[::2], halves[1::2], strict=True)
        halves = [StageTimes(a.forward + b.forward, a.input + b.input, a.weight + b.weight) for a, b in pairs]
        sizes = [a + b for a, b in zip(sizes[::2], sizes[1::2], strict=True)]
        named = make_schedule(kind, groups, micro_batches)
    else:
        named = make_schedule(kind.split()[0], groups, micro_batches, 2)
    most = max(peak_activations(actions, sizes) for actions in named)
    made = synthesise(ScheduleProblem(halves, owners_of(named), micro_batches, sizes, [most] * groups), [named])
    assert made is not None
    assert max(peak_activations(actions, sizes) for actions in made) <= most * (1 + 1e-6)
    return makespan(made, halves) / makespan(named, halves)


def tables(first: int, count: int) -> str:
    lines = ["| schedule | mean | best | slower |", "|---|---|---|---|"]
    for kind in NAMED:
        ratios = [compared(kind, seed) for seed in range(first, first + count)]
        slower = sum(ratio > 1 + 1e-9 for ratio in ratios)
        lines.append(f"| {kind} | {statistics.mean(ratios):.3f} | {min(ratios):.3f} | {slower} of {count} |")
    return "\n".join(lines)


def dualpipe(groups: int = 8, micro_batches: int = 20) -> str:
    """Bubbles with F = 1, B = 2, W = 1 and F&B = F + B."""
    theirs = (groups / 2 - 1) * (3 + 2 - 3)
    lines = [
        "| schedule | micro-batches in memory | bubble | of DualPipe's | lower bound |",
        "|---|---|---|---|---|",
        f"| DualPipe, {groups} groups, {micro_batches} micro-batches | {groups + 1} | {theirs:g} | 1 | |",
    ]
    for owners, name in ((round_robin(groups, 2), ""), (in_a_v(groups), " in a V"), (round_robin(groups, 4), "")):
        virtual = len(owners) // groups
        times, sizes = [StageTimes(1 / virtual, 1 / virtual, 1 / virtual)] * len(owners), [1 / virtual] * len(owners)
        for most in (groups + 1.0, float(groups)):
            problem = ScheduleProblem(times, owners, micro_batches, sizes, [most] * groups)
            made = synthesise(problem)
            assert made is not None
            own, least = (seconds - 3 * micro_batches for seconds in (makespan(made, times), problem.lower_bound))
            what = f"synthesised, {virtual} stages per rank{name}"
            lines.append(f"| {what} | {most:g} | {own:g} | {own / theirs:.2f} | {least:g} |")
    return "\n".join(lines)


def stage_times() -> list[StageTimes]:
    """Of the measured stages; all of the first one's backward is input gradients, for nothing waits for it."""
    times = [StageTimes(*(SECONDS * one for one in own)) for own in STAGES]
    return [StageTimes(times[0].forward, times[0].input + times[0].weight, 0.0), *times[1:]]


def schedules() -> dict[str, Schedule]:
    """1F1B, ZB-H1, and synthesised schedules in the memory of each."""
    found: dict[str, Schedule] = {}
    for kind in ("1f1b", "zero_bubble"):
        named = make_schedule(kind, RANKS, MICRO_BATCHES)
        most = max(peak_activations(actions) for actions in named)
        problem = ScheduleProblem(stage_times(), range(RANKS), MICRO_BATCHES, [1.0] * RANKS, [most] * RANKS)
        made = synthesise(problem, [named])
        assert made is not None
        found |= {kind: named, f"synthesised in the memory of {kind}": made}
    return found


def measure(rank: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Median seconds of a step and the loss, by schedule."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(RANKS)))
    x, y = torch.randn(2 * MICRO_BATCHES, 32), torch.randn(2 * MICRO_BATCHES, 32)
    captured = capture(Objective(net, nn.MSELoss(), ("0", "1"), ("1",)), (x[:2], y[:2]), training=True)
    stages, own = built_stage(captured, {str(number): number for number in range(RANKS)}, rank.rank, RANKS)
    peers = Peers(own.communicator, stages, range(RANKS))
    sgd = lambda groups: torch.optim.SGD(groups, lr=0.0)  # noqa: E731
    updates = own.updates(sgd, accumulate=MICRO_BATCHES, peers=peers)
    times = stage_times()[rank.rank]

    last_half = times.weight if rank.rank else times.input
    for name, tensor in own.tensors.items():
        if name.endswith("weight"):
            tensor.register_post_accumulate_grad_hook(lambda _: time.sleep(last_half))

    def run(entries: Any, key: int) -> Any:
        time.sleep(times.forward)
        for value in entries[2:]:  # what the stage before sends
            value.register_hook(lambda _: time.sleep(times.input))
        return own.module(*entries)

    reduced = tuple(own.tensors[name] for name in own.program.reductions)
    unit = RankStage(stages[rank.rank], own.program, run, reduced)
    parts = list(zip(x.split(2), y.split(2), strict=True))
    runners = {
        name: StageRunner(peers, [unit], schedule, MICRO_BATCHES, "cpu", {}) for name, schedule in schedules().items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    losses: dict[str, float] = {}
    for repetition in range(1 + options["repetitions"]):
        for name, runner in runners.items():
            dist.barrier()
            started = time.perf_counter()
            total = runner.step(lambda number: (parts[number], 0), updates)
            spent = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            updates.step()
            peers.share_loss(total)
            losses[name] = total.item() / MICRO_BATCHES
            if repetition:
                seconds[name].append(spent.item())
    updates.close()
    return {"seconds": {name: statistics.median(own) for name, own in seconds.items()}, "losses": losses}


def measured(repetitions: int) -> str:
    found = on_ranks("benchmarks.schedules:measure", {"repetitions": repetitions}, RANKS)
    lines = ["| schedule | micro-batches kept | predicted ms | measured ms | of 1f1b |", "|---|---|---|---|---|"]
    for name, schedule in schedules().items():
        kept = max(peak_activations(actions) for actions in schedule)
        seconds = found["seconds"][name]
        lines.append(
            f"| {name} | {kept:g} | {1e3 * makespan(schedule, stage_times()):.0f} | {1e3 * seconds:.0f} | "
            f"{seconds / found['seconds']['1f1b']:.3f} |"
        )
    spread = max(found["losses"].values()) - min(found["losses"].values())
    return "\n".join([*lines, "", f"losses differ by {spread:.1e}"])


def picture(named: Sequence[str]) -> str:
    """The timelines of measured schedules to one scale, as SVG."""
    every = schedules()
    spans = [timeline(every[name], stage_times()) for name in named]
    latest = max(own[-1].end for one in spans for own in one)
    parts, top, width = [], 0.0, 0.0
    for name, one in zip(named, spans, strict=True):
        share = max(own[-1].end for own in one) / latest
        chart = drawing(one)
        left = chart["width"] - 884
        parts.append(f'<text x="2" y="{top + 16:g}" font-weight="bold">{name}</text>')
        for row in chart["groups"]:
            parts.append(f'<text x="2" y="{top + 22 + row["y"]:g}">{row["name"]}</text>')
        for bar in chart["bars"]:
            x, wide = left + (bar["x"] - left) * share, bar["width"] * share
            box = f'x="{x:.1f}" y="{top + 22 + bar["y"]:g}" width="{wide:.1f}" height="{chart["bar_height"]}"'
            parts.append(f'<rect {box} fill="{bar["colour"]}" stroke="#fff"><title>{bar["title"]}</title></rect>')
        top, width = top + 30 + chart["height"], max(width, chart["width"])
        legend = chart["legend"]
    for number, (what, colour) in enumerate(legend):
        parts.append(f'<rect x="{70 + 160 * number}" y="{top}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{88 + 160 * number}" y="{top + 11}">{what}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top + 20:g}" role="img">'
    style = "<style>text{font:12px system-ui,sans-serif;fill:#1d2430}</style>"
    return "\n".join([head + style, *parts, "</svg>\n"])


def main() -> None:
    parser = command_line(__doc__, tables=500, first=0, repetitions=7)
    parser.add_argument("--only", nargs="+", choices=("tables", "dualpipe", "measured"), default=())
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args()
    parts = {
        "tables": lambda: tables(options.first, options.tables),
        "dualpipe": dualpipe,
        "measured": lambda: measured(options.repetitions),
    }
    for name, part in parts.items():
        if not options.only or name in options.only:
            print(f"{part()}\n", flush=True)
    if options.svg is not None:
        options.svg.write_text(picture(("1f1b", "synthesised in the memory of 1f1b")), encoding="utf-8")


if __name__ == "__main__":
    main()
