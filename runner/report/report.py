"""What a run tells about its plan: plan.json, the IR dumps, a headline, tables, and the last line."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner import home
from runner.errors import ConfigError
from runner.planning import lowering
from runner.planning.clusters import cluster_of
from runner.planning.estimate import settings_of
from runner.planning.prepare import Prepared
from runner.report import search_summary as search_lines
from runner.report.decision_table import in_modules
from runner.report.layer_table import shown_bytes
from runner.report.page.document import page
from runner.report.prediction import Part, predict
from strategies.core.graph import OperatorGraph
from strategies.core.plan import Plan
from strategies.core.program import Program
from strategies.cost.cluster import Cluster
from strategies.lowering import ir
from strategies.planner.description import describe, describe_stages
from strategies.search.joint import Choice

ROUNDING = 1e-9
"""Of two sums of the same seconds in another order, relative."""
PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers")
"""Of plan.json's `memory`, in the order in which they are told."""


def programs_of(prepared: Prepared) -> list[Program]:
    """The program of the plan as the ranks lower it, or those of a pipeline's stages. There must be a plan."""
    assert prepared.step is not None
    if prepared.stages:
        return list(
            lowering.pipeline_programs(prepared.config, prepared.stages, lowering.training_options(prepared.config))
        )
    return [lowering.training_program(prepared.config, *prepared.step)]


def _part(prepared: Prepared, number: int) -> tuple[OperatorGraph, Plan]:
    """Graph and plan of a stage, or of the whole step where there is no pipeline."""
    assert prepared.step is not None
    if not prepared.stages:
        return prepared.step
    return prepared.stages[number].graph, prepared.stages[number].plan


