"""What `auto` decided, as rows: every key with what was chosen and what the runner-up would have been, and the seconds
of both. `run explain` and the report show the same rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.report.layer_table import shown_seconds

HEAD = ("auto decided", "chosen", "runner-up")
KEYS = {
    "parallel.zero.stage": "zero",
    "parallel.pipeline.stages": "stages",
    "parallel.pipeline.micro_batches": "micro_batches",
    "parallel.recompute": "recompute",
}
"""By the key of the config: the entry of plan.json's `search.decided`."""


def decision_rows(told: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The rows below `HEAD`; `told` is `search.decided` of plan.json. Without a runner-up its cells are empty."""
    second = told["runner_up"]
    rows = [(key, _value(told, entry), "" if second is None else _value(second, entry)) for key, entry in KEYS.items()]
    slower = ""
    if second is not None:
        more = f", {second['seconds'] / told['seconds'] - 1:.2%} more" if told["seconds"] else ""
        slower = shown_seconds(second["seconds"]) + more
    return [*rows, ("seconds per step", shown_seconds(told["seconds"]), slower)]


def counted(told: Mapping[str, Any]) -> str:
    """Between how many choices, and what became of the others."""
    return (
        f"{told['tried']} choices priced, {told['pruned']} left out because their bounds are no better, {told['over']} "
        f"too large for the memory of a rank, {told['refused']} without a plan"
    )


def decision_table(told: Mapping[str, Any]) -> str:
    """The rows as text."""
    rows = [HEAD, *decision_rows(told)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, counted(told)])


def _value(choice: Mapping[str, Any], entry: str) -> str:
    alone = entry in ("stages", "micro_batches") and choice["stages"] == 1
    if entry == "recompute":
        return in_modules(choice)
    return "no pipeline" if alone else str(choice[entry])


def in_modules(choice: Mapping[str, Any]) -> str:
    """What is computed again, and in how many layers if not in all."""
    modules = choice["modules"]
    if modules is None:
        return str(choice["recompute"])
    layers = f"{len(modules)} layer{'s' * (len(modules) > 1)}"
    if choice["stages"] > 1:
        return f"{choice['recompute']} in {layers}, the first of every stage"
    return f"{choice['recompute']} in the first {layers}"
