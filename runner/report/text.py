"""A plan as text: the headline of a command, tables of layers, operators and decisions, and the predicted performance.

All but the headline is made from the content of plan.json alone, so commands and the page agree.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.config.exclusive import needs_deepspeed
from runner.config.schema import Config
from runner.planning.clusters import DESCRIBING
from runner.planning.joint import choice_of
from runner.planning.lowering import pipeline_groups
from runner.planning.prepare import Prepared
from runner.report import schedule
from runner.report.layers import Sums, kinds
from runner.report.units import shown_bytes, shown_path, shown_rate, shown_seconds, shown_share, shown_time, text_table
from strategies.core.plan import Plan
from strategies.lowering.pipeline_schedule import in_a_v, owners_in, stages_of

Content = Mapping[str, Any]
CALLS = "operator calls"
"""The limit of operators that compute for less time than their launch takes."""
ROUNDING = 1e-9
"""Relative, of two sums of the same seconds in another order."""
MEMORY = ("parameters", "gradients", "optimizer", "activations", "buffers")
"""The parts of plan.json's `memory`, in the order in which they are shown."""
LAYERS = ("layer", "number", "layouts", "compute", "communication", "sent", "parameters", "results")
DECISION = ("jointly optimised", "chosen", "runner-up")
DECIDED = {
    "parallel.zero.stage": "zero",
    "parallel.pipeline.stages": "stages",
    "parallel.pipeline.micro_batches": "micro_batches",
    "parallel.recompute": "recompute",
}
"""Entries of plan.json's `search.decided`, by key of the config."""


# Headline


def headline(prepared: Prepared, run_dir: Path) -> str:
    """The headline: model, plan, ranks and run folder."""
    config, plan = prepared.config, prepared.plan
    only_described = config.cluster.machine is not None and config.job.name in DESCRIBING
    where = f"as described by cluster={config.cluster.name}" if only_described else f"on {prepared.device}"
    ranks = f"{prepared.world_size} rank{'s' * (prepared.world_size > 1)} {where}"
    lines = [f"{config.model.target}: parallel.mode={config.parallel.mode}, {ranks}, run folder {shown_path(run_dir)}"]
    if prepared.graph is not None and plan is not None:
        origins = Counter(operator.origin for operator in plan.operators.values())
        mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.axes)
        by_origin = ", ".join(f"{count} {origin}" for origin, count in origins.items())
        lines.append(
            f"plan: mesh {mesh}; {len(plan.operators)} operators: {by_origin}; {source(plan.search)}"
            f"{_certificate(plan)}"
        )
        lines += search_lines(plan.search)
        operators = prepared.graph.operators
        if unruled := [each.where for each in operators if plan.operators[each.name].origin == "no rule"]:
            lines.append(f"plan: no sharding rule for {', '.join(unruled)}: replicated on every rank")
        if plan.search.get("decided") is not None:
            lines.append(_decided(plan.search["decided"]))
    if config.parallel.zero.known:
        lines.append(zero_line(config))
    if prepared.stages and plan is not None:
        counts = " + ".join(str(len(stage.graph.operators)) for stage in prepared.stages)
        pipeline = config.parallel.pipeline
        count = pipeline_groups(config)
        shape = " in a V" if prepared.owners == in_a_v(count) else ""
        dealt = f", dealt out to {count} groups of ranks{shape}" if pipeline.virtual > 1 else ""
        lines.append(
            f"pipeline: {len(prepared.stages)} stages of {counts} operators, each on {plan.mesh.size} ranks{dealt}; "
            f"{pipeline.schedule} over {pipeline.parts} micro-batches"
        )
    return "\n".join(lines)


def zero_line(config: Config) -> str:
    """The engine of ZeRO, and why it was chosen."""
    engine, reason = config.zero_engine, needs_deepspeed(config)
    if config.parallel.zero.engine != "auto":
        why = f"as parallel.zero.engine={engine} says"
    else:
        why = "the faster one" if reason is None else f"which {reason} needs"
    by = "our own engine" if engine == "native" else "DeepSpeed"
    return f"zero: stage {config.parallel.zero.known} by {by}, {why}"


