"""Layouts, ZeRO's stage, recompute, stages and micro-batches of a model of 7 billion parameters, jointly optimised."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.search import charts
from benchmarks.search.outcome import Claim, Outcome, Setting
from runner.planning import joint
from runner.planning.joint import JointDecision, choice_of
from runner.report.units import shown_seconds
from strategies.core import result_shapes as shapes
from strategies.rules import sharding
from tests.runner.composing import compose_config

TITLE = "Decisions taken together"
GOAL = 10.0
LAYERS, LENGTHS = 32, (2048, 4096)
LIMITS = ("none", "60", "40", "20")
"""GiB of a rank; none: those of a device."""
HEAD = ("tokens", "memory", "choices", "tried", "left out", "too large", "capture, s", "decision, s", "decided", "step")


OPEN = ("parallel.zero.stage=auto", "parallel.pipeline.stages=auto", "parallel.recompute=auto")


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


def deciding(layers: int, length: int, limit: str) -> JointDecision:
    shape = (
        f"vocabulary: 32000, length: {length}, width: 4096, layers: {layers}, heads: 32, kv_heads: 32, hidden: 11008"
    )
    words = (
        *("parallel=auto", "parallel.search=dynamic_programming", "parallel.plan_cache=null", *OPEN),
        *("cluster=dgx_h100", "world_size=8", "model.target=models.llama.Llama", f"model.args={{{shape}}}"),
        *("loss.target=models.losses.NextTokenLoss", "optimizer.target=torch.optim.AdamW", "train.precision=bf16"),
        *("data.target=runner.data.text.Windows", f"data.args={{length: {length}, train: true}}"),
        *("data.batch_size=16", "job.name=plan"),
    )
    return JointDecision(
        compose_config(*words, *([] if limit == "none" else [f"parallel.memory_limit={limit}GiB"])), print
    )


def capture(one: JointDecision) -> dict[int, joint.Capture]:
    """Capture the model with the rows of every choice."""
    for choice in one.choices:
        one.searched(choice)
    return one.captures


def forget() -> None:
    """Clear the caches that one decision leaves to the next in a process, except captures."""
    shapes.forget()
    sharding.forget()


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
