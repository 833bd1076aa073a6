"""What a run tells about its plan: plan.json, the IR dumps, a headline, tables, and the last line."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from runner.memory_limit import machine_of, updating_of
from runner.prepare import Prepared, lowered, schedule_of, stage_program
from strategies.describe import describe
from strategies.engine import ir
from strategies.engine.program import Program
from strategies.graph import OperatorGraph
from strategies.pipeline.describe import describe_stages
from strategies.plan import Plan

PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers")
"""Of plan.json's `memory`, in the order in which they are told."""


def programs_of(prepared: Prepared) -> list[Program]:
    """The program of the plan as the ranks lower it, or those of a pipeline's stages. There must be a plan."""
    assert prepared.graph is not None and prepared.plan is not None
    if prepared.stages:
        return [stage_program(stage, prepared.config) for stage in prepared.stages]
    return [lowered(prepared.config, prepared.graph, prepared.plan)]


def _part(prepared: Prepared, number: int) -> tuple[OperatorGraph, Plan]:
    """Graph and plan of a stage, or of the whole model where there is no pipeline."""
    assert prepared.graph is not None and prepared.plan is not None
    if not prepared.stages:
        return prepared.graph, prepared.plan
    return prepared.stages[number].graph, prepared.stages[number].plan


def write_plan(prepared: Prepared, run_dir: Path) -> dict[str, Any] | None:
    """Write plan.json, and the IR of every rank if asked for. Returns the plan's content; None for modes without."""
    if prepared.graph is None or prepared.plan is None:
        return None
    config = prepared.config
    machine, updating = machine_of(prepared.device), updating_of(config, prepared.graph, prepared.device)
    programs = programs_of(prepared)
    if prepared.stages:
        content = describe_stages(
            prepared.plan,
            prepared.stages,
            programs,
            schedule_of(prepared.config),
            updating=updating,
            machine=machine,
        )
        content["pipeline"] |= {"schedule": config.parallel.pipeline.schedule}
    else:
        content = describe(
            prepared.graph,
            prepared.plan,
            programs[0],
            updating=updating,
            machine=machine,
        )
    if content["search"]["cost"] is None:
        content["search"] |= {"cost": content["cost"]["total"]}
    (run_dir / "plan.json").write_text(json.dumps(content, indent=2) + "\n")
    if config.parallel.dump_ir:
        for rank in range(prepared.world_size):
            folder = run_dir / "ir" / f"rank_{rank}"
            folder.mkdir(parents=True, exist_ok=True)
            number, local = divmod(rank, prepared.plan.mesh.size)
            graph, plan = _part(prepared, number)
            first = f"# stage {number} of {len(programs)}, whose ranks are counted from 0\n" if prepared.stages else ""
            (folder / "step_parallel_begin.ir").write_text(first + ir.begin(graph, plan))
            (folder / "step_parallel_end.ir").write_text(first + ir.end(graph, plan, programs[number], local))
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
            f"{_certificate(plan)}"
        )
        bare = [
            operator.where for operator in prepared.graph.operators if plan.operators[operator.name].origin == "no rule"
        ]
        if bare:
            lines.append(f"plan: no sharding rule for {', '.join(bare)}: every rank computes these whole")
    if prepared.stages and prepared.plan is not None:
        operators = " + ".join(str(len(stage.graph.operators)) for stage in prepared.stages)
        pipeline = config.parallel.pipeline
        lines.append(
            f"pipeline: {len(prepared.stages)} stages of {operators} operators, each on {prepared.plan.mesh.size} "
            f"ranks; {pipeline.schedule} over {pipeline.parts} micro-batches"
        )
    return "\n".join(lines)


def _certificate(plan: Plan) -> str:
    """What a search knows about the plan that it found."""
    if plan.search.get("gap") is None:
        return ""
    cost, bound, gap = (plan.search[key] for key in ("cost", "lower_bound", "gap"))
    return f"; cost {cost:.4g} s per step, lower bound {bound:.4g} s, gap {100 * gap:.2g} %"


def totals(content: dict[str, Any]) -> str:
    """Predicted bytes, memory and time."""
    sent = ", ".join(f"{kind} {_bytes(count)}" for kind, count in content["communication"].items()) or "nothing"
    needed = content["memory"]
    memory = ", ".join(f"{part} {_bytes(needed[part])}" for part in PARTS)
    memory += f"; at most {_bytes(needed['peak'])} at once, in {needed['peak_in']}"
    cost = ", ".join(f"{part} {seconds * 1e3:.2f} ms" for part, seconds in content["cost"].items())
    lines = [f"sent per step and rank: {sent}", f"memory per rank: {memory}", f"estimated time per step: {cost}"]
    if content.get("recompute"):
        lines.append(recomputed(content["recompute"]))
    if "pipeline" in content:
        lines.append(f"predicted bubble: {content['pipeline']['bubble']:.1%} of the time the stages wait")
    return "\n".join(lines)


def recomputed(entry: dict[str, Any]) -> str:
    """What is computed again, what is kept of it, and what that saves."""
    kept = f", {len(entry['kept'])} operators in them kept" if entry["kept"] else ""
    collectives = "collectives kept" if entry["keeps_communication"] else "collectives repeated"
    return (
        f"recomputed in backward: {', '.join(entry['modules'])}{kept}, {collectives}: "
        f"{_bytes(entry['stored_bytes'])} stored between forward and backward instead of "
        f"{_bytes(entry['stored_bytes_without'])}, {_bytes(entry['sent_again_bytes'])} sent again"
    )


def table(content: dict[str, Any]) -> str:
    """One line per operator, and one per redistribution below the operator that needs it."""
    staged = "pipeline" in content
    rows = [(*("stage",) * staged, "operator", "shapes", "slices", "result", "chosen", "source")]
    for operator in content["operators"]:
        shapes = (_shapes(operator[key]) for key in ("shapes", "in_strategy", "out_strategy"))
        stage = (str(operator["stage"]),) if staged else ()
        rows.append((*stage, operator["name"], *shapes, operator["origin"], operator["source"]))
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
