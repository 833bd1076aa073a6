"""Why an operator has its strategy: who chose it, its cost including resharding, and the runner-up; and which shard of
a tensor each rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

from runner.config.schema import Config
from runner.errors import ConfigError
from runner.planning.clusters import cluster_of
from runner.planning.prepare import Prepared
from runner.report.layers import layer_of
from runner.report.units import shown_bytes, shown_seconds, text_table
from strategies.core.addressing import addresses, meant
from strategies.core.errors import closest
from strategies.core.graph import Operator, OperatorGraph, TensorSpec
from strategies.core.layout import Layout, stored
from strategies.core.plan import Plan
from strategies.core.steps import LOCAL
from strategies.planner.alternatives import Alternative, Neighbourhood
from strategies.rules import rule_of

REASONS = {
    "data_parallel": "in a module of parallel.set_data_parallel",
    "propagated": "propagated: of the strategies on the most devices, the least redistribution to the neighbours that "
    "were assigned before it",
    "default": "not configured and not reached by the search: the batch over as many devices as divide it",
    "no rule": "its kind has no sharding rule, so it is replicated on every rank",
}


def explanations(prepared: Prepared, pattern: str) -> str:
    """Why the operators that `pattern` matches, globs per segment, have their strategies.

    Returns:
        A paragraph per operator; operators with the same explanation share one.

    Raises:
        ConfigError: The pattern matches no operator.
    """
    assert prepared.graph is not None and prepared.plan is not None
    cluster = cluster_of(prepared.config, prepared.device, prepared.world_size)
    paragraphs: dict[tuple[str, ...], list[Operator]] = {}
    parts = [(stage.graph, stage.plan) for stage in prepared.stages] or [(prepared.graph, prepared.plan)]
    for group, (graph, plan) in zip(prepared.owners, parts, strict=True):
        own = cluster.of_group(group, plan.mesh.size)
        for operator, _ in meant(pattern, graph.operators):
            stage, config = prepared.config.parallel.zero.known, prepared.config
            around = Neighbourhood(graph, plan, operator, own, stage, config.parts)
            paragraphs.setdefault(tuple(_lines(around, config)), []).append(operator)
    if not paragraphs:
        names = [name for operator in prepared.graph.operators for name in (operator.name, *addresses(operator))]
        hint = next(filter(None, (_around_it(pattern, name) for name in names)), None)
        suggestion = closest(pattern, names) if hint is None else f" Did you mean '{hint}'?"
        raise ConfigError("MW211", f"explain.operator = {pattern!r} matches no operator of the model.{suggestion}")
    return "\n\n".join("\n".join((_heading(operators), *lines)) for lines, operators in paragraphs.items())


def _around_it(pattern: str, name: str) -> str | None:
    """A pattern for the operators of which `pattern` is a part of the path, such as a module: `experts` is
    `layers.*.feed_forward.experts.*` of `layers.0.feed_forward.experts.up_proj`."""
    wanted, words = pattern.split("."), name.split(".")
    for start in range(len(words) - len(wanted) + 1):
        end = start + len(wanted)
        if words[start:end] == wanted:
            found = ["*" if word.isdigit() else word for word in words[:end]]
            return ".".join([*found, "*"] if end < len(words) else found)
    return None


def _heading(operators: list[Operator]) -> str:
    others = f" and {len(operators) - 1} like it: " + ", ".join(o.name for o in operators[1:]) if operators[1:] else ""
    return operators[0].where + others


def _lines(around: Neighbourhood, config: Config) -> list[str]:
    planned, others = around.planned, around.others()
    lines = [
        f"  strategy   {_layouts(planned)}",
        f"  why        {_why(around, config)}",
        f"  costs      {_cost(planned)}",
    ]
    lines += [f"  around     {line}" for line in _around(around, planned)] or ["  around     nothing is sent"]
    if not others:
        return [*lines, "  runner-up  none: no other strategy is legal on this mesh"]
    best = others[0]
    difference = best.seconds - planned.seconds
    if abs(difference) <= 1e-9 * planned.seconds:
        word, title = "as long", "runner-up"
    else:
        share = f" ({abs(difference) / planned.seconds:.0%})" if planned.seconds else ""
        word = f"{shown_seconds(abs(difference))}{share} {'more' if difference > 0 else 'less'}"
        title = "runner-up" if difference > 0 else "cheaper"
    memory = best.parameters + best.stored - planned.parameters - planned.stored
    lines.append(f"  {title:<9}  {_layouts(best)}")
    lines.append(f"             takes {word}: {_cost(best)}")
    if memory:
        lines.append(f"             keeps {shown_bytes(abs(memory))} {'more' if memory > 0 else 'less'} per rank")
    if difference < 0:
        lines.append("             (with its neighbours unchanged; changed together they may cost less still)")
    return [*lines, f"  legal      {len(others) + 1} strategies on this mesh"]


def _why(around: Neighbourhood, config: Config) -> str:
    operator, plan = around.operator, around.plan
    if (origin := plan.operators[operator.name].origin) == "configured":
        operators = around.graph.operators
        paths = [p for p in config.parallel.strategies if any(operator is one for one, _ in meant(p, operators))]
        return f"configured: parallel.strategies.{paths[-1]}" if paths else "configured where the plan was made"
    return REASONS.get(origin, f"chosen by {plan.search['algorithm']}")


def _layouts(choice: Alternative) -> str:
    return f"{' '.join(map(str, choice.operands))} -> {' '.join(map(str, choice.results))}"


def _cost(choice: Alternative) -> str:
    parts = {
        "compute": choice.compute,
        "redistributions": choice.communication,
        "gradients within shared calls": choice.gradients,
    }
    by_part = ", ".join(f"{name} {shown_seconds(seconds)}" for name, seconds in parts.items())
    return f"{shown_seconds(choice.seconds)} per step: {by_part}"


def _around(around: Neighbourhood, planned: Alternative) -> list[str]:
    layer, lines = layer_of(around.operator.module, around.operator.name), []
    for use in planned.redistributions:
        what = f"operand {use.operand}" if use.operand >= 0 else "result"
        own = use.operator == around.operator.name
        what = f"its {what}" if own else f"{what} of {use.operator.removeprefix(f'{layer}.')}"
        for direction, path in {"forward": use.forward, "backward": use.backward if use.differentiable else ()}.items():
            for step in path:
                sent = step.busiest(around.plan.mesh) * use.spec.item_bytes
                size = "" if step.kind in LOCAL else f", {shown_bytes(sent)} sent per rank"
                lines.append(f"{what}, {direction}: {step}{size}")
    return lines


# Slices


class _Tensor(NamedTuple):
    """`names` are all that address it; `stage` is None without a pipeline."""

    name: str
    kind: str
    spec: TensorSpec
    layout: Layout
    names: tuple[str, ...]
    stage: int | None


def slices(prepared: Prepared, pattern: str) -> str:
    """A table per parameter, buffer, batch entry or operator that `pattern`, a name or globs, matches: for every rank
    the start and stop of its slice of each dim, and the axes over which it is partial.

    Raises:
        ConfigError: The pattern matches no tensor.
    """
    assert prepared.graph is not None and prepared.plan is not None
    stages: list[tuple[OperatorGraph, Plan, int | None]]
    stages = [(stage.graph, stage.plan, stage.number) for stage in prepared.stages]
    tensors = [tensor for stage in stages or [(prepared.graph, prepared.plan, None)] for tensor in _tensors(*stage)]
    chosen = [tensor for tensor in tensors if any(fnmatchcase(name, pattern) for name in tensor.names)]
    if not chosen:
        names = [name for tensor in tensors for name in tensor.names]
        raise ConfigError(
            "MW211",
            f"explain.slices = {pattern!r} is no parameter, buffer, batch entry or operator of the model."
            f"{closest(pattern, names)}",
        )
    mesh, zero = prepared.plan.mesh, prepared.config.parallel.zero.known
    lines = [f"mesh {' '.join(f'{axis} {size}' for axis, size in mesh.axes)}; slices are start:stop"]
    if zero == 3 and any(tensor.kind == "parameter" for tensor in chosen):
        lines.append("ZeRO stage 3 divides the shown slices of a parameter among its replicas")
    return "\n\n".join(["\n".join(lines), *(_table(prepared, tensor) for tensor in chosen)])


def _tensors(graph: OperatorGraph, plan: Plan, stage: int | None) -> Iterator[_Tensor]:
    for source in graph.sources:
        if source.kind == "input":
            if source.name in plan.inputs:
                layout, known = plan.inputs[source.name], (source.name, f"input.{source.name}")
                yield _Tensor(source.name, "entry of a micro-batch", source.spec, layout, known, stage)
        elif source.name in plan.tensors:
            yield _Tensor(source.name, source.kind, source.spec, plan.tensors[source.name], (source.name,), stage)
    for operator in graph.operators:
        planned = plan.operators[operator.name]
        layouts = planned.outputs or rule_of(operator, graph).result_layouts(planned.assignment)
        number = operator.name.partition("@")[2]
        names = tuple(dict.fromkeys((operator.name, *addresses(operator))))
        names += tuple(f"{name}@{number}" for name in names if number and "@" not in name)
        for index, (spec, layout) in enumerate(zip(operator.results, layouts, strict=True)):
            several = f" {index}" if len(operator.results) > 1 else ""
            yield _Tensor(operator.name, f"result{several} of {operator.where}", spec, layout, names, stage)


def _table(prepared: Prepared, tensor: _Tensor) -> str:
    assert prepared.plan is not None
    mesh, shape = prepared.plan.mesh, tensor.spec.shape
    first = prepared.owners[tensor.stage or 0] * mesh.size
    stage = "" if tensor.stage is None else f", stage {tensor.stage}"
    partial = " ".join(mesh.sorted(tensor.layout.partial)) or "-"
    rows = [("rank", *(f"dim {dim}" for dim in range(len(shape))), "partial over")]
    for rank in range(mesh.size):
        own = prepared.plan.of_rank(rank).mesh
        blocks = stored(tensor.layout, tensor.spec, own).blocks(shape, own, rank)
        ranges = [dict.fromkeys(block[dim] for block, _ in blocks) for dim in range(len(shape))]
        shown = (" ".join(f"{start}:{stop}" for start, stop in each) for each in ranges)
        rows.append((str(first + rank), *shown, partial))
    title = f"{tensor.name} {list(shape)} {tensor.spec.dtype}, {tensor.kind}{stage}"
    return "\n".join([title, *(f"  {line}" for line in text_table(rows).split("\n"))])
