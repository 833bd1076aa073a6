"""What a run tells about its plan: plan.json, the IR dumps, a headline, tables, and the last line."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from runner.prepare import Prepared, lowered, options_of
from strategies.cost.estimate import GPU, LAPTOP
from strategies.describe import describe
from strategies.engine import ir
from strategies.engine.program import Program

STATES = {"SGD": 1.0, "Adam": 2.0, "AdamW": 2.0, "RMSprop": 1.0, "Adagrad": 1.0}
"""States per parameter element of common optimizers; others are taken for two."""


def program_of(prepared: Prepared) -> Program | None:
    """The program of the plan, as the ranks lower it."""
    if prepared.graph is None or prepared.plan is None:
        return None
    return lowered(prepared.graph, prepared.plan, prepared.config, options_of(prepared.config))


def write_plan(prepared: Prepared, run_dir: Path) -> dict[str, Any] | None:
    """Write plan.json, and the IR of every rank if asked for. Returns the plan's content; None for modes without."""
    program = program_of(prepared)
    if program is None:
        return None
    assert prepared.graph is not None and prepared.plan is not None
    config = prepared.config
    optimizer = config.optimizer.target.rpartition(".")[2]
    states = STATES.get(optimizer, 2.0) if optimizer != "SGD" or config.optimizer.args.get("momentum") else 0.0
    machine = GPU if prepared.device == "cuda" else LAPTOP
    content = describe(
        prepared.graph,
        prepared.plan,
        program,
        stage=config.parallel.zero.stage,
        states=states,
        machine=machine,
        accumulate=config.train.accumulate,
    )
    content["search"] |= {"cost": content["cost"]["total"]}
    (run_dir / "plan.json").write_text(json.dumps(content, indent=2) + "\n")
    if config.parallel.dump_ir:
        for rank in range(prepared.world_size):
            folder = run_dir / "ir" / f"rank_{rank}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "step_parallel_begin.ir").write_text(ir.begin(prepared.graph, prepared.plan))
            (folder / "step_parallel_end.ir").write_text(ir.end(prepared.graph, prepared.plan, program, rank))
    return content


def headline(prepared: Prepared, run_dir: Path) -> str:
    """What is about to run, and where."""
    config = prepared.config
    ranks = f"{prepared.world_size} rank{'s' * (prepared.world_size > 1)} on {prepared.device}"
    lines = [f"{config.model.target}: parallel.mode={config.parallel.mode}, {ranks}, run folder {_shown(run_dir)}"]
    if prepared.graph is not None and prepared.plan is not None:
        plan = prepared.plan
        origins = Counter(operator.origin for operator in plan.operators.values())
        mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.axes)
        told = ", ".join(f"{count} {origin}" for origin, count in origins.items())
        lines.append(
            f"plan: mesh {mesh}; {len(plan.operators)} operators: {told}; found in {plan.search['seconds']:.2f} s"
        )
        bare = [
            operator.where for operator in prepared.graph.operators if plan.operators[operator.name].origin == "no rule"
        ]
        if bare:
            lines.append(f"plan: no sharding rule for {', '.join(bare)}: every rank computes these whole")
    return "\n".join(lines)


def totals(content: dict[str, Any]) -> str:
    """Predicted bytes, memory and time."""
    sent = ", ".join(f"{kind} {_bytes(count)}" for kind, count in content["communication"].items()) or "nothing"
    memory = ", ".join(f"{part} {_bytes(count)}" for part, count in content["memory"].items())
    cost = ", ".join(f"{part} {seconds * 1e3:.2f} ms" for part, seconds in content["cost"].items())
    return f"sent per step and rank: {sent}\nmemory per rank: {memory}\nestimated time per step: {cost}"


def table(content: dict[str, Any]) -> str:
    """One line per operator, and one per redistribution below the operator that needs it."""
    rows = [("operator", "shapes", "slices", "result", "chosen", "source")]
    for operator in content["operators"]:
        shapes = (_shapes(operator[key]) for key in ("shapes", "in_strategy", "out_strategy"))
        rows.append((operator["name"], *shapes, operator["origin"], operator["source"]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def show(row: tuple[str, ...]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()

    lines = [f"mesh {content['mesh']}", show(rows[0])]
    for row, operator in zip(rows[1:], content["operators"], strict=True):
        for entry in operator["redistributions"]:
            whom = f"operand {entry['operand']}" if entry["operand"] >= 0 else "result"
            for way in ("forward", "backward"):
                for step in entry[way]:
                    lines.append(
                        f"    {whom}, {way}: {step['step']}, rank 0 with {step['group']}, {_bytes(step['bytes'])}"
                    )
        lines.append(show(row))
    return "\n".join(lines)


def _shapes(shapes: list[list[int]]) -> str:
    return "(" + ", ".join(f"({','.join(map(str, shape))})" for shape in shapes) + ")"


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
