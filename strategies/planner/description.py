"""What a plan means, told: the entries of plan.json, predicted bytes, memory and time. Derived from graph, plan and
program alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from typing import Any

from strategies.core.graph import Operator, OperatorGraph
from strategies.core.plan import Plan
from strategies.core.program import Program, Redistribute
from strategies.core.steps import ALL_REDUCE, LOCAL, Chain
from strategies.cost.cluster import Cluster
from strategies.cost.step import step_cost
from strategies.memory.parts import memory
from strategies.memory.trace import Traced, trace
from strategies.optimizer.buckets import predicted
from strategies.optimizer.settings import Updating
from strategies.optimizer.zero import traffic as zero_traffic
from strategies.rules import rule_of


def describe(
    graph: OperatorGraph,
    plan: Plan,
    program: Program,
    *,
    updating: Updating,
    cluster: Cluster,
    traced: Traced | None = None,
    in_step: tuple[OperatorGraph, Plan] | None = None,
) -> dict[str, Any]:
    """The content of plan.json; its seconds are those of `cluster`. `updating` is how a step goes on after backward;
    `traced` is `trace(program, updating)` if it is known; `in_step` is what a step computes for `graph` and `plan`,
    where that is several copies of them."""
    by_operator: dict[str, list[tuple[Redistribute, int]]] = {}
    for redistribution in program.redistributions:
        name, copy = program.copies.get(redistribution.operator, (redistribution.operator, 0))
        by_operator.setdefault(name, []).append((redistribution, copy))
    traced = trace(program, updating) if traced is None else traced
    sent = communication(program, updating, traced)
    return plan.to_json() | {
        "operators": [
            operator_entry(graph, plan, operator, by_operator.get(in_model(operator), []))
            for operator in told_operators(graph, plan)
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
            for source in graph.of_kind("parameter")
        },
        "cost": step_cost(*(in_step or (graph, plan)), program, cluster, updating).to_json(),
        "communication": sent,
        "memory": memory(traced, updating).told(),
        "recompute": None if plan.recompute is None else recompute_entry(plan, program, traced, updating),
        "unsliced": [o.where for o in graph.operators if not rule_of(o, graph).known],
    }


def recompute_entry(plan: Plan, program: Program, traced: Traced, updating: Updating) -> dict[str, Any]:
    """What is computed again, and the bytes that a rank stores for one micro-batch with and without that."""
    assert plan.recompute is not None
    without = trace(replace(program, recompute=None, replicas={}), updating)
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
    counts = [mesh.product(chosen.assignment.get(factor, ())) for factor in sharding.factors]
    used = mesh.product(sharding.used(chosen.assignment))
    return {
        "name": in_model(operator),
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
        "redistributions": [redistribution_entry(graph, plan, r) | {"copy": copy} for r, copy in redistributions],
    }


def told_operators(graph: OperatorGraph, plan: Plan) -> list[Operator]:
    """The operators of the model; of those that are there once per copy of the batch, the first copy's."""
    return [
        operator
        for operator in graph.operators
        if plan.operators[operator.name].origin != "copies" and (operator.share is None or not operator.share.index)
    ]


def in_model(operator: Operator) -> str:
    return operator.name if operator.share is None else operator.share.name


def redistribution_entry(graph: OperatorGraph, plan: Plan, redistribution: Redistribute) -> dict[str, Any]:
    """One redistribution: for which operand, its steps with the group of rank 0, and the bytes that the busiest
    rank sends."""
    return {
        "value": redistribution.value.id,
        "operand": redistribution.operand,
        "forward": steps(redistribution.forward, plan, redistribution.spec.item_bytes),
        "backward": steps(
            redistribution.backward if redistribution.differentiable else (), plan, redistribution.spec.item_bytes
        ),
    }


def steps(chain: Chain, plan: Plan, item_bytes: int) -> list[dict[str, Any]]:
    return [
        {
            "step": str(step),
            "collective": step.kind,
            "group": list(step.group(plan.mesh, 0)),
            "bytes": step.busiest(plan.mesh) * item_bytes,
        }
        for step in chain
    ]


def communication(program: Program, updating: Updating, traced: Traced | None = None) -> dict[str, int]:
    """Bytes that the busiest rank sends per training step, by collective: redistributions both ways once per
    micro-batch (and what recomputed modules send again, as it was `traced`), the loss, and gradients and weights as
    stage 0 or ZeRO sends them, without the norm."""
    total: Counter[str] = Counter()
    if traced is not None and program.recompute is not None:
        total.update({kind: updating.accumulate * count for kind, count in traced.sent.items()})
    for redistribution in program.redistributions if traced is None or program.recompute is None else ():
        chains = (
            (redistribution.forward, redistribution.backward)
            if redistribution.differentiable
            else (redistribution.forward,)
        )
        for chain in chains:
            for step in chain:
                if step.kind not in LOCAL:
                    size = step.busiest(program.mesh) * redistribution.spec.item_bytes
                    total[step.kind] += updating.accumulate * size
    if program.loss_axes:  # one double
        ranks = program.mesh.product(program.loss_axes)
        total[ALL_REDUCE] += 8 * -(-2 * (ranks - 1) // ranks)
    if updating.stage == 0:
        total.update(predicted(program, measure=False))
    else:
        groups = updating.groups_for(program)
        total.update(zero_traffic.predicted(program, updating.stage, updating.accumulate, groups))
    return dict(total)
