"""Layouts, ZeRO's stage, recompute, stages and micro-batches of a model of 7 billion parameters, decided together."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hydra import compose, initialize_config_module

from benchmarks.search import charts
from benchmarks.search.outcome import Claim, Outcome, Setting
from runner import cli, config
from runner.deciding import Deciding
from runner.layer_table import shown_bytes, shown_seconds
from runner.origins import Origins
from strategies.search.joint import Decision, decide

TITLE = "Decisions taken together"
GOAL = 10.0
SHAPE = "{vocabulary: 32000, length: 4096, width: 4096, layers: LAYERS, heads: 32, kv_heads: 32, hidden: 11008}"
OPEN = (
    "+recipe=llama_8b",
    "world_size=8",
    "cluster.nodes=1",
    "data.batch_size=16",
    "data.args.length=4096",
    "parallel.mode=auto",
    "parallel.search=dynamic_programming",
    "parallel.zero.stage=auto",
    "parallel.pipeline.stages=auto",
    "parallel.recompute=auto",
)
LIMITS = (None, "60GB", "40GB", "20GB")
HEAD = ("memory", "choices", "tried", "left out", "too large", "capture, s", "decision, s", "decided", "step", "bytes")


@dataclass(frozen=True)
class Result:
    """One decision: CPU seconds of all captures, and of the rest."""

    limit: str | None
    choices: int
    captured: float
    seconds: float
    decision: Decision

    def row(self) -> tuple[str, ...]:
        found = self.decision
        held = found.priced.bytes
        return (
            self.limit or "of a device",
            *map(str, (self.choices, found.tried, found.pruned, found.over)),
            f"{self.captured:.1f}",
            f"{self.seconds:.1f}",
            str(found.choice),
            shown_seconds(found.priced.seconds),
            "" if held is None else shown_bytes(held),
        )


def decided(limit: str | None, layers: int) -> Result:
    given = [*OPEN, f"model.args={SHAPE.replace('LAYERS', str(layers))}", "parallel.plan_cache=null"]
    given += [] if limit is None else [f"parallel.memory_limit={limit}"]
    with initialize_config_module("conf", version_base="1.3"):
        checked = config.load(compose("config", [*given, "job=plan"]), Origins(tuple(given)))
    deciding = Deciding(checked, print)
    started = time.process_time()
    for rows in {deciding._rows(choice) for choice in deciding.choices}:
        deciding._captured(rows)
    captured = time.process_time() - started
    started = time.process_time()
    found = decide(deciding.bounds, deciding.limit, deciding.look)
    return Result(limit, len(deciding.choices), captured, time.process_time() - started, found)


def measure(setting: Setting) -> Outcome:
    """Without a limit but a device's memory, and with less and less; a quick run has four layers and one limit."""
    cli._register()
    results = []
    for limit in LIMITS[2:3] if setting.quick else LIMITS:
        results.append(decided(limit, 4 if setting.quick else 32))
        print("  ".join(results[-1].row()), flush=True)
    bars = [(one.limit or "of a device", one.seconds, GOAL) for one in results]
    charts.goals(setting.pictures / "joint.svg", bars, "CPU seconds of a decision")
    claims = [
        Claim(
            f"7B on 8 devices, memory {one.limit or 'of a device'}: at most {GOAL:g} s",
            f"{one.seconds:.1f} s",
            one.seconds <= GOAL,
        )
        for one in results
    ]
    return Outcome(tuple(claims), HEAD, tuple(one.row() for one in results), ("search/joint.svg",))
