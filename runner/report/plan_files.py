"""The files of a plan in a run folder: plan.json, report.html, and the dumped IR of every rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from runner import home
from runner.errors import ConfigError
from runner.planning import lowering
from runner.planning.clusters import cluster_of
from runner.planning.estimate import Estimate, KindEstimate, Programs, estimate, settings_of
from runner.planning.prepare import Prepared
from runner.report.page import plan_page
from runner.report.prediction import predict, training
from strategies.lowering import ir
from strategies.memory.parts import memory
from strategies.memory.repeated_blocks import Traces, trace_repeated
from strategies.optimizer.settings import OptimizerSettings
from strategies.planner.description import describe, describe_stages


def write_plan(prepared: Prepared, run_dir: Path) -> dict[str, Any] | None:
    """Write plan.json, and the IR of every rank if requested. Returns the plan's content; None for modes without."""
    if prepared.graph is None or prepared.plan is None:
        return None
    content, step = plan_content(prepared)
    price = prepared.config.cluster.price_per_hour
    content["prediction"]["training"] = training(content["prediction"], prepared.steps, price)
    (run_dir / "plan.json").write_text(plan_text(content), encoding="utf-8")
    if (wanted := prepared.config.parallel.dump_ir) is not False:
        try:
            _write_ir(prepared, step, run_dir / "ir" if wanted is True else home.expanded(wanted))
        except OSError as error:
            raise ConfigError(
                "MW603",
                f"parallel.dump_ir = {wanted!r}: {error.filename} cannot be written ({error.strerror}); name a folder "
                "that can.",
            ) from error
    return content


def plan_text(content: Mapping[str, Any]) -> str:
    """plan.json: one operator, parameter or other entry per line, so that plans are compared line by line.

    Indented by the standard library, that of 1,200 operators takes 0.05 CPU-s, for 0.01.
    """
    return "{\n" + ",\n".join(f"  {json.dumps(key)}: {_entries(value)}" for key, value in content.items()) + "\n}\n"


def _entries(value: object) -> str:
    if isinstance(value, Mapping) and any(isinstance(one, Mapping | list | tuple) for one in value.values()):
        lines, (opening, closing) = [json.dumps({key: one})[1:-1] for key, one in value.items()], "{}"
    elif isinstance(value, list | tuple) and any(isinstance(one, Mapping | list | tuple) for one in value):
        lines, (opening, closing) = [json.dumps(one) for one in value], "[]"
    else:
        return json.dumps(value)
    return opening + ",".join(f"\n    {line}" for line in lines) + f"\n  {closing}"


def plan_content(prepared: Prepared) -> tuple[dict[str, Any], Estimate]:
    """The content of plan.json of a run that has a plan, and the estimate that it reports."""
    assert prepared.graph is not None and prepared.plan is not None
    config = prepared.config
    cluster = cluster_of(config, prepared.device, prepared.world_size)
    settings = settings_of(config, prepared.graph, prepared.device)
    assert prepared.step is not None
    step = estimate(config, prepared.step, settings, cluster, Programs(), Traces(), prepared.schedule)
    programs = [part.program for part in step.parts]
    if step.schedule is not None:
        content = describe_stages(
            prepared.plan, step.stages, programs, step.schedule, settings=settings, cluster=cluster
        )
        content["pipeline"] |= {"schedule": config.parallel.pipeline.schedule}
    else:
        content = describe(
            prepared.graph,
            step.parts[0].plan if step.kinds else prepared.plan,
            programs[0],
            settings=settings,
            cluster=step.cluster,
            in_step=None if step.kinds else prepared.step,
        )
    if step.kinds:
        content["kinds"] = [_kind_entry(one, settings) for one in step.kinds]
    if (servers := step.servers) is not None:
        content["cost"], content["communication"] = step.parts[0].cost.to_json(), servers.communication()
        content["server"] = asdict(servers) | {
            "bytes_pulled": servers.workers * servers.pull,
            "bytes_pushed": servers.workers * servers.push,
            **({"bytes_reduced": servers.reduced} if servers.kept else {}),
            "memory": step.server_memory,
        }
        content["memory"] = step.memory(0).to_json()
    content["copies"] = _copies(prepared)
    if content["search"]["cost"] is None:
        content["search"] |= {"cost": content["cost"]["total"]}
    inputs = (source.spec for source in prepared.graph.of_kind("input"))
    tokens = next((spec.shape[1] for spec in inputs if not spec.floating and len(spec.shape) == 2), 0)
    samples = config.data.batch_size
    predict(content, step, ranks=prepared.world_size, samples=samples, tokens=samples * tokens)
    return content, step


def _kind_entry(one: KindEstimate, settings: OptimizerSettings) -> dict[str, Any]:
    """Ranks with equal devices and equal slices of the batch."""
    return {
        "ranks": list(one.kind.ranks),
        "rows": one.kind.rows,
        "cluster": one.kind.cluster.name,
        "cost": one.part.cost.to_json(),
        "memory": memory(trace_repeated(one.part.program, settings, 0), settings).to_json(),
        "memory_limit": one.kind.cluster.memory,
    }


def _write_ir(prepared: Prepared, step: Estimate, place: Path) -> None:
    """`rank_R/step_parallel_begin.ir` and `..._end.ir` of every rank in `place`, numbered for further stages."""
    assert prepared.plan is not None
    for rank in range(prepared.world_size):
        folder = place / f"rank_{rank}"
        folder.mkdir(parents=True, exist_ok=True)
        group, local = divmod(rank, prepared.plan.mesh.size)
        for number in range(group, len(step.parts), step.groups):
            part = next((one.part for one in step.kinds if rank in one.kind.ranks), step.parts[number])
            if step.kinds:  # where a slice begins differs within a kind
                plan = prepared.plan.of_rank(rank)
                program = lowering.training_program(prepared.config, part.graph, plan)
                part = replace(part, plan=plan, program=program)
            first = f"# stage {number} of {len(step.parts)}, whose ranks are counted from 0\n" * bool(step.stages)
            end = f"_{number}.ir" if number != group else ".ir"
            programs = {
                "begin": ir.begin(part.graph, part.plan),
                "end": ir.end(part.graph, part.plan, part.program, local),
            }
            for which, text in programs.items():
                (folder / f"step_parallel_{which}{end}").write_text(first + text, encoding="utf-8")


def _copies(prepared: Prepared) -> dict[str, Any]:
    """The number of batch splits of a step, the number of operators on each, and the operators on the full batch."""
    assert prepared.graph is not None and prepared.step is not None
    graph = prepared.step[0]
    shares = [operator.batch_slice for operator in graph.operators if operator.batch_slice is not None]
    if not shares:
        return {"count": 1}
    apart = {share.name for share in shares}
    once = [operator.name for operator in prepared.graph.operators if operator.name not in apart]
    return {"count": shares[0].count, "rows": shares[0].rows, "operators": len(apart), "once": once}


def write_page(content: dict[str, Any], prepared: Prepared, run_dir: Path) -> Path:
    """Write report.html beside plan.json. Returns its path."""
    file = run_dir / "report.html"
    file.write_text(page(content, prepared), encoding="utf-8")
    return file


def page(content: dict[str, Any], prepared: Prepared) -> str:
    """The HTML of report.html."""
    return plan_page(content, f"{prepared.config.model.target}, parallel.mode={prepared.config.parallel.mode}")
