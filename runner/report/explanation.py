"""Why an operator is sliced as it is: who chose, what it costs with all that is sent around it, and the next best."""

from __future__ import annotations

from runner.config.schema import Config
from runner.errors import ConfigError
from runner.planning.clusters import cluster_of
from runner.planning.prepare import Prepared
from runner.report.layer_table import shown_bytes, shown_seconds
from runner.report.layers import layer_of
from strategies.core.addressing import addresses, matches
from strategies.core.errors import closest
from strategies.core.graph import Operator
from strategies.core.plan import Plan
from strategies.core.steps import LOCAL, ReshardingPath
from strategies.planner.alternatives import Alternative, Neighbourhood

REASONS = {
    "data_parallel": "in a module of parallel.set_data_parallel",
    "propagated": "propagated: of the strategies on the most devices, the least redistribution to the neighbours that "
    "were decided before it",
    "default": "not configured and not reached by the search: the batch over as many devices as divide it",
    "no rule": "its kind has no sharding rule, so every rank computes it whole",
}


def explanations(prepared: Prepared, pattern: str) -> str:
    """A paragraph per operator that `pattern` (globs per segment, as in parallel.strategies) means; operators of which
    the same is to be said share one. Raises ConfigError for a pattern that means none."""
    assert prepared.graph is not None and prepared.plan is not None
    cluster = cluster_of(prepared.config, prepared.device, prepared.world_size)
    told: dict[tuple[str, ...], list[Operator]] = {}
    parts = [(stage.graph, stage.plan) for stage in prepared.stages] or [(prepared.graph, prepared.plan)]
    for graph, plan in parts:
        for operator in graph.operators:
            if matches(pattern, operator) is not None:
                stage, config = prepared.config.parallel.zero.known, prepared.config
                around = Neighbourhood(graph, plan, operator, cluster, stage, config.parts)
                told.setdefault(tuple(_lines(around, config)), []).append(operator)
    if not told:
        names = [name for operator in prepared.graph.operators for name in (operator.name, *addresses(operator))]
        hint = next(filter(None, (_around_it(pattern, name) for name in names)), None)
        told_hint = closest(pattern, names) if hint is None else f" Did you mean '{hint}'?"
        raise ConfigError("MW211", f"explain.operator = {pattern!r} matches no operator of the model.{told_hint}")
    return "\n\n".join("\n".join((_heading(operators), *lines)) for lines, operators in told.items())


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
        f"  why        {_why(around.operator, around.plan, config)}",
        f"  costs      {_price(planned)}",
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
    lines.append(f"             takes {word}: {_price(best)}")
    if memory:
        lines.append(f"             holds {shown_bytes(abs(memory))} {'more' if memory > 0 else 'less'} per rank")
    if difference < 0:
        lines.append("             (with its neighbours as they are; changed together they may cost less still)")
    return [*lines, f"  legal      {len(others) + 1} strategies on this mesh"]


def _why(operator: Operator, plan: Plan, config: Config) -> str:
    origin = plan.operators[operator.name].origin
    if origin == "configured":
        paths = [path for path in config.parallel.strategies if matches(path, operator) is not None]
        return f"configured: parallel.strategies.{paths[-1]}" if paths else "configured where the plan was made"
    return REASONS.get(origin, f"chosen by {plan.search['algorithm']}")


def _layouts(one: Alternative) -> str:
    return f"{' '.join(map(str, one.operands))} -> {' '.join(map(str, one.results))}"


def _price(one: Alternative) -> str:
    parts = {"compute": one.compute, "redistributions": one.communication, "gradients": one.gradients}
    told = ", ".join(f"{name} {shown_seconds(seconds)}" for name, seconds in parts.items())
    return f"{shown_seconds(one.seconds)} per step: {told}"


def _around(around: Neighbourhood, planned: Alternative) -> list[str]:
    layer, lines = layer_of(around.operator.module, around.operator.name), []
    for one in planned.redistributions:
        whose = one.operator.removeprefix(f"{layer}.") if one.operator != around.operator.name else "its"
        place = f"operand {one.operand}" if one.operand >= 0 else "result"
        what = f"{whose} {place}" if whose == "its" else f"{place} of {whose}"
        ways: list[tuple[str, ReshardingPath]] = [("forward", one.forward)]
        ways += [("backward", one.backward)] if one.differentiable else []
        for way, chain in ways:
            for step in chain:
                sent = step.busiest(around.plan.mesh) * one.spec.item_bytes
                size = "" if step.kind in LOCAL else f", {shown_bytes(sent)} sent per rank"
                lines.append(f"{what}, {way}: {step}{size}")
    return lines