def source(search: Content) -> str:
    """The origin of a plan in words; `search` is that of plan.json."""
    loaded = search.get("loaded_from")
    return f"loaded from {loaded}" if loaded else f"found in {search['seconds']:.2f} s"


def _certificate(plan: Plan) -> str:
    if plan.search.get("gap") is None:
        uncertified = plan.search.get("algorithm") == "dynamic_programming" and "gap" in plan.search
        return "; no certificate: the search is exact on at most three mesh axes" if uncertified else ""
    cost, bound, gap = (plan.search[key] for key in ("cost", "lower_bound", "gap"))
    return f"; {cost:.4g} s per step, lower bound {bound:.4g} s, optimality gap {shown_gap(gap)}"


def shown_gap(gap: float) -> str:
    """The optimality gap in percent of the lower bound."""
    return f"{100 * gap:{'.2g' if gap < 1 else '.0f'}} %" if gap > ROUNDING else "0 %"


def search_lines(search: Content) -> list[str]:
    """The mesh that a search chose, and what sharding propagation compared."""
    return [line for line in (mesh_line(search), propagation_line(search)) if line is not None]


def mesh_line(search: Content) -> str | None:
    """The mesh and by how much the next one is slower; None for one that was configured or follows from the batch."""
    if search.get("mesh") is None:
        return None
    best, second = search["mesh"], search["runner_up"]
    if search["meshes"] + search["left_out"] == 1:  # another plan may leave out an axis that slices the batch
        return f"mesh: {_sizes(best)}, the only factorisation of the ranks" if second is None else None
    line = f"mesh: {_sizes(best)}, the best of {search['meshes'] + search['left_out']} factorisations of the ranks"
    if search["left_out"]:
        line += f" ({search['left_out']} pruned by bounds)"
    if second is None:
        return f"{line}; the others that were searched have the same best plan, so there is no runner-up"
    slower = second["seconds"] / best["seconds"] - 1 if best["seconds"] else 0.0
    return f"{line}; the runner-up {_sizes(second)} takes {second['seconds']:.4g} s per step, {100 * slower:.2g} % more"


def _sizes(mesh: Content) -> str:
    return " x ".join(map(str, mesh["mesh"])) or "1"


def propagation_line(search: Content) -> str | None:
    """Both costs of propagation; None for other searches, and where both plans cost the same."""
    costs = search.get("propagation")
    if costs is None or costs["cheapest"] >= costs["followed"]:
        return None
    propagated, cheapest = (f"{costs[key]:.4g} s" for key in ("followed", "cheapest"))
    if costs["by_price"]:
        return f"propagation: {cheapest} per step, re-optimised by cost; the propagated plan takes {propagated}"
    return (
        f"propagation: {propagated} per step as propagated; {cheapest} if optimised by cost around the same strategies "
        "(parallel.search=dynamic_programming)"
    )


# The joint decision


def _decided(content: Content) -> str:
    line = (
        f"jointly optimised: {_choice(content)}; {content['tried']} choices evaluated, {content['pruned']} pruned by "
        f"bounds, {content['over']} too large"
    )
    if (second := content["runner_up"]) is None:
        return line
    slower = f"{100 * (second['seconds'] / content['seconds'] - 1):.2g} % slower"
    known = "is known to" if second.get("fits", True) else "may"  # older plans hold only runners-up that fit
    return f"{line}; the next that {known} fit ({_choice(second)}) is {slower}"


def _choice(content: Content) -> str:
    return str(choice_of({**content, "recompute": recompute_of(content)}))


def recompute_of(content: Content) -> str:
    """The recompute setting of a choice, and the number of layers if not all."""
    recompute, modules = str(content["recompute"]), content["modules"]
    if modules is None:
        return recompute
    layers = f"{len(modules)} layer{'s' * (len(modules) > 1)}"
    if content["stages"] > 1:
        return f"{recompute} in {layers}, the first of every stage"
    return f"{recompute} in the first {layers}"


def decision_rows(content: Content) -> list[tuple[str, str, str]]:
    """The rows below `DECISION`, empty for a missing runner-up; `content` is `search.decided` of plan.json."""
    second = content["runner_up"]
    columns = [_decided_values(content), [""] * (len(DECIDED) + 1) if second is None else _decided_values(second)]
    if second is not None and content["seconds"]:
        columns[1][-1] += f", {second['seconds'] / content['seconds'] - 1:.2%} more"
    return list(zip((*DECIDED, "seconds per step"), *columns, strict=True))


