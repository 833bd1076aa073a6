"""The content of plan.json: predicted bytes, memory and time, derived from graph, plan and program alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from strategies.core.graph import FusedSections, Operator, OperatorGraph
from strategies.core.plan import Plan
from strategies.core.program import Program, Redistribute
from strategies.core.steps import ALL_REDUCE, ReshardingPath
from strategies.cost.cluster import Cluster
from strategies.cost.step import step_cost
from strategies.lowering.pipeline import Stage
from strategies.lowering.pipeline_schedule import (
    Schedule,
    as_text,
    owners_of,
    peak_activations,
    split_stages,
    stages_of,
)
from strategies.lowering.pipeline_timeline import StageTimes, bubble, makespan
from strategies.memory.parts import group_memory, memory
from strategies.memory.repeated_blocks import Traces, trace_repeated
from strategies.memory.trace import Traced
from strategies.optimizer import sharding
from strategies.optimizer.buckets import predicted
from strategies.optimizer.settings import OptimizerSettings
from strategies.optimizer.zero import traffic as zero_traffic
from strategies.rules import rule_of
from strategies.runtime.peers import BROADCAST, SEND


def describe(
    graph: OperatorGraph,
    plan: Plan,
    program: Program,
    *,
    settings: OptimizerSettings,
    cluster: Cluster,
    traced: Traced | None = None,
    in_step: tuple[OperatorGraph, Plan] | None = None,
) -> dict[str, Any]:
    """The content of plan.json; its seconds are those of `cluster`. `settings` is how a step goes on after backward;
    `traced` is `trace_repeated(program, settings, 0)` if it is known; `in_step` is what a step computes for `graph` and
    `plan`, where that is several copies of them."""
    by_operator: dict[str, list[tuple[Redistribute, int]]] = {}
    for redistribution in program.redistributions:
        name, copy = program.batch_splits.get(redistribution.operator, (redistribution.operator, 0))
        by_operator.setdefault(name, []).append((redistribution, copy))
    traced = trace_repeated(program, settings, 0) if traced is None else traced
    sent = communication(program, settings, traced)
    return plan.to_json() | {
        "operators": [
            operator_entry(graph, plan, operator, by_operator.get(model_name(operator), []))
            for operator in model_operators(graph, plan)
        ],
        "parameters": {
            source.name: {
                "shape": list(source.spec.shape),
                "dtype": source.spec.dtype,
                "local_shape": list(plan.tensors[source.name].local_shape(source.spec.shape, plan.mesh)),
                "layout": str(plan.tensors[source.name]),
                "replica_group_size": plan.mesh.product(plan.tensors[source.name].replica_axes(plan.mesh)),
                "replica_group": list(plan.tensors[source.name].replica_group(plan.mesh, 0)),
                "trainable": source.trainable,
                "aliases": list(source.aliases),
            }
            | packed_entry(source.spec.packed)
            for source in graph.of_kind("parameter")
        },
        "cost": step_cost(*(in_step or (graph, plan)), program, cluster, settings).to_json(),
        "zero": _zero(settings),
        "communication": sent,
        "memory": memory(traced, settings).to_json(),
        "recompute": None if plan.recompute is None else recompute_entry(plan, program, traced, settings),
        "unsliced": [o.where for o in graph.operators if not rule_of(o, graph).known],
    }


def packed_entry(packed: FusedSections | None) -> dict[str, Any]:
    """What the entry of a parameter says of its sections, if it has any."""
    return {} if packed is None else {"packed": {"dim": packed.dim, "sizes": list(packed.sizes)}}


def recompute_entry(plan: Plan, program: Program, traced: Traced, settings: OptimizerSettings) -> dict[str, Any]:
    """The recomputed modules, and the bytes that a rank stores for one micro-batch with and without recompute."""
    assert plan.recompute is not None
    without = trace_repeated(replace(program, recompute=None, replicas={}), settings, 0)
    return asdict(plan.recompute) | {
        "stored_bytes": traced.activations,
        "stored_bytes_without": without.activations,
        "sent_again_bytes": sum(traced.sent.values()) - sum(without.sent.values()),
    }


def operator_entry(
    graph: OperatorGraph, plan: Plan, operator: Operator, redistributions: list[tuple[Redistribute, int]]
) -> dict[str, Any]:
    """One operator: its slices in torch's operand order, and every redistribution that it causes, with the number of
    the copy of the batch."""
    chosen, sharding, mesh = plan.operators[operator.name], rule_of(operator, graph), plan.mesh
    operands = sharding.operand_layouts(chosen.assignment)
    results = chosen.outputs or sharding.result_layouts(chosen.assignment)
    counts = [mesh.product(chosen.assignment.get(factor, ())) for factor in sharding.sizes]
    used = mesh.product(sharding.used(chosen.assignment))
    return {
        "name": model_name(operator),
        "module": operator.module,
        "op": operator.op,
        "source": operator.source,
        "origin": chosen.origin,
        "in_strategy": [list(layout.counts(mesh)) for layout in operands],
        "out_strategy": [list(layout.counts(mesh)) for layout in results],
        "in_layouts": [str(layout) for layout in operands],
        "out_layouts": [str(layout) for layout in results],
        "device_matrix": [*counts, *([mesh.size // used] if used < mesh.size else [])],
        "shapes": [list(spec.shape) for spec in graph.operand_specs(operator)],
        "local_shapes": [
            list(layout.local_shape(spec.shape, mesh))
            for layout, spec in zip(operands, graph.operand_specs(operator), strict=True)
        ],
        "redistributions": [
            {
                "value": one.value.id,
                "operand": one.operand,
                "forward": _steps(one.forward, plan, one.spec.item_bytes),
                "backward": _steps(one.backward if one.differentiable else (), plan, one.spec.item_bytes),
                "copy": copy,
            }
            for one, copy in redistributions
        ],
    }


def _zero(settings: OptimizerSettings) -> dict[str, Any] | None:
    """Stage and engine of ZeRO; at stage 3 how many elements may stay complete."""
    if not settings.stage:
        return None
    zero: dict[str, Any] = {"stage": settings.stage, "engine": "native" if settings.native else "deepspeed"}
    return zero | ({"complete": settings.complete} if settings.stage == 3 else {})


def model_operators(graph: OperatorGraph, plan: Plan) -> list[Operator]:
    """The operators of the model; of those that are there once per copy of the batch, the first copy's."""
    return [
        operator
        for operator in graph.operators
        if plan.operators[operator.name].origin != "copies"
        and (operator.batch_slice is None or not operator.batch_slice.index)
    ]


