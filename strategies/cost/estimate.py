"""A first price of a plan: work over a flop rate, bytes over a bandwidth, calls times a latency.

The machine's constants are rough on purpose: they order plans, and are not a promise of seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from strategies.engine.program import Program
from strategies.graph import OperatorGraph
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


def seconds(
    graph: OperatorGraph, plan: Plan, program: Program, sent: Mapping[str, int], machine: Machine, accumulate: int = 1
) -> dict[str, float]:
    """Seconds per training step of `accumulate` micro-batches, by part. Backward counts twice the work of forward."""
    work = 0.0
    for operator in graph.operators:
        sharding = rule_of(operator, graph)
        work += sharding.flops / plan.mesh.product(sharding.used(plan.operators[operator.name].assignment))
    calls = accumulate * program.calls.total()
    compute, communication = (
        accumulate * 3 * work / machine.flops,
        calls * machine.latency + sum(sent.values()) / machine.bandwidth,
    )
    return {"compute": compute, "communication": communication, "total": compute + communication}