def _decided_values(choice: Content) -> list[str]:
    values = {**choice, "recompute": recompute_of(choice)}
    if choice["stages"] == 1:
        values |= {"stages": "no pipeline", "micro_batches": "no pipeline"}
    return [*(str(values[entry]) for entry in DECIDED.values()), shown_seconds(choice["seconds"])]


def decision_counts(content: Content) -> str:
    """The number of choices, and how many were pruned or evaluated."""
    return (
        f"{content['tried']} choices evaluated, {content['pruned']} pruned because their bounds are no better, "
        f"{content['over']} too large for the memory of a rank, {content['refused']} without a plan"
    )


def decision_table(content: Content) -> str:
    """The values chosen for `auto`; `content` is `search.decided` of plan.json."""
    return f"{text_table([DECISION, *decision_rows(content)])}\n{decision_counts(content)}"


# Layers and operators


def layer_table(content: Content) -> str:
    """A line per kind of layer with the sums over its layers, and below it a line per operator that has parameters or
    communicates."""
    rows: list[tuple[str, ...]] = [LAYERS]
    for kind in kinds(content["operators"]):
        layouts = kind.rows[0].layouts if len(kind.rows) == 1 else ""
        rows.append((kind.name, f"x {kind.count}" if kind.count > 1 else "", layouts, *_cells(kind.sums)))
        if len(kind.rows) > 1:
            rows += [(f"  {row.name}", "", row.layouts, *_cells(row.sums)) for row in kind.rows if row.matters]
    return text_table(rows, numbers=range(3, len(LAYERS)))


def _cells(sums: Sums) -> tuple[str, ...]:
    seconds = map(shown_seconds, (sums.compute, sums.communication))
    return (*seconds, *map(shown_bytes, (sums.sent, sums.parameters, sums.results)))


def operator_table(content: Content) -> str:
    """A line per operator, and above it one per step of its redistributions."""
    staged = "pipeline" in content
    rows = [(*("stage", "ranks") * staged, "operator", "shapes", "slices", "result", "chosen", "source")]
    for operator in content["operators"]:
        shapes = (_shapes(operator[key]) for key in ("shapes", "in_strategy", "out_strategy"))
        stage = (str(operator["stage"]), _ranks(content["mesh"], operator["group"])) if staged else ()
        rows.append((*stage, operator["name"], *shapes, operator["origin"], operator["source"]))
    head, *body = text_table(rows).split("\n")
    lines = [f"mesh {content['mesh']}", head]
    for line, operator in zip(body, content["operators"], strict=True):
        for entry in operator["redistributions"]:
            tensor = f"operand {entry['operand']}" if entry["operand"] >= 0 else "result"
            tensor += f", copy {entry['copy']}" if content["copies"]["count"] > 1 else ""
            lines += [
                f"    {tensor}, {pass_}: {step['step']}, rank 0 with {step['group']}, {shown_bytes(step['bytes'])}"
                for pass_ in ("forward", "backward")
                for step in entry[pass_]
            ]
        lines.append(line)
    return "\n".join(lines)


def _ranges(ranks: Sequence[int]) -> str:
    """Increasing numbers as ranges: 0-3, 6."""
    starts = [rank for rank in ranks if rank - 1 not in ranks]
    ends = [rank for rank in ranks if rank + 1 not in ranks]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _ranks(mesh: Mapping[str, int], group: int) -> str:
    size = math.prod(mesh.values())
    return str(group) if size == 1 else f"{group * size}-{(group + 1) * size - 1}"


def _shapes(shapes: list[list[int]]) -> str:
    return "(" + ", ".join(f"({','.join(map(str, shape))})" for shape in shapes) + ")"


# Totals