def write_plan(prepared: Prepared, run_dir: Path) -> dict[str, Any] | None:
    """Write plan.json, and the IR of every rank if asked for. Returns the plan's content; None for modes without."""
    if prepared.graph is None or prepared.plan is None:
        return None
    config = prepared.config
    cluster = cluster_of(config, prepared.device, prepared.world_size)
    settings = settings_of(config, prepared.graph, prepared.device)
    programs = programs_of(prepared)
    if prepared.stages:
        content = describe_stages(
            prepared.plan,
            prepared.stages,
            programs,
            lowering.schedule_of(prepared.config),
            settings=settings,
            cluster=cluster,
        )
        content["pipeline"] |= {"schedule": config.parallel.pipeline.schedule}
    else:
        content = describe(
            prepared.graph,
            prepared.plan,
            programs[0],
            settings=settings,
            cluster=cluster,
            in_step=prepared.step,
        )
    content["copies"] = _copies(prepared)
    if content["search"]["cost"] is None:
        content["search"] |= {"cost": content["cost"]["total"]}
    _predict(content, prepared, programs, cluster)
    (run_dir / "plan.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if (wanted := config.parallel.dump_ir) is not False:
        try:
            _write_ir(prepared, programs, run_dir / "ir" if wanted is True else home.expanded(wanted))
        except OSError as error:
            raise ConfigError(
                "MW603",
                f"parallel.dump_ir = {wanted!r}: {error.filename} cannot be written ({error.strerror}); name a folder "
                "that can.",
            ) from error
    return content


def _write_ir(prepared: Prepared, programs: Sequence[Program], place: Path) -> None:
    """`rank_R/step_parallel_begin.ir` and `..._end.ir` of every rank in `place`, numbered for further stages."""
    assert prepared.plan is not None
    for rank in range(prepared.world_size):
        folder = place / f"rank_{rank}"
        folder.mkdir(parents=True, exist_ok=True)
        group, local = divmod(rank, prepared.plan.mesh.size)
        for number in range(group, len(programs), lowering.pipeline_groups(prepared.config)):
            graph, plan = _part(prepared, number)
            first = f"# stage {number} of {len(programs)}, whose ranks are counted from 0\n" * bool(prepared.stages)
            name = "step_parallel_{}" + f"_{number}.ir" * (number != group) + ".ir" * (number == group)
            for which, text in (
                ("begin", ir.begin(graph, plan)),
                ("end", ir.end(graph, plan, programs[number], local)),
            ):
                (folder / name.format(which)).write_text(first + text, encoding="utf-8")


def _copies(prepared: Prepared) -> dict[str, Any]:
    """How many copies of the batch a step has, how many operators work on each, and which see the whole batch."""
    assert prepared.graph is not None and prepared.step is not None
    graph = prepared.step[0]
    shares = [operator.batch_slice for operator in graph.operators if operator.batch_slice is not None]
    if not shares:
        return {"count": 1}
    apart = {share.name for share in shares}
    whole = [operator.name for operator in prepared.graph.operators if operator.name not in apart]
    return {"count": shares[0].count, "rows": shares[0].rows, "operators": len(apart), "once": whole}


def _predict(content: dict[str, Any], prepared: Prepared, programs: list[Program], cluster: Cluster) -> None:
    """Add what the plan promises on its cluster to the content of plan.json."""
    config = prepared.config
    assert prepared.graph is not None
    batch = prepared.graph.of_kind("input")
    words = next(
        (source.spec.shape[1] for source in batch if not source.spec.floating and len(source.spec.shape) == 2), 0
    )
    settings = settings_of(config, prepared.graph, prepared.device)
    predict(
        content,
        [Part(*_part(prepared, number), program, settings) for number, program in enumerate(programs)],
        cluster,
        ranks=prepared.world_size,
        samples=config.data.batch_size,
        tokens=config.data.batch_size * words,
    )


def write_page(content: dict[str, Any], prepared: Prepared, run_dir: Path) -> Path:
    """Write report.html beside plan.json. Returns its path."""
    file = run_dir / "report.html"
    config = prepared.config
    file.write_text(page(content, f"{config.model.target}, parallel.mode={config.parallel.mode}"), encoding="utf-8")
    return file


def headline(prepared: Prepared, run_dir: Path) -> str:
    """What is about to run, and where."""
    config = prepared.config
    only_described = config.cluster.machine is not None and config.job.name in ("plan", "explain")
    where = f"as described by cluster={config.cluster.name}" if only_described else f"on {prepared.device}"
    ranks = f"{prepared.world_size} rank{'s' * (prepared.world_size > 1)} {where}"
    lines = [f"{config.model.target}: parallel.mode={config.parallel.mode}, {ranks}, run folder {shown(run_dir)}"]
    if prepared.graph is not None and prepared.plan is not None:
        plan = prepared.plan
        origins = Counter(operator.origin for operator in plan.operators.values())
        mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.axes)
        told = ", ".join(f"{count} {origin}" for origin, count in origins.items())
        loaded = plan.search.get("loaded_from")
        found = f"loaded from {loaded}" if loaded else f"found in {plan.search['seconds']:.2f} s"
        found += _certificate(plan)
        found = "\n".join([found, *search_lines.lines(plan.search)])
        lines.append(f"plan: mesh {mesh}; {len(plan.operators)} operators: {told}; {found}")
        bare = [
            operator.where for operator in prepared.graph.operators if plan.operators[operator.name].origin == "no rule"
        ]
        if bare:
            lines.append(f"plan: no sharding rule for {', '.join(bare)}: every rank computes these whole")
        lines += [] if plan.search.get("decided") is None else [_decided(plan.search["decided"])]
    if prepared.stages and prepared.plan is not None:
        operators = " + ".join(str(len(stage.graph.operators)) for stage in prepared.stages)
        pipeline, size = config.parallel.pipeline, prepared.plan.mesh.size
        dealt = f", dealt out to {pipeline.stages} groups of ranks" if pipeline.virtual > 1 else ""
        lines.append(
            f"pipeline: {len(prepared.stages)} stages of {operators} operators, each on {size} ranks{dealt}; "
            f"{pipeline.schedule} over {pipeline.parts} micro-batches"
        )
    return "\n".join(lines)


def _certificate(plan: Plan) -> str:
    """What a search knows about the plan that it found."""
    if plan.search.get("gap") is None:
        return ""
    cost, bound, gap = (plan.search[key] for key in ("cost", "lower_bound", "gap"))
    shown = f"{100 * gap:.2g}" if gap > ROUNDING else "0"
    return (
        f"; {cost:.4g} s per step, lower bound {bound:.4g} s with all that overlap and joined calls may save, "
        f"gap {shown} %"
    )


def _decided(told: Mapping[str, Any]) -> str:
    """What was decided beside the plan, and between how many choices."""
    second, seconds = told["runner_up"], told["seconds"]
    line = (
        f"decided: {_choice(told)}; {told['tried']} choices priced, {told['pruned']} left out by bounds, "
        f"{told['over']} too large"
    )
    if second is None:
        return line
    slower = f"{100 * (second['seconds'] / seconds - 1):.2g} % slower"
    known = "is known to" if second.get("fits", True) else "may"  # plans from before it was told: it did
    return f"{line}; the next that {known} fit ({_choice(second)}) is {slower}"