def model_name(operator: Operator) -> str:
    """The name of an operator in the model, without the batch slice that it belongs to."""
    return operator.name if operator.batch_slice is None else operator.batch_slice.name


def _steps(path: ReshardingPath, plan: Plan, item_bytes: int) -> list[dict[str, Any]]:
    """The steps with the group of rank 0 and the bytes that the busiest rank sends."""
    return [
        {
            "step": str(step),
            "collective": step.kind,
            "group": list(step.group(plan.mesh, 0)),
            "bytes": step.busiest(plan.mesh) * item_bytes,
        }
        for step in path
    ]


def communication(program: Program, settings: OptimizerSettings, traced: Traced | None = None) -> dict[str, int]:
    """Bytes that the busiest rank sends per training step, by collective: redistributions forward and backward once per
    micro-batch (and what recomputed modules send again, as it was `traced`), the loss, and gradients and weights as
    stage 0 or ZeRO sends them, without the norm."""
    total: Counter[str] = Counter()
    if traced is not None and program.recompute is not None:
        total.update({kind: settings.accumulate * count for kind, count in traced.sent.items()})
    for redistribution in program.redistributions if traced is None or program.recompute is None else ():
        for step in redistribution.collectives:
            size = step.busiest(program.mesh) * redistribution.spec.item_bytes
            total[step.kind] += settings.accumulate * size
    if program.loss_axes:  # one double
        ranks = program.mesh.product(program.loss_axes)
        total[ALL_REDUCE] += 8 * -(-2 * (ranks - 1) // ranks)
    if settings.stage == 0:
        total.update(predicted(program, measure=False))
    elif settings.native:
        names, own = [one["names"] for one in settings.groups_for(program)], (settings.limit, settings.stage)
        if settings.stage == 3 and traced is not None:
            total.update({kind: settings.accumulate * count for kind, count in traced.zero.items()})
            found = sharding.after_update(sharding.sharded_buckets(program, names, *own, settings.complete))
        else:
            found = iter(sharding.calls(program, names, settings.accumulate, *own, settings.complete))
        for call in found:
            total[call.kind] += call.bytes
    else:
        groups = settings.groups_for(program)
        sent = zero_traffic.predicted(program, settings.stage, settings.accumulate, groups, settings.complete)
        total.update(sent)
    for call in zero_traffic.agreement(program) if settings.stage else ():
        total[call.kind] += call.bytes
    return dict(total)


def describe_stages(
    plan: Plan,
    stages: Sequence[Stage],
    programs: Sequence[Program],
    schedule: Schedule,
    *,
    settings: OptimizerSettings,
    cluster: Cluster,
) -> dict[str, Any]:
    """The content of plan.json. `programs` are those of the stages; the rest as for `planner.description`."""
    owners, parts = owners_of(schedule), settings.accumulate
    micro_batches = 1 + max(action.micro_batch for action in schedule[0])
    traces_of = Traces()
    apart = {number for actions in schedule for number in split_stages(actions)}
    traces = [
        traces_of.of(program, replace(settings, split=number in apart)) for number, program in enumerate(programs)
    ]
    devices = [cluster.of_group(group, plan.mesh.size) for group in owners]
    entries = [
        describe(stage.graph, stage.plan, program, settings=settings, cluster=own, traced=traced)
        for stage, program, traced, own in zip(stages, programs, traces, devices, strict=True)
    ]
    sent, memories, limits, names = [], [], [], []
    for group in range(len(schedule)):
        own: Counter[str] = Counter()
        mine = stages_of(group, owners)
        for number in mine:
            own.update(entries[number]["communication"])
            own.update(_between(stages[number], stages, owners, parts, settings.stage))
        sent.append(dict(own))
        memories.append(group_memory(dict(enumerate(traces)), schedule, group, settings).to_json())
        limits.append(devices[mine[0]].memory)
        names.append(devices[mine[0]].name)
    costs = [one["cost"] for one in entries]
    cost, times = (
        cost_of_stages(stages, costs, schedule, parts, cluster),
        stage_times(stages, costs, owners, parts, cluster),
    )
    even = times if any(one.total for one in times) else [StageTimes(1.0, 1.0, 1.0)] * len(stages)
    parameters: dict[str, Any] = {}
    for stage, one in zip(stages, entries, strict=True):
        for name, entry in one["parameters"].items():
            parameters[name] = entry | {"stages": list(stage.holders.get(name, (stage.number,)))}
    return plan.to_json() | {
        "operators": [
            operator | {"stage": stage.number, "group": owners[stage.number]}
            for stage, one in zip(stages, entries, strict=True)
            for operator in one["operators"]
        ],
        "parameters": parameters,
        "zero": _zero(settings),
        "cost": cost,
        "communication": {kind: max(own.get(kind, 0) for own in sent) for own in sent for kind in own},
        "memory": max(zip(memories, limits, strict=True), key=lambda one: one[0]["peak"] - one[1])[0],
        "recompute": _recompute(plan, [one["recompute"] for one in entries if one["recompute"] is not None]),
        "unsliced": [where for one in entries for where in one["unsliced"]],
        "pipeline": {
            "stages": len(schedule),
            "virtual_stages": len(stages) // len(schedule),
            "groups": list(owners),
            "micro_batches": micro_batches,
            "operators": [len(stage.graph.operators) for stage in stages],
            "communication": sent,
            "memory": memories,
            "memory_limits": limits,
            "clusters": names,
            "held": [int(peak_activations(actions)) for actions in schedule],
            "bubble": bubble(schedule, even),
            "actions": [as_text(actions) for actions in schedule],
            "seconds": [asdict(one) for one in times],
        },
    }


def stage_times(
    stages: Sequence[Stage],
    alone: Sequence[Mapping[str, Any]],
    owners: Sequence[int],
    parts: int,
    cluster: Cluster,
) -> list[StageTimes]:
    """The passes of every stage, from the `cost` of plan.json of the stages `alone` with `parts` micro-batches per
    step. Half of what a stage communicates in itself counts in each direction."""
    times = []
    for cost, stage in zip(alone, stages, strict=True):
        ahead, back = _send_seconds(stage, stages, owners, cluster, parts)
        own, weight = sum(cost["redistributions"].values()) + sum(cost["zero"].values()), cost["backward_weights"]
        forward = cost["forward"] + own / 2 + ahead
        backward = cost["backward"] - weight + cost["recomputed"] + own / 2 + back
        times.append(StageTimes(forward / parts, backward / parts, weight / parts))
    return times


def cost_of_stages(
    stages: Sequence[Stage], alone: Sequence[Mapping[str, Any]], schedule: Schedule, parts: int, cluster: Cluster
) -> dict[str, Any]:
    """The `cost` of plan.json, from those of the stages `alone` with `parts` micro-batches per step."""
    owners, micro_batches = owners_of(schedule), 1 + max(action.micro_batch for action in schedule[0])
    costs = []
    for cost, stage in zip(alone, stages, strict=True):
        sends = sum(_send_seconds(stage, stages, owners, cluster, parts))
        costs.append({**cost, "send": sends, "communication": cost["communication"] + sends})
    times = stage_times(stages, alone, owners, parts, cluster)
    by_group = [stages_of(group, owners) for group in range(len(schedule))]
    busiest = max(by_group, key=lambda numbers: sum(times[number].total for number in numbers))
    slowest = _added([costs[number] for number in busiest])
    busy = slowest["compute"] + slowest["communication"] + slowest["optimizer"]
    after = slowest["gradients_exposed"] + slowest["optimizer"]  # once per step, when the schedule is done
    total = after + makespan(schedule, times) * (parts // micro_batches)
    return slowest | {"waiting": total - busy, "total": total}


def _added(costs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Seconds of several stages together, part by part."""
    total: dict[str, Any] = {}
    for cost in costs:
        for name, value in cost.items():
            if isinstance(value, Mapping):
                total[name] = _added([total.get(name, {}), value])
            else:
                total[name] = value if isinstance(value, str) else total.get(name, 0.0) + value
    return total


def _recompute(plan: Plan, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The recomputed modules of all stages, and the bytes that the stages together store for one micro-batch."""
    if plan.recompute is None:
        return None
    counted = ("stored_bytes", "stored_bytes_without", "sent_again_bytes")
    return dict(entries[0]) | {
        "modules": plan.recompute.modules,
        "kept": plan.recompute.kept,
        **{key: sum(entry[key] for entry in entries) for key in counted},
    }


def _send_seconds(
    stage: Stage, stages: Sequence[Stage], owners: Sequence[int], cluster: Cluster, parts: int
) -> tuple[float, float]:
    """Seconds per step in which a rank sends values of `stage` on, and gradients back. Group 0 has the first ranks."""
    ranks = stage.plan.mesh.size
    first = owners[stage.number] * ranks
    seconds = []
    for count, peer in zip(_sent(stage, stages, owners), (stage.number + 1, stage.number - 1), strict=True):
        if count:
            link = cluster.between(first, owners[peer] * ranks, SEND)
            seconds.append(parts * (link.call + link.latency + count / link.bandwidth))
        else:
            seconds.append(0.0)
    return seconds[0], seconds[1]


def _sent(stage: Stage, stages: Sequence[Stage], owners: Sequence[int]) -> tuple[int, int]:
    """Bytes of one micro-batch that a rank of `stage` sends on as values, and back as gradients. Its own next stage
    takes them where they are."""
    graph, mesh, own, last = stage.graph, stage.plan.mesh, owners[stage.number], len(stages) - 1
    ahead = back = 0
    if stage.number < last and owners[stage.number + 1] != own:
        for ref, layout in zip(graph.outputs, stage.sends, strict=True):
            spec = graph.specs[ref]
            ahead += layout.local_elements(spec.shape, mesh) * spec.item_bytes
    for source in graph.sources if stage.number and owners[stage.number - 1] != own else ():
        if source.id in stage.receives and source.trainable:
            local = stage.plan.inputs[source.name].local_shape(source.spec.shape, mesh)
            back += math.prod(local) * source.spec.item_bytes
    return ahead, back


def _between(stage: Stage, stages: Sequence[Stage], owners: Sequence[int], parts: int, zero: int) -> dict[str, int]:
    """Bytes per step that a rank sends to other groups for `stage`, by collective."""
    graph, mesh = stage.graph, stage.plan.mesh
    sent = {SEND: parts * sum(_sent(stage, stages, owners)), ALL_REDUCE: 0, BROADCAST: 0}
    if stage.number == len(stages) - 1:
        sent[BROADCAST] = 8  # the loss, a double
    for source in graph.sources:
        if source.name in stage.holders and source.id not in stage.receives:
            holders = stage.holders[source.name]
            n, first = len({owners[number] for number in holders}), holders[0] == stage.number
            if n == 1 or stage.number != min(k for k in holders if owners[k] == owners[stage.number]):
                continue  # nobody else has it, or another stage of the same ranks is counted
            elements = stage.plan.tensors[source.name].local_elements(source.spec.shape, mesh)
            sent[ALL_REDUCE] += -(-2 * (n - 1) * elements // n) * max(source.spec.item_bytes, 4)  # added in fp32
            if zero and first:
                sent[BROADCAST] += elements * source.spec.item_bytes
    return {kind: count for kind, count in sent.items() if count}