def totals(content: Content) -> str:
    """Estimated bytes sent, memory and time."""
    sent = ", ".join(f"{kind} {shown_bytes(count)}" for kind, count in content["communication"].items()) or "nothing"
    needed, cost = content["memory"], content["cost"]
    memory = ", ".join(f"{part} {shown_bytes(needed[part])}" for part in MEMORY)
    times = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in step_parts(cost).items() if seconds > 0)
    lines = [
        f"sent per step and {'server' if 'server' in content else 'rank'}: {sent}",
        f"memory per rank: {memory}; at most {shown_bytes(needed['peak'])} at once, in {needed['peak_in']}",
        f"estimated time per step: {cost['total'] * 1e3:.2f} ms on {cost['cluster']}: {times}",
    ]
    lines += [
        f"rank{'s' * (len(kind['ranks']) > 1)} {_ranges(kind['ranks'])}: {kind['cluster']}, {kind['rows']} rows, "
        f"{kind['cost']['total'] * 1e3:.2f} ms ({kind['cost']['compute'] * 1e3:.2f} ms compute), "
        f"{shown_bytes(kind['memory']['peak'])} of {shown_bytes(kind['memory_limit'])}"
        for kind in content.get("kinds", ())
    ]
    copies, recompute = content["copies"], content.get("recompute")
    if copies["count"] > 1:
        lines.append(
            f"batch splits: {copies['count']} of {copies['rows']} rows of a micro-batch, {copies['operators']} "
            f"operators for each; once for all: {', '.join(copies['once']) or 'nothing'}"
        )
    if recompute:
        kept = f", {len(recompute['kept'])} operators in them kept" if recompute["kept"] else ""
        collectives = "collectives kept" if recompute["keeps_communication"] else "collectives repeated"
        lines.append(
            f"recomputed in backward: {', '.join(recompute['modules'])}{kept}, {collectives}: "
            f"{shown_bytes(recompute['stored_bytes'])} stored between forward and backward instead of "
            f"{shown_bytes(recompute['stored_bytes_without'])}, {shown_bytes(recompute['sent_again_bytes'])} sent again"
        )
    if "pipeline" in content:
        pipeline = content["pipeline"]
        lines.append(
            f"estimated bubble: {pipeline['bubble']:.1%} of the time the stages wait; micro-batches whose activations "
            f"a rank keeps: {', '.join(map(str, pipeline['held']))}"
        )
        lines += _groups_of_kinds(content)
        if "actions" in pipeline:  # not in plans of earlier versions
            lines += [f"schedule {pipeline['schedule']} (F forward, B backward, I input, W weight gradients):"]
            lines += schedule.lines(pipeline)
    return "\n".join(lines)


def _groups_of_kinds(content: Content) -> Iterator[str]:
    """A line for every group of ranks of a pipeline whose devices differ."""
    pipeline, ranks = content["pipeline"], math.prod(content["mesh"].values())
    clusters = pipeline.get("clusters", ())  # not in plans of earlier versions
    if len({*clusters}) < 2:
        return
    for group, (cluster, needed) in enumerate(zip(clusters, pipeline["memory"], strict=True)):
        mine = stages_of(group, owners_in(pipeline))
        seconds = sum(sum(pipeline["seconds"][stage].values()) for stage in mine)
        yield (
            f"stage {', '.join(map(str, mine))} on ranks "
            f"{_ranges(range(group * ranks, (group + 1) * ranks))}: {cluster}, "
            f"{sum(pipeline['operators'][stage] for stage in mine)} operators, {seconds * 1e3:.2f} ms per micro-batch, "
            f"{shown_bytes(needed['peak'])} of {shown_bytes(pipeline['memory_limits'][group])}"
        )


def step_parts(cost: Content) -> dict[str, float]:
    """The seconds of the parts that add up to a step; `cost` is that of plan.json."""
    parts = {name: cost[name] for name in ("forward", "backward", "recomputed")}
    parts |= cost["redistributions"]
    parts |= {"gradients beyond backward": cost["gradients_exposed"]}
    parts |= {f"ZeRO's {kind}": seconds for kind, seconds in cost["zero"].items()}
    return parts | {name: cost[name] for name in ("send", "waiting", "optimizer") if name in cost}


# Prediction


def used_devices(prediction: Content) -> str:
    """How many devices are used, of how many if not all."""
    ranks, devices = prediction["ranks"], prediction["devices"]
    return f"{ranks} of {devices}" if ranks < devices else str(ranks)