def _choice(told: Mapping[str, Any]) -> str:
    return str(Choice(told["stages"], told["zero"], told["micro_batches"], in_modules(told)))


def totals(content: dict[str, Any]) -> str:
    """Predicted bytes, memory and time."""
    sent = ", ".join(f"{kind} {shown_bytes(count)}" for kind, count in content["communication"].items()) or "nothing"
    needed = content["memory"]
    memory = ", ".join(f"{part} {shown_bytes(needed[part])}" for part in PARTS)
    memory += f"; at most {shown_bytes(needed['peak'])} at once, in {needed['peak_in']}"
    cost = costs(content["cost"])
    lines = [f"sent per step and rank: {sent}", f"memory per rank: {memory}", f"estimated time per step: {cost}"]
    if content["copies"]["count"] > 1:
        lines.append(in_copies(content["copies"]))
    if content.get("recompute"):
        lines.append(recomputed(content["recompute"]))
    if "pipeline" in content:
        pipeline = content["pipeline"]
        lines.append(
            f"predicted bubble: {pipeline['bubble']:.1%} of the time the stages wait; micro-batches whose activations "
            f"a rank holds: {', '.join(map(str, pipeline['held']))}"
        )
    return "\n".join(lines)


def costs(cost: dict[str, Any]) -> str:
    """The seconds of a step by part; parts that take none are left out."""
    parts = {name: cost[name] for name in ("forward", "backward", "recomputed")}
    parts |= cost["redistributions"]
    parts |= {"gradients beyond backward": cost["gradients_exposed"]}
    parts |= {f"ZeRO's {kind}": seconds for kind, seconds in cost["zero"].items()}
    parts |= {name: cost[name] for name in ("send", "waiting", "optimizer") if name in cost}
    told = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in parts.items() if seconds > 0)
    return f"{cost['total'] * 1e3:.2f} ms on {cost['cluster']}: {told}"


def in_copies(entry: dict[str, Any]) -> str:
    """How the batch is divided, and what is not."""
    return (
        f"copies: {entry['count']} of {entry['rows']} rows of a micro-batch, {entry['operators']} operators for each; "
        f"once for all: {', '.join(entry['once']) or 'nothing'}"
    )


def recomputed(entry: dict[str, Any]) -> str:
    """What is computed again, what is kept of it, and what that saves."""
    kept = f", {len(entry['kept'])} operators in them kept" if entry["kept"] else ""
    collectives = "collectives kept" if entry["keeps_communication"] else "collectives repeated"
    return (
        f"recomputed in backward: {', '.join(entry['modules'])}{kept}, {collectives}: "
        f"{shown_bytes(entry['stored_bytes'])} stored between forward and backward instead of "
        f"{shown_bytes(entry['stored_bytes_without'])}, {shown_bytes(entry['sent_again_bytes'])} sent again"
    )


def table(content: dict[str, Any]) -> str:
    """One line per operator, and one per redistribution below the operator that needs it."""
    staged = "pipeline" in content
    rows = [(*("stage", "ranks") * staged, "operator", "shapes", "slices", "result", "chosen", "source")]
    for operator in content["operators"]:
        shapes = (_shapes(operator[key]) for key in ("shapes", "in_strategy", "out_strategy"))
        stage = (str(operator["stage"]), _ranks(content["mesh"], operator["group"])) if staged else ()
        rows.append((*stage, operator["name"], *shapes, operator["origin"], operator["source"]))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]

    def show(row: tuple[str, ...]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()

    lines = [f"mesh {content['mesh']}", show(rows[0])]
    for row, operator in zip(rows[1:], content["operators"], strict=True):
        for entry in operator["redistributions"]:
            whom = f"operand {entry['operand']}" if entry["operand"] >= 0 else "result"
            whom += f", copy {entry['copy']}" if content["copies"]["count"] > 1 else ""
            for way in ("forward", "backward"):
                for step in entry[way]:
                    lines.append(
                        f"    {whom}, {way}: {step['step']}, rank 0 with {step['group']}, {shown_bytes(step['bytes'])}"
                    )
        lines.append(show(row))
    return "\n".join(lines)


def _ranks(mesh: dict[str, int], group: int) -> str:
    """The numbers of the ranks in a group, in short."""
    size = math.prod(mesh.values())
    return str(group) if size == 1 else f"{group * size}-{(group + 1) * size - 1}"


def _shapes(shapes: list[list[int]]) -> str:
    return "(" + ", ".join(f"({','.join(map(str, shape))})" for shape in shapes) + ")"


def shown(path: Path) -> str:
    """A path as seen from where the command was given."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
