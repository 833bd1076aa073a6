"""The time before the first step: marks of wall time, from the start of the command to the first optimizer step; and
the startup progress of many ranks, which may take minutes on few cores.

The parent marks the ends of its phases and hands the marks to the ranks; rank 0 reports the rest. Imports no torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from itertools import count, pairwise
from pathlib import Path

from strategies.runtime.flight_recorder import PHASE, PROGRESS, START, STARTED, read_cells

Marks = tuple[tuple[str, float], ...]
"""(phase, wall time at its end), in order; the first one is the start of the process."""

EVERY = 10.0
"""Seconds between two lines."""
MANY = 16
"""Ranks; fewer start too soon to talk about it."""

_jobs = count()


def begin() -> Marks:
    """The start of this process; or now, where the system does not say, or for another job of a sweep."""
    return (("start", time.time() if next(_jobs) else _process_start()),)


def marked(marks: Marks, phase: str) -> Marks:
    """`marks` with the end of `phase`, now."""
    return (*marks, (phase, time.time()))


def summary(marks: Marks) -> str:
    """`first step after 5.2 s: config 0.8, capture 2.6, ...`."""
    parts = ", ".join(f"{phase} {end - before:.1f}" for (_, before), (phase, end) in pairwise(marks))
    return f"first step after {marks[-1][1] - marks[0][1]:.1f} s: {parts}"


def _process_start() -> float:
    try:
        with open("/proc/self/stat", encoding="ascii") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        with open("/proc/uptime", encoding="ascii") as file:
            age = float(file.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.time()
    return time.time() - age


class Starting:
    """`files` are the ranks' flight records, each of which appears when its process runs."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._started = self._said = time.monotonic()
        self._over = len(files) <= MANY

    def look(self) -> None:
        """Print a line if the last one is old; nothing once a rank is past its start."""
        now = time.monotonic()
        if self._over or now < self._said + EVERY:
            return
        self._said = now
        records = [cells for cells in map(read_cells, self._files) if cells]
        self._over = any(cells[STARTED] or cells[PROGRESS] or cells[PHASE] != START for cells in records)
        if not self._over:
            who = f"{len(records)} of {len(self._files)} ranks run, none of them is ready"
            print(f"starting: {who}; {now - self._started:.0f} s so far", flush=True)
