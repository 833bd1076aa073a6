"""Layouts, ZeRO's stage, recompute, stages and micro-batches of a model of 7 billion parameters, jointly optimised."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.search import charts
from benchmarks.search.outcome import Claim, Outcome, Setting
from benchmarks.search_joint import capture, deciding, forget
from runner.planning.joint import choice_of
from runner.report.units import shown_seconds

TITLE = "Decisions taken together"
GOAL = 10.0
LAYERS, LENGTHS = 32, (2048, 4096)
LIMITS = ("none", "60", "40", "20")
"""GiB of a rank; none: those of a device."""
HEAD = ("tokens", "memory", "choices", "tried", "left out", "too large", "capture, s", "decision, s", "decided", "step")


@dataclass(frozen=True)
class Result:
    """One joint optimisation for sequences of `length`: CPU seconds of all captures, and of the rest."""

    length: int
    limit: str
    choices: int
    captured: float
    seconds: float
    decided: Mapping[str, Any]

    def row(self) -> tuple[str, ...]:
        found = self.decided
        return (
            str(self.length),
            self.memory,
            *(str(count) for count in (self.choices, found["tried"], found["pruned"], found["over"])),
            f"{self.captured:.1f}",
            f"{self.seconds:.1f}",
            str(choice_of(found)),
            shown_seconds(found["seconds"]),
        )

    @property
    def memory(self) -> str:
        return "of a device" if self.limit == "none" else f"{self.limit} GiB"

    @property
    def name(self) -> str:
        return f"{self.length} tokens, {self.memory}"


def decided(length: int, limit: str, layers: int) -> Result:
    forget()
    one = deciding(layers, length, limit)
    started = time.process_time()
    capture(one)
    captured = time.process_time() - started
    started = time.process_time()
    chosen = one.plan().search["decided"]
    return Result(length, limit, len(one.bounds), captured, time.process_time() - started, chosen)


def measure(setting: Setting) -> Outcome:
    """With a device's memory as the limit, then with decreasing limits; a quick run has four layers and one limit."""
    results = []
    for length in LENGTHS[:1] if setting.quick else LENGTHS:
        for limit in LIMITS[2:3] if setting.quick else LIMITS:
            results.append(decided(length, limit, 4 if setting.quick else LAYERS))
            print("  ".join(results[-1].row()), flush=True)
    charts.goals(
        setting.pictures / "joint.svg", [(one.name, one.seconds, GOAL) for one in results], "CPU seconds of a decision"
    )
    claims = [
        Claim(f"7B on 8 devices, {one.name}: at most {GOAL:g} s", f"{one.seconds:.1f} s", one.seconds <= GOAL)
        for one in results
    ]
    return Outcome(tuple(claims), HEAD, tuple(one.row() for one in results), ("search/joint.svg",))