def prediction_lines(content: Content) -> str:
    """Speed, the bottleneck, and the next improvement."""
    prediction = content["prediction"]
    seconds = shown_seconds(prediction["seconds"])
    line = f"on {used_devices(prediction)} devices of {prediction['cluster']}: {seconds} per step"
    if prediction["seconds"]:
        for unit in ("samples", "tokens"):
            if rate := prediction[f"{unit}_per_second"]:
                line += f", {shown_rate(rate)} {unit}/s"
        line += f", {shown_share(prediction['mfu'])} of peak flops (MFU)"
    total = sum(prediction["shares"].values())
    shares = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in prediction["shares"].items() if seconds)
    taken = prediction.get("training")
    lines = [line] if taken is None else [line, f"{taken['steps']} steps: {', '.join(training_amounts(taken))}"]
    return "\n".join([*lines, f"bottleneck: {prediction['binding']} (time by limit: {shares})", *next_better(content)])


def training_amounts(taken: Content) -> list[str]:
    """Time, device hours and price of a training; `taken` is `prediction.training` of plan.json."""
    amounts = [shown_time(taken["seconds"]), f"{shown_rate(taken['device_hours'])} device hours"]
    return [*amounts, f"{taken['price']:,.2f} at the price per hour"] if taken["price"] is not None else amounts


def next_better(content: Content) -> list[str]:
    """What would make the plan fit or, if it fits, faster; and whether more than one rank helps."""
    prediction, lines = content["prediction"], []
    operators = content["operators"]
    repeated = [one for one in operators if all(set(layout) <= set("(-, )") for layout in one["out_layouts"])]
    replicated = len(repeated) == len(operators)
    if prediction["ranks"] > 1 and replicated:
        lines.append("nothing is sliced: every rank computes the entire batch, and world_size=1 would be no slower")
    elif prediction["ranks"] > 1 and repeated:
        flops, replicated_flops = (sum(one["predicted"]["flops"] for one in some) for some in (operators, repeated))
        most = max(repeated, key=lambda one: one["predicted"]["flops"])
        if replicated_flops > flops / 2:
            lines.append(
                f"{replicated_flops / flops:.0%} of a rank's flops are in operators that every rank computes in full, "
                f"most of them in {most['name']} ({most['source']})"
            )
    if prediction["memory"] > prediction["memory_limit"]:
        lines.append(_does_not_fit(prediction))
    elif prediction["seconds"]:
        gains = sorted(prediction["speedups"].items(), key=lambda entry: -entry[1])
        best = ", ".join(f"{_better(name)} {gain:.2f} times as fast" for name, gain in gains if gain > 1.005)
        free = shown_bytes(prediction["memory_limit"] - prediction["memory"])
        line = f"next better: {best or 'no single rate helps'}; {free} of memory per device are free"
        if prediction["ranks"] < prediction["devices"] and not replicated:
            line += f", and {prediction['devices'] - prediction['ranks']} devices idle (world_size=null takes all)"
        lines.append(line)
    return lines


def _does_not_fit(prediction: Content) -> str:
    limit, smaller = prediction["memory_limit"], prediction["shrunk"]
    options = []
    for keys, needed in smaller.items():
        more = " and fit" if needed <= limit else " or more" if "recompute" in keys else ""
        options.append(f"{keys} would need {shown_bytes(needed)}{more}")
    open_keys = {word.partition("=")[0] for keys in smaller for word in keys.split()}
    auto = " ".join(f"{key}=auto" for key in sorted(open_keys, reverse=True))
    if auto and min(smaller.values()) <= limit:
        options.append(f"{auto} finds the fastest that fits")
    else:
        options.append(
            "take more ranks, smaller micro-batches (train.accumulate), sliced parameters (parallel.mode=auto), or "
            "keep less on a device (parallel.offload)"
        )
        if auto and prediction["ranks"] > 1:
            options.append(f"{auto} finds out what fits without that, if anything")
    return (
        f"it does not fit: {shown_bytes(prediction['memory'])} per rank, and a device has {shown_bytes(limit)}; "
        f"{'; '.join(options)}"
    )


def _better(name: str) -> str:
    """A what-if in words; for a link, doubled bandwidth and half the latency."""
    if name == CALLS:
        return "launching calls in half the time"
    return f"a {name} twice as fast" if name.endswith(" link") else f"twice the {name}"
