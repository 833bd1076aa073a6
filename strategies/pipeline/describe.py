"""What the plan of a pipeline means, told: the entries of plan.json with the stage of every operator, predicted bytes,
memory and time.

Bytes and memory are those of the busiest rank: by collective and in total the largest over the groups of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from strategies.cost.estimate import Machine, memory
from strategies.describe import describe
from strategies.engine.peers import BROADCAST, SEND
from strategies.engine.program import Program
from strategies.layout import Layout
from strategies.pipeline.cutting import Stage
from strategies.pipeline.schedule import Action, Schedule, bubble, held, makespan
from strategies.plan import Plan
from strategies.redistribution import ALL_REDUCE


def describe_stages(
    plan: Plan,
    stages: Sequence[Stage],
    programs: Sequence[Program],
    schedule: Schedule,
    *,
    states: float,
    machine: Machine,
    accumulate: int = 1,
    zero: int = 0,
    device: str = "cpu",
) -> dict[str, Any]:
    """The content of plan.json. `programs` are those of the stages, `accumulate` is how many times the schedule runs
    per step, `zero` the stage of ZeRO; the rest is as for `strategies.describe`."""
    groups = len(schedule)
    micro_batches = 1 + max(action.micro_batch for action in schedule[0])
    parts = accumulate * micro_batches
    told = [
        describe(
            stage.graph,
            stage.plan,
            program,
            stage=zero,
            states=states,
            machine=machine,
            accumulate=parts,
            device=device,
        )
        for stage, program in zip(stages, programs, strict=True)
    ]
    sent, memories = [], []
    for group, actions in enumerate(schedule):
        own: dict[str, int] = {}
        for number in range(group, len(stages), groups):
            between = _between(stages[number], stages, groups, parts, zero)
            for counts in (told[number]["communication"], between):
                for kind, count in counts.items():
                    own[kind] = own.get(kind, 0) + count
        sent.append(own)
        memories.append(_memory(group, stages, programs, told, actions, groups, zero=zero, states=states))
    times = [one["cost"]["total"] for one in told]
    even = times if any(times) else [1.0] * len(stages)  # nothing to compare
    busy = [
        {part: sum(one["cost"][part] for one in told[group::groups]) for part in told[0]["cost"]}
        for group in range(groups)
    ]
    slowest = max(busy, key=lambda one: one["total"])
    total = makespan(schedule, [time / (3 * parts) for time in times]) * accumulate
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
        "cost": slowest | {"waiting": total - slowest["total"], "total": total},
        "communication": {kind: max(own.get(kind, 0) for own in sent) for own in sent for kind in own},
        "memory": max(memories, key=lambda memory: memory["total"]),
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


def _memory(
    group: int,
    stages: Sequence[Stage],
    programs: Sequence[Program],
    told: Sequence[Mapping[str, Any]],
    actions: Sequence[Action],
    groups: int,
    *,
    zero: int,
    states: float,
) -> dict[str, int]:
    """Bytes per rank of a group by part: a parameter of several of its stages counts once, activations as often as the
    schedule holds them."""
    total = {"parameters": 0, "gradients": 0, "optimizer": 0}
    seen: set[str] = set()
    for number in range(group, len(stages), groups):
        graph = stages[number].graph
        fresh = replace(graph, sources=tuple(source for source in graph.sources if source.name not in seen))
        seen |= {source.name for source in graph.sources}
        own = memory(fresh, stages[number].plan, programs[number], stage=zero, states=states, activations=0)
        total = {part: count + own[part] for part, count in total.items()}
    activations = int(held(actions, [one["memory"]["activations"] for one in told]))
    return total | {"activations": activations, "total": sum(total.values()) + activations}


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


def _between(stage: Stage, stages: Sequence[Stage], groups: int, parts: int, zero: int) -> dict[str, int]:
    """Bytes per step that a rank sends to other groups for `stage`, by collective."""
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
            held = stage.holders[source.name]
            n, first = len({number % groups for number in held}), held[0] == stage.number
            if n == 1 or stage.number != min(k for k in held if k % groups == stage.number % groups):
                continue  # nobody else has it, or another stage of the same ranks is counted
            elements = size(stage.plan.tensors[source.name], source.spec.shape, 1)
            found[ALL_REDUCE] += -(-2 * (n - 1) * elements // n) * max(source.spec.item_bytes, 4)  # added in fp32
            if zero and first:
                found[BROADCAST] += elements * source.spec.item_bytes
    return {kind: count for kind, count in found.items() if count}
