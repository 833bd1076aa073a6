"""A first price of a plan: work over a flop rate, bytes over a bandwidth, calls times a latency; bytes of memory by
part.

The machine's constants are rough on purpose: they order plans, and are not a promise of seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from strategies.engine.program import Program
from strategies.graph import OperatorGraph, Ref
from strategies.layout import Layout
from strategies.plan import Plan
from strategies.rules import rule_of


@dataclass(frozen=True)
class Machine:
    """Per rank: flops per second, bytes per second between ranks, seconds per collective call."""

    flops: float
    bandwidth: float
    latency: float


LAPTOP = Machine(flops=5e9, bandwidth=1e9, latency=4e-3)
"""One core of a laptop and gloo: 3-5 ms per call up to 1 MiB, 22 ms for 16 MiB (measured, four ranks)."""
GPU = Machine(flops=3e14, bandwidth=2e11, latency=2e-5)
"""One H100-class GPU on NVLink at achievable rates."""


def work(graph: OperatorGraph, plan: Plan) -> dict[str, float]:
    """Flops of each operator's slice in forward, by name."""
    found = {}
    for operator in graph.operators:
        sharding = rule_of(operator, graph)
        used = plan.mesh.product(sharding.used(plan.operators[operator.name].assignment))
        found[operator.name] = sharding.flops / used
    return found


def seconds(
    graph: OperatorGraph, plan: Plan, program: Program, sent: Mapping[str, int], machine: Machine, accumulate: int = 1
) -> dict[str, float]:
    """Seconds per training step of `accumulate` micro-batches, by part. Backward counts twice the work of forward."""
    calls = accumulate * program.calls.total()
    compute, communication = (
        accumulate * 3 * sum(work(graph, plan).values()) / machine.flops,
        calls * machine.latency + sum(sent.values()) / machine.bandwidth,
    )
    return {"compute": compute, "communication": communication, "total": compute + communication}


def memory(
    graph: OperatorGraph, plan: Plan, program: Program, *, stage: int, states: float, activations: int | None = None
) -> dict[str, int]:
    """Bytes per rank by part: parameters, gradients, optimizer states (ZeRO-aware) and the activations that backward
    may need.

    `states` are the optimizer's states per parameter element; `activations` are counted bytes, None for all results.
    """
    parts = {"parameters": 0, "gradients": 0, "optimizer": 0}
    for source in graph.of_kind("parameter"):
        layout = plan.tensors[source.name]
        local = math.prod(layout.local_shape(source.spec.shape, plan.mesh)) * source.spec.item_bytes
        replicas = plan.mesh.product(layout.replica_axes(plan.mesh))
        parts["parameters"] += local // (replicas if stage == 3 else 1)
        if source.trainable:
            parts["gradients"] += local // (replicas if stage >= 2 else 1)
            parts["optimizer"] += int(local * states) // (replicas if stage >= 1 else 1)
    if activations is None:
        activations = sum(
            _bytes(graph, plan, operator.id, index)
            for operator in graph.operators
            for index in range(len(operator.results))
        )
    parts["activations"] = activations
    return parts | {"total": sum(parts.values())}


def _bytes(graph: OperatorGraph, plan: Plan, id: str, index: int) -> int:
    operator = graph.by_id[id]
    spec = graph.specs[Ref(id, index)]
    chosen = plan.operators[operator.name]
    layout: Layout = (chosen.outputs or rule_of(operator, graph).result_layouts(chosen.assignment))[index]  # type: ignore[arg-type]
    return math.prod(layout.local_shape(spec.shape, plan.mesh)) * spec.item_bytes
