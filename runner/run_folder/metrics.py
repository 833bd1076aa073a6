"""`metrics.jsonl` of a run folder: how its lines are read. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from strategies.core import bounded_files as bounded

FILE = "metrics.jsonl"


def record_of(line: bytes) -> dict[str, Any] | None:
    """The record of a line, with its "step"; None where the line is no complete record, such as a truncated one."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def records(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The complete records of a run, in order; none where it measured nothing."""
    for line in bounded.lines(run_dir / FILE):
        if (record := record_of(line)) is not None:
            yield record
