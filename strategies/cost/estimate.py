"""A first price of a plan: work over a flop rate, bytes over a bandwidth, calls times a latency.

The machine's constants are rough on purpose: they order plans, and are not a promise of seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from strategies.engine.program import Program, Redistribute
from strategies.engine.recompute import region_of
from strategies.graph import Operator, OperatorGraph
from strategies.plan import Plan
from strategies.recompute import around
from strategies.redistribution import LOCAL
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
    """Seconds per training step of `accumulate` micro-batches, by part. Backward counts twice the work of forward, and
    what it computes again once more."""
    work = again = 0.0
    for operator in graph.operators:
        sharding = rule_of(operator, graph)
        own = sharding.flops / plan.mesh.product(sharding.used(plan.operators[operator.name].assignment))
        work += own
        again += own * repeated(plan, operator)
    calls = accumulate * (program.calls.total() + calls_again(program))
    compute, communication = (
        accumulate * (3 * work + again) / machine.flops,
        calls * machine.latency + sum(sent.values()) / machine.bandwidth,
    )
    return {"compute": compute, "communication": communication, "total": compute + communication}


def repeated(plan: Plan, operator: Operator) -> bool:
    """Whether backward computes an operator again."""
    chosen = plan.recompute
    if chosen is None or operator.name in chosen.kept:
        return False
    return not set(chosen.modules).isdisjoint(around(operator))


def calls_again(program: Program) -> int:
    """How many collectives backward of a micro-batch calls again."""
    return sum(step.kind not in LOCAL for one in _again(program) for step in one.forward)


def sent_again(program: Program) -> Counter[str]:
    """Bytes that the busiest rank sends again in backward of a micro-batch, by collective."""
    found: Counter[str] = Counter()
    for one in _again(program):
        for step in one.forward:
            if step.kind not in LOCAL:
                found[step.kind] += step.busiest(program.mesh) * one.spec.item_bytes
    return found


def _again(program: Program) -> list[Redistribute]:
    """The redistributions that backward carries out again."""
    if program.recompute is None or program.recompute.keeps_communication:
        return []
    return [one for one in program.redistributions if region_of(one, program) is not None]
