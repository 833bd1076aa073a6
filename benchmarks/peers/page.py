"""The page of the comparisons: the JSON of every part, a table and a plot of the ratios."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.measure import TOLERANCE, WARM, Measured
from benchmarks.peers.parts import FAMILIES, PARTS, Size

COLOURS = {"gpt": "#3f51b5", "llama": "#00897b", "vit": "#ef6c00"}
CROWDED = (
    " With so many other programs on the cores the wall clock decides little: read its quartiles, and the column of "
    "CPU time."
)
"""Of measurements under a load of more than twice the cores."""
LEFT, WIDTH, ROW, HIGHEST = 230, 560, 15, 2.0
"""Pixels left of the plot, of its axis and of a bar; the ratio at the end of the axis."""


def store(folder: Path, name: str, found: Sequence[Measured], size: Size, ranks: int, device: str, load: float) -> None:
    """Write the outcome of a part; models that were not measured keep theirs, if they were measured in the same way."""
    file = folder / "peers" / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    how = {"size": asdict(size), "ranks": ranks, "device": device, "torch": torch.__version__}
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    kept = before["models"] if before and all(before[key] == value for key, value in how.items()) else {}
    seen = {"date": time.strftime("%Y-%m-%d"), "load": round(load, 1), "cores": os.cpu_count(), "cpu": _processor()}
    models = {one.family: {**seen, "rounds": len(one.seconds["ours"]), **_figures(one)} for one in found}
    file.write_text(json.dumps({**how, "models": {**kept, **models}}, indent=1) + "\n", encoding="utf-8")


def _figures(one: Measured) -> dict[str, Any]:
    return {
        "ours": one.median("ours"),
        "peer": one.median("peer"),
        "ratio": one.ratio,
        "spread": one.spread,
        "cpu_ratio": one.cpu_ratio,
        "difference": one.difference,
    }


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def write(folder: Path) -> None:
    """Write page and plot from the stored parts."""
    stored = {
        name: json.loads(file.read_text(encoding="utf-8"))
        for name in PARTS
        if (file := folder / "peers" / f"{name}.json").exists()
    }
    (folder / "images").mkdir(parents=True, exist_ok=True)
    (folder / "images" / "peers.svg").write_text(plot(stored), encoding="utf-8")
    (folder / "peers.md").write_text(text(stored), encoding="utf-8")


def text(stored: dict[str, dict[str, Any]]) -> str:
    """The page, in markdown."""
    one = next(iter(stored.values()))
    every = [entry for part in stored.values() for entry in part["models"].values()]
    dates = sorted({entry["date"] for entry in every})
    loads = sorted(entry["load"] for entry in every)
    met = sum(entry["ratio"] <= PARTS[name].goal for name, part in stored.items() for entry in part["models"].values())
    size = Size(**one["size"])
    lines = [
        "# Beside other libraries",
        "",
        "`python -m benchmarks.peers` trains the same module on the same batch from the same weights with ours and "
        "with another library, one step of each in turn in the same processes. `--only PART` measures one part and "
        "keeps the others; on a machine with a GPU for every rank it runs on nccl.",
        "",
        f"Measured {' to '.join(dict.fromkeys((dates[0], dates[-1])))} with torch {one['torch']} on {one['ranks']} "
        f"{'gloo' if one['device'] == 'cpu' else 'nccl'} ranks of one thread, {every[0]['cores']} cores "
        f"({every[0]['cpu']}), which other programs used as well: load {loads[0]:g} to {loads[-1]:g} before a part. "
        f"Models of width {size.width} and {size.layers} layers ({size.deep} in pipelines), {size.rows} rows of "
        f"{size.sequence} tokens, AdamW, fp32; pipelines of {size.micro_batches} micro-batches, and a GPT whose output "
        "layer has a weight of its own there.",
        "",
        f"{met} of {len(every)} goals are met. A ratio below 1 means that ours is faster."
        + (CROWDED if loads[-1] > 2 * every[0]["cores"] else ""),
        "",
        "![Ratio of step times by peer and model](images/peers.svg)",
        "",
        "| peer | ours | model | ours ms | peer ms | ratio | quartiles | CPU time | goal | losses differ by |",
        "|---|---|---|---:|---:|---:|---|---:|---:|---:|",
    ]
    for name, part in stored.items():
        for family in FAMILIES:
            if family not in part["models"]:
                continue
            entry, goal = part["models"][family], PARTS[name].goal
            low, high = entry["spread"]
            shown = f"**{entry['ratio']:.2f}**" if entry["ratio"] <= goal else f"{entry['ratio']:.2f}"
            lines.append(
                f"| {PARTS[name].peer} | {PARTS[name].own} | {family} | {entry['ours'] * 1e3:.0f} | "
                f"{entry['peer'] * 1e3:.0f} | {shown} | {low:.2f} to {high:.2f} | {entry['cpu_ratio']:.2f} | "
                f"{goal:.2f} | {entry['difference']:.0e} |"
            )
    lines += [
        "",
        f"Times are medians of {min(entry['rounds'] for entry in every)} rounds or more of the slowest rank, without "
        f"the first {WARM}; the ratio is the median of the ratios of single rounds, and its quartiles stand beside it. "
        "CPU time is the same ratio for the CPU seconds of all ranks together, which other programs disturb less. A "
        f"loss that differs by more than {TOLERANCE:.0e} in any step ends the run with an error.",
        "",
        "Peers run as their documentation writes them: DDP with `gradient_as_bucket_view` and `static_graph`, "
        "`fully_shard` on every layer and on the model, DeepSpeed with the defaults of its stage, "
        "`ColwiseParallel` and `RowwiseParallel` on the products of every layer, and pipelines cut into stages of "
        "equally many layers.",
    ]
    return "\n".join(lines) + "\n"


def plot(stored: dict[str, dict[str, Any]]) -> str:
    """A bar per peer and model, with the quartiles of its ratio, as SVG."""

    def x(ratio: float) -> float:
        return LEFT + WIDTH * min(ratio, HIGHEST) / HIGHEST

    parts, top = [], 24.0
    for name, part in stored.items():
        models = [family for family in FAMILIES if family in part["models"]]
        middle = top + ROW * len(models) / 2 + 4
        parts.append(f'<text x="{LEFT - 8}" y="{middle:g}" text-anchor="end">{PARTS[name].peer}</text>')
        goal = x(PARTS[name].goal)
        for family in models:
            entry = part["models"][family]
            low, high = (x(one) for one in entry["spread"])
            title = f"<title>{family}: {entry['ratio']:.3f}</title>"
            bar = f'x="{LEFT}" y="{top:g}" width="{x(entry["ratio"]) - LEFT:.1f}" height="{ROW - 3}"'
            parts.append(f'<rect {bar} fill="{COLOURS[family]}">{title}</rect>')
            line = f'x1="{low:.1f}" x2="{high:.1f}" y1="{top + 6:g}" y2="{top + 6:g}"'
            parts.append(f'<line {line} stroke="#1d2430" stroke-width="2"/>')
            parts.append(
                f'<text x="{max(high, x(entry["ratio"])) + 5:.1f}" y="{top + 10:g}">{entry["ratio"]:.2f}</text>'
            )
            top += ROW
        parts.append(
            f'<line x1="{goal:.1f}" x2="{goal:.1f}" y1="{top - ROW * len(models) - 2:g}" y2="{top:g}" '
            'stroke="#c62828" stroke-dasharray="3 2"/>'
        )
        top += 9
    one = x(1.0)
    axis = f'<line x1="{one}" x2="{one}" y1="18" y2="{top:g}" stroke="#888"/>'
    head = [f'<text x="{one}" y="14" text-anchor="middle">1: as fast as the peer</text>']
    for number, (family, colour) in enumerate(COLOURS.items()):
        head.append(f'<rect x="{LEFT + 80 * number}" y="{top + 4:g}" width="11" height="11" fill="{colour}"/>')
        head.append(f'<text x="{LEFT + 16 + 80 * number}" y="{top + 14:g}">{family}</text>')
    head.append(f'<text x="{LEFT + 250}" y="{top + 14:g}" fill="#c62828">- - goal</text>')
    box = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 60} {top + 22:g}" role="img">'
    style = "<style>text{font:12px system-ui,sans-serif;fill:#1d2430}</style>"
    return "\n".join([box + style, axis, *head, *parts, "</svg>\n"])
