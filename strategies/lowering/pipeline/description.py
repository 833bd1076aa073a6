"""What the plan of a pipeline means, told: the entries of plan.json with the stage of every operator, predicted bytes,
memory and time.

Bytes and memory are those of the busiest rank: by collective and in total the largest over the groups of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from strategies.core.plan import Plan
from strategies.core.program import Program
from strategies.core.steps import ALL_REDUCE
from strategies.cost.cluster import Cluster
from strategies.lowering.pipeline.cutting import Stage
from strategies.lowering.pipeline.schedule import Schedule, bubble, held, makespan
from strategies.memory.pipeline import group_memory
from strategies.memory.repeated_blocks import Traces
from strategies.optimizer.settings import Updating
from strategies.planner.description import describe
from strategies.runtime.peers import BROADCAST, SEND


def describe_stages(
    plan: Plan,
    stages: Sequence[Stage],
    programs: Sequence[Program],
    schedule: Schedule,
    *,
    updating: Updating,
    cluster: Cluster,
) -> dict[str, Any]:
    """The content of plan.json. `programs` are those of the stages; the rest as for `planner.description`."""
    groups, parts = len(schedule), updating.accumulate
    micro_batches = 1 + max(action.micro_batch for action in schedule[0])
    found = Traces()
    traces = [found.of(program, updating) for program in programs]
    told = [
        describe(stage.graph, stage.plan, program, updating=updating, cluster=cluster, traced=traced)
        for stage, program, traced in zip(stages, programs, traces, strict=True)
    ]
    sent, memories = [], []
    for group, actions in enumerate(schedule):
        own: dict[str, int] = {}
        for number in range(group, len(stages), groups):
            between = _between(stages[number], stages, groups, parts, updating.stage)
            for counts in (told[number]["communication"], between):
                for kind, count in counts.items():
                    own[kind] = own.get(kind, 0) + count
        sent.append(own)
        memories.append(group_memory(group, dict(enumerate(traces)), actions, groups, updating).told())
    cost, own_times = cost_of_stages(stages, [one["cost"] for one in told], schedule, parts, cluster)
    even = own_times if any(own_times) else [1.0] * len(stages)  # nothing to compare
    parameters: dict[str, Any] = {}
    for stage, one in zip(stages, told, strict=True):
        for name, entry in one["parameters"].items():
            parameters[name] = entry | {"stages": list(stage.holders.get(name, (stage.number,)))}
    return plan.to_json() | {
        "operators": [
            operator | {"stage": stage.number, "group": stage.number % groups}
            for stage, one in zip(stages, told, strict=True)
            for operator in one["operators"]
        ],
        "parameters": parameters,
        "cost": cost,
        "communication": {kind: max(own.get(kind, 0) for own in sent) for own in sent for kind in own},
        "memory": max(memories, key=lambda one: one["peak"]),
        "recompute": _recompute(plan, [one["recompute"] for one in told if one["recompute"] is not None]),
        "unsliced": [where for one in told for where in one["unsliced"]],
        "pipeline": {
            "stages": groups,
            "virtual_stages": len(stages) // groups,
            "micro_batches": micro_batches,
            "operators": [len(stage.graph.operators) for stage in stages],
            "communication": sent,
            "memory": memories,
            "held": [int(held(actions)) for actions in schedule],
            "bubble": bubble(schedule, even),
        },
    }


def cost_of_stages(
    stages: Sequence[Stage], alone: Sequence[Mapping[str, Any]], schedule: Schedule, parts: int, cluster: Cluster
) -> tuple[dict[str, Any], list[float]]:
    """The `cost` of plan.json, from those of the stages `alone` with `parts` micro-batches per step; and the seconds of
    every stage until its gradients are added."""
    groups, micro_batches = len(schedule), 1 + max(action.micro_batch for action in schedule[0])
    own_times, costs = [], []
    for cost, stage in zip(alone, stages, strict=True):
        sends = _send_seconds(stage, stages, groups, cluster, parts)
        after = cost["gradients_exposed"] + cost["optimizer"]  # once per step, when the schedule is done
        own_times.append(cost["total"] + sends - after)
        costs.append({**cost, "send": sends, "communication": cost["communication"] + sends})
    busiest = max(range(groups), key=lambda group: sum(own_times[group::groups]))
    slowest = _added(costs[busiest::groups])
    busy = slowest["compute"] + slowest["communication"] + slowest["optimizer"]
    after = slowest["gradients_exposed"] + slowest["optimizer"]
    total = after + makespan(schedule, [time / (3 * parts) for time in own_times]) * (parts // micro_batches)
    return slowest | {"waiting": total - busy, "total": total}, own_times


def _added(costs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Seconds of several stages together, part by part."""
    found: dict[str, Any] = {}
    for cost in costs:
        for name, value in cost.items():
            if isinstance(value, Mapping):
                found[name] = _added([found.get(name, {}), value])
            else:
                found[name] = value if isinstance(value, str) else found.get(name, 0.0) + value
    return found


