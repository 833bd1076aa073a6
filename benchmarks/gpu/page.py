"""docs/gpu.md: what a run on a GPU has measured, and every path that only a GPU takes with "run" or "never run".

Invariant: "run" is written only for what a stored run on cuda did without an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.gpu.parts import COMMANDS, GOALS, PARTS, off
from benchmarks.gpu.paths import NO_PART, NOT_HERE, PATHS

Stored = Mapping[str, Any]
"""What a run wrote: `device`, `name`, `torch`, `date`, `seconds`, and `parts`, by name {rows, seconds}."""


def text(stored: Stored | None) -> str:
    """The page, in markdown; None: nothing was ever run on a GPU."""
    lines = [
        "# On a GPU",
        "",
        "`make gpu` trains, verifies and measures on one GPU in under 9 minutes, and writes this page. Without a GPU "
        "it ends with exit code 2. `python -m benchmarks.gpu --device cpu --out FOLDER` does the same on a CPU, where "
        "only the sizes of models differ: it shows that the command works, and says nothing about GPUs.",
        "",
    ]
    if stored is None:
        lines += [
            "**No run on a GPU is recorded.** What follows lists the paths of the code that a run would take. Until "
            "then every line that says *never run* is written from documentation, and tested on CPUs as far as a CPU "
            "has it.",
            "",
        ]
    else:
        lines += [
            f"Measured {stored['date']} on {stored['name']} ({stored['device']}) with torch {stored['torch']}, in "
            f"{stored['seconds']:.0f} s.",
            "",
            *_measured(stored["parts"]),
        ]
    return "\n".join([*lines, *_paths(stored)]) + "\n"


def _measured(parts: Mapping[str, Any]) -> list[str]:
    lines = ["## Commands", "", "| part | outcome | s |", "|---|---|---:|"]
    for name in (*COMMANDS, "refusal", "capture", "library"):
        if name in parts:
            rows = parts[name]["rows"]
            errors = [row["error"] for row in rows.values() if "error" in row]
            lines.append(
                f"| {name} | {_cell('failed: ' + errors[0] if errors else 'ran')} | {parts[name]['seconds']} |"
            )
    lines += _ratios(parts.get("ratio", {}).get("rows", {}))
    lines += _memory(parts.get("memory", {}).get("rows", {}))
    lines += _steps(parts.get("calibrate", {}).get("rows", {}))
    return [*lines, ""]


UPDATES = (
    "AdamW's kernels are those that each side has by default: the plain loop's are torch's lists of operators "
    "(foreach), ours fused, for which the plain loop would have to ask."
)


def _ratios(rows: Mapping[str, Any]) -> list[str]:
    if not rows:
        return []
    lines = [
        "",
        "## A step against the plain loop",
        "",
        UPDATES,
        "",
        "| precision | ours ms | plain ms | ratio | goal |",
    ]
    lines.append("|---|---:|---:|---:|---:|")
    for name, row in rows.items():
        goal = GOALS["ratio"]["compile" in name]  # type: ignore[index]
        if "error" in row:
            lines.append(f"| {name} | {_cell('failed: ' + row['error'])} | | | {goal} |")
            continue
        lines.append(f"| {name} | {row['ours'] * 1e3:.2f} | {row['plain'] * 1e3:.2f} | {row['ratio']:.3f} | {goal} |")
    return lines


def _memory(rows: Mapping[str, Any]) -> list[str]:
    if not rows:
        return []
    lines = [
        "",
        "## Memory",
        "",
        "| plan | predicted | allocated | off | reserved | off |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, row in rows.items():
        if "error" in row:
            lines.append(f"| {name} | {_cell('failed: ' + row['error'])} | | | | |")
            continue
        pairs = [
            f"{row[key]:,} | {off(row['predicted'], row[key]):+.1%}" if row[key] else "| "
            for key in ("allocated", "reserved")
        ]
        lines.append(f"| {name} | {row['predicted']:,} | {' | '.join(pairs)} |")
    return [
        *lines,
        "",
        f"Goals: {GOALS['allocated']:.0%} of the allocated bytes, {GOALS['reserved']:.0%} of the reserved ones.",
    ]


def _steps(rows: Mapping[str, Any]) -> list[str]:
    if not rows:
        return []
    lines = ["", "## Seconds of a step after `run calibrate`", "", "| model | predicted ms | measured ms | off |"]
    lines.append("|---|---:|---:|---:|")
    for name, row in rows.items():
        if "error" in row:
            lines.append(f"| {name} | {_cell('failed: ' + row['error'])} | | |")
            continue
        error = off(row["predicted"], row["measured"])
        lines.append(f"| {name} | {row['predicted'] * 1e3:.2f} | {row['measured'] * 1e3:.2f} | {error:+.0%} |")
    return [*lines, "", f"All batches are read before the first step. Goal: {GOALS['step']:.0%}."]


def _cell(said: str) -> str:
    return said.replace("|", "/").replace("<", "&lt;")[:160]


def _paths(stored: Stored | None) -> list[str]:
    lines = [
        "## Paths that only a GPU takes",
        "",
        "The files that ask for the kind of a device are found in the code by `benchmarks/gpu/paths.py`.",
        "",
        "| file | what only a GPU does | part | |",
        "|---|---|---|---|",
    ]
    for file, (what, part) in PATHS.items():
        lines.append(f"| `{file}` | {what} | {part} | {state(part, stored)} |")
    return lines


def state(part: str, stored: Stored | None) -> str:
    """Whether a part has run on a GPU without an error: `run`, or `never run`."""
    if stored is None or stored["device"] != "cuda" or part not in stored["parts"]:
        return "never run"
    failed = any("error" in row for row in stored["parts"][part]["rows"].values())
    return "run, failed" if failed else f"run {stored['date']}"


assert {part for _, part in PATHS.values()} <= {*PARTS, NOT_HERE, NO_PART}
