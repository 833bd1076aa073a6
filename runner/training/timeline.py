"""Where the time before the first step goes: marks of wall time, from the start of the command to the first optimizer
step.

The parent marks the ends of its phases, hands the marks to the ranks, and rank 0 tells the rest. Nothing is imported
here.
"""

from __future__ import annotations

import os
import time
from itertools import count

Marks = tuple[tuple[str, float], ...]
"""(phase, wall time at its end), in order; the first one is the start of the process."""


_jobs = count()


def begin() -> Marks:
    """The start of this process; or now, where the system does not tell, or for another job of a sweep."""
    return (("start", time.time() if next(_jobs) else _process_start()),)


def marked(marks: Marks, phase: str) -> Marks:
    """`marks` with the end of `phase`, now."""
    return (*marks, (phase, time.time()))


def told(marks: Marks) -> str:
    """`first step after 5.2 s: config 0.8, capture 2.6, ...`."""
    (_, first), *rest = marks
    ends = [first, *(end for _, end in rest)]
    parts = ", ".join(f"{phase} {end - before:.1f}" for (phase, end), before in zip(rest, ends, strict=False))
    return f"first step after {ends[-1] - first:.1f} s: {parts}"


def _process_start() -> float:
    try:
        with open("/proc/self/stat", encoding="ascii") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        with open("/proc/uptime", encoding="ascii") as file:
            age = float(file.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.time()
    return time.time() - age