def _recompute(plan: Plan, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What is computed again in all stages, and the bytes that they store for one micro-batch together."""
    if plan.recompute is None:
        return None
    counted = ("stored_bytes", "stored_bytes_without", "sent_again_bytes")
    return dict(entries[0]) | {
        "modules": plan.recompute.modules,
        "kept": plan.recompute.kept,
        **{key: sum(entry[key] for entry in entries) for key in counted},
    }


def _send_seconds(stage: Stage, stages: Sequence[Stage], groups: int, cluster: Cluster, parts: int) -> float:
    """Seconds per step in which a rank sends values of `stage` on and gradients back. Group 0 has the first ranks."""
    ranks = stage.plan.mesh.size
    first, seconds = stage.number % groups * ranks, 0.0
    for count, peer in zip(_sent(stage, stages), (stage.number + 1, stage.number - 1), strict=True):
        if count:
            link = cluster.between(first, peer % groups * ranks, SEND)
            seconds += parts * (link.call + link.latency + count / link.bandwidth)
    return seconds


def _sent(stage: Stage, stages: Sequence[Stage]) -> tuple[int, int]:
    """Bytes of one micro-batch that a rank of `stage` sends on as values, and back as gradients."""
    graph, mesh = stage.graph, stage.plan.mesh
    ahead = back = 0
    if stage.number < len(stages) - 1:
        for ref, layout in zip(graph.outputs, stage.sends, strict=True):
            spec = graph.specs[ref]
            ahead += math.prod(layout.local_shape(spec.shape, mesh)) * spec.item_bytes
    for source in graph.sources:
        if source.id in stage.receives and source.trainable:
            local = stage.plan.inputs[source.name].local_shape(source.spec.shape, mesh)
            back += math.prod(local) * source.spec.item_bytes
    return ahead, back


def _between(stage: Stage, stages: Sequence[Stage], groups: int, parts: int, zero: int) -> dict[str, int]:
    """Bytes per step that a rank sends to other groups for `stage`, by collective."""
    graph, mesh = stage.graph, stage.plan.mesh
    found = {SEND: parts * sum(_sent(stage, stages)), ALL_REDUCE: 0, BROADCAST: 0}
    if stage.number == len(stages) - 1:
        found[BROADCAST] = 8  # the loss, a double
    for source in graph.sources:
        if source.name in stage.holders and source.id not in stage.receives:
            holders = stage.holders[source.name]
            n, first = len({number % groups for number in holders}), holders[0] == stage.number
            if n == 1 or stage.number != min(k for k in holders if k % groups == stage.number % groups):
                continue  # nobody else has it, or another stage of the same ranks is counted
            elements = math.prod(stage.plan.tensors[source.name].local_shape(source.spec.shape, mesh))
            found[ALL_REDUCE] += -(-2 * (n - 1) * elements // n) * max(source.spec.item_bytes, 4)  # added in fp32
            if zero and first:
                found[BROADCAST] += elements * source.spec.item_bytes
    return {kind: count for kind, count in found.items() if count}
