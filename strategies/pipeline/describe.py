"""What the plan of a pipeline means, told: the entries of plan.json with the stage of every operator, predicted bytes,
memory and time.

Bytes and memory are those of the busiest rank: by collective and in total the largest over the stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from strategies.cost.activations import trace
from strategies.cost.estimate import Machine
from strategies.cost.memory import memory, under_way
from strategies.cost.updating import Updating
from strategies.describe import describe
from strategies.engine.program import Program
from strategies.engine.stages import BROADCAST, SEND
from strategies.layout import Layout
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
    machine: Machine,
) -> dict[str, Any]:
    """The content of plan.json. `programs` are those of the stages; the rest is as for `strategies.describe`."""
    parts = updating.accumulate
    traces = [trace(program, updating) for program in programs]
    told = [
        describe(stage.graph, stage.plan, program, updating=updating, machine=machine, traced=traced)
        for stage, program, traced in zip(stages, programs, traces, strict=True)
    ]
    sent, memories = [], []
    for one, stage, traced, actions in zip(told, stages, traces, schedule, strict=True):
        own = dict(one["communication"])
        for kind, count in _between(stage, stages, parts).items():
            own[kind] = own.get(kind, 0) + count
        sent.append(own)
        memories.append(under_way(memory(traced, updating), held(actions)).told())
    times = [one["cost"]["total"] for one in told]
    even = times if any(times) else [1.0] * len(stages)  # nothing to compare
    slowest = told[times.index(max(times))]["cost"]
    total = makespan(schedule, [time / (3 * parts) for time in times]) * (2 * parts // len(schedule[0]))
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
        "cost": slowest | {"waiting": total - slowest["total"], "total": total},
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


def _between(stage: Stage, stages: Sequence[Stage], parts: int) -> dict[str, int]:
    """Bytes per step that a rank of `stage` sends to other stages, by collective."""
    graph, mesh = stage.graph, stage.plan.mesh

    def size(layout: Layout, shape: Sequence[int], item_bytes: int) -> int:
        return math.prod(layout.local_shape(shape, mesh)) * item_bytes

    found = {SEND: 0, ALL_REDUCE: 0, BROADCAST: 0}
    if stage.number == len(stages) - 1:
        found[BROADCAST] = 8  # the loss, a double
    else:
        for ref, layout in zip(graph.outputs, stage.sends, strict=True):
            found[SEND] += parts * size(layout, graph.specs[ref].shape, graph.specs[ref].item_bytes)
    for source in graph.sources:
        if source.id in stage.receives and source.trainable:
            found[SEND] += parts * size(stage.plan.inputs[source.name], source.spec.shape, source.spec.item_bytes)
        elif source.name in stage.holders:
            n, item_bytes = len(stage.holders[source.name]), max(source.spec.item_bytes, 4)  # added in fp32
            elements = size(stage.plan.tensors[source.name], source.spec.shape, 1)
            found[ALL_REDUCE] += -(-2 * (n - 1) * elements // n) * item_bytes
    return {kind: count for kind, count in found.items() if count}
