"""What the plan of a pipeline means, told: the entries of plan.json with the stage of every operator, predicted bytes,
memory and time.

Bytes and memory are those of the busiest rank: by collective and in total the largest over the stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from strategies.cost.activations import trace
from strategies.cost.cluster import Cluster
from strategies.cost.memory import memory, under_way
from strategies.cost.updating import Updating
from strategies.describe import describe
from strategies.engine.program import Program
from strategies.engine.stages import BROADCAST, SEND
from strategies.pipeline.cutting import Stage
from strategies.pipeline.schedule import Schedule, bubble, held, makespan
from strategies.plan import Plan
from strategies.redistribution import ALL_REDUCE


def describe_stages(
    plan: Plan,
    stages: Sequence[Stage],
    programs: Sequence[Program],
    schedule: Schedule,
    *,
    updating: Updating,
    cluster: Cluster,
) -> dict[str, Any]:
    """The content of plan.json. `programs` are those of the stages; the rest is as for `strategies.describe`."""
    parts = updating.accumulate
    traces = [trace(program, updating) for program in programs]
    told = [
        describe(stage.graph, stage.plan, program, updating=updating, cluster=cluster, traced=traced)
        for stage, program, traced in zip(stages, programs, traces, strict=True)
    ]
    sent, memories = [], []
    for one, stage, traced, actions in zip(told, stages, traces, schedule, strict=True):
        own = dict(one["communication"])
        for kind, count in _between(stage, stages, parts).items():
            own[kind] = own.get(kind, 0) + count
        sent.append(own)
        memories.append(under_way(memory(traced, updating), held(actions)).told())
    own_times, costs = [], []
    for one, stage in zip(told, stages, strict=True):
        cost, sends = one["cost"], _send_seconds(stage, stages, cluster, parts)
        after = cost["gradients_exposed"] + cost["optimizer"]  # once per step, when the schedule is done
        own_times.append(cost["total"] + sends - after)
        costs.append(cost | {"send": sends, "communication": cost["communication"] + sends})
    even = own_times if any(own_times) else [1.0] * len(stages)  # nothing to compare
    slowest = costs[own_times.index(max(own_times))]
    busy = slowest["compute"] + slowest["communication"] + slowest["optimizer"]
    after = slowest["gradients_exposed"] + slowest["optimizer"]
    total = after + makespan(schedule, [time / (3 * parts) for time in own_times]) * (2 * parts // len(schedule[0]))
    parameters: dict[str, Any] = {}
    for stage, one in zip(stages, told, strict=True):
        for name, entry in one["parameters"].items():
            parameters[name] = entry | {"stages": list(stage.holders.get(name, (stage.number,)))}
    return plan.to_json() | {
        "operators": [
            operator | {"stage": stage.number}
            for stage, one in zip(stages, told, strict=True)
            for operator in one["operators"]
        ],
        "parameters": parameters,
        "cost": slowest | {"waiting": total - busy, "total": total},
        "communication": {kind: max(own.get(kind, 0) for own in sent) for own in sent for kind in own},
        "memory": max(memories, key=lambda one: one["peak"]),
        "unsliced": [where for one in told for where in one["unsliced"]],
        "pipeline": {
            "stages": len(stages),
            "micro_batches": len(schedule[0]) // 2,
            "operators": [len(stage.graph.operators) for stage in stages],
            "communication": sent,
            "memory": memories,
            "bubble": bubble(schedule, even),
        },
    }


def _send_seconds(stage: Stage, stages: Sequence[Stage], cluster: Cluster, parts: int) -> float:
    """Seconds per step in which a rank of `stage` sends values on and gradients back. Stage 0 has the first ranks."""
    ranks = stage.plan.mesh.size
    first, seconds = stage.number * ranks, 0.0
    for count, peer in zip(_sent(stage, stages), (stage.number + 1, stage.number - 1), strict=True):
        if count:
            link = cluster.between(first, peer * ranks, SEND)
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


def _between(stage: Stage, stages: Sequence[Stage], parts: int) -> dict[str, int]:
    """Bytes per step that a rank of `stage` sends to other stages, by collective."""
    graph, mesh = stage.graph, stage.plan.mesh
    found = {SEND: parts * sum(_sent(stage, stages)), ALL_REDUCE: 0, BROADCAST: 0}
    if stage.number == len(stages) - 1:
        found[BROADCAST] = 8  # the loss, a double
    for source in graph.sources:
        if source.name in stage.holders and source.id not in stage.receives:
            n, item_bytes = len(stage.holders[source.name]), max(source.spec.item_bytes, 4)  # added in fp32
            elements = math.prod(stage.plan.tensors[source.name].local_shape(source.spec.shape, mesh))
            found[ALL_REDUCE] += -(-2 * (n - 1) * elements // n) * item_bytes
    return {kind: count for kind, count in found.items() if count}
