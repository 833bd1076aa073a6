"""Seconds of a training step by part: from the graph's operators, the program's collectives and a described machine.

Invariant: `total` is the sum of what nothing else hides: compute, communication, the exposed part of adding gradients,
ZeRO's collectives and the optimizer. Bytes are those that `strategies.describe.communication` predicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from strategies.cost.cluster import Cluster
from strategies.cost.collectives import chain_seconds, collective_seconds, step_seconds
from strategies.cost.operators import operator_work
from strategies.engine import zero_traffic
from strategies.engine.buckets import Bucket, buckets, sent
from strategies.engine.program import Fused, Program, Redistribute
from strategies.engine.updates import CHOSEN, Cut, learning, local_elements, parameters
from strategies.graph import ITEM_BYTES, Operator, OperatorGraph
from strategies.plan import Plan, Recompute
from strategies.redistribution import ALL_REDUCE, LOCAL
from strategies.rules import rule_of

MASTER = 4
"""Bytes of an element where the optimizer works: fp32, whatever the model's dtype."""


@dataclass(frozen=True)
class Training:
    """How a step trains beside its plan: ZeRO `stage`, the optimizer's `states` per parameter element, `accumulate`
    micro-batches, how gradients are `cut` into buckets and whether they are added while backward runs (`overlap`)."""

    stage: int = 0
    states: float = 2.0
    accumulate: int = 1
    cut: Cut = CHOSEN
    overlap: bool = True


@dataclass(frozen=True)
class StepCost:
    """Seconds of one rank. `forward`, `backward`, `recomputed` and `redistributions` (by collective) are of all
    micro-batches of a step; `gradients` is the whole time of adding them, `exposed` what backward does not hide."""

    forward: float
    backward: float
    recomputed: float
    redistributions: dict[str, float]
    gradients: float
    exposed: float
    zero: dict[str, float]
    optimizer: float

    @property
    def compute(self) -> float:
        return self.forward + self.backward + self.recomputed

    @property
    def communication(self) -> float:
        return sum(self.redistributions.values()) + self.exposed + sum(self.zero.values())

    @property
    def total(self) -> float:
        return self.compute + self.communication + self.optimizer

    def to_json(self) -> dict[str, float | dict[str, float]]:
        """What plan.json holds; `total` is `compute` + `communication` + `optimizer`."""
        return {
            "forward": self.forward,
            "backward": self.backward,
            "recomputed": self.recomputed,
            "compute": self.compute,
            "redistributions": self.redistributions,
            "gradients": self.gradients,
            "gradients_exposed": self.exposed,
            "zero": self.zero,
            "communication": self.communication,
            "optimizer": self.optimizer,
            "total": self.total,
        }


def step_cost(graph: OperatorGraph, plan: Plan, program: Program, cluster: Cluster, training: Training) -> StepCost:
    """What a step of `program`, which is `plan` lowered, costs on `cluster`. Raises StrategyError if the cluster has
    fewer devices than the plan."""
    mesh, parts = plan.mesh, training.accumulate
    forward = backward = again = 0.0
    for operator in graph.operators:
        assignment = plan.operators[operator.name].assignment
        work = operator_work(rule_of(operator, graph), assignment, operator, graph, mesh, cluster)
        forward, backward = forward + work.forward, backward + work.backward
        if plan.recompute is not None and repeated(operator, plan.recompute):
            again += work.forward
    redistributed: Counter[str] = Counter()
    for instruction in program.instructions:
        if isinstance(instruction, (Redistribute, Fused)):
            repeats = plan.recompute is not None and _inside(instruction.path, plan.recompute)
            for kind, seconds in _redistribution(instruction, program, cluster, repeats).items():
                redistributed[kind] += parts * seconds
    if program.loss_axes:
        ranks = mesh.product(program.loss_axes)
        redistributed[ALL_REDUCE] += collective_seconds(
            ALL_REDUCE, 8 * sent([1], ranks), program.loss_axes, mesh, cluster
        )
    gradients = exposed = 0.0
    if training.stage == 0:
        gradients, exposed = _gradients(buckets(program, training.cut), program, cluster, training, backward)
    return StepCost(
        parts * forward,
        parts * backward,
        parts * again,
        dict(redistributed),
        gradients,
        exposed,
        _zero(program, cluster, training),
        optimizer_seconds(program, cluster, training),
    )


def repeated(operator: Operator, recompute: Recompute) -> bool:
    """Whether backward computes `operator` again."""
    return _inside(operator.path, recompute) and operator.name not in recompute.kept


def _inside(path: tuple[str, ...], recompute: Recompute) -> bool:
    return any(".".join(path[: i + 1]) in recompute.modules for i in range(len(path)))


def _redistribution(
    instruction: Redistribute | Fused, program: Program, cluster: Cluster, repeats: bool
) -> Counter[str]:
    """Seconds by collective for one micro-batch; local steps count as copies. Calls of fused ones are made once."""
    parts = instruction.parts if isinstance(instruction, Fused) else (instruction,)
    recompute = program.recompute
    found: Counter[str] = Counter()
    ways = [[part.forward for part in parts]]
    if instruction.differentiable:
        ways.append([part.backward for part in parts])
    if repeats and recompute is not None and not recompute.keeps_communication:
        ways.append([part.forward for part in parts])
    for chains in ways:
        for steps in zip(*chains, strict=True):
            first, mesh = steps[0], program.mesh
            seconds = sum(
                step_seconds(step, part.spec.item_bytes, mesh, cluster) for step, part in zip(steps, parts, strict=True)
            )
            if len(steps) > 1 and first.kind not in LOCAL:
                sizes = [step.busiest(mesh) * part.spec.item_bytes for step, part in zip(steps, parts, strict=True)]
                seconds -= sum(collective_seconds(first.kind, size, first.axes, mesh, cluster) for size in sizes)
                seconds += collective_seconds(first.kind, sum(sizes), first.axes, mesh, cluster)
            found["copies" if first.kind in LOCAL else first.kind] += seconds
    return found


def _gradients(
    parts: Iterable[Bucket], program: Program, cluster: Cluster, training: Training, backward: float
) -> tuple[float, float]:
    """Seconds of adding all gradients, and how much of that backward of the last micro-batch does not hide: at least
    the last bucket, which is complete when backward ends."""
    times = [
        collective_seconds(
            ALL_REDUCE,
            sent([one.elements], program.mesh.product(one.axes)) * ITEM_BYTES[one.dtype],
            one.axes,
            program.mesh,
            cluster,
        )
        + 4 * one.elements * ITEM_BYTES[one.dtype] / cluster.memory_bandwidth * (len(one.names) > 1)
        for one in parts
    ]  # joined to one tensor and taken apart again
    total = sum(times)
    if not times or not training.overlap:
        return total, total
    return total, max(total - min(cluster.overlap * total, backward), times[-1])


def _zero(program: Program, cluster: Cluster, training: Training) -> dict[str, float]:
    """Seconds of what ZeRO sends, by collective."""
    found: Counter[str] = Counter()
    for call in zero_traffic.calls(program, training.stage, training.accumulate):
        seconds = collective_seconds(call.kind, call.bytes / call.count, call.axes, program.mesh, cluster)
        found[call.kind] += call.count * seconds
    return dict(found)


def optimizer_seconds(program: Program, cluster: Cluster, training: Training) -> float:
    """Seconds of the optimizer's own work: it reads gradient, parameter and states, and writes parameter and states."""
    moved, count, names = 0.0, 0, set(learning(program))
    for source in parameters(program):
        if source.name in names:
            replicas = program.mesh.product(program.layouts[source.id].replica_axes(program.mesh))
            elements = local_elements(program, source) / (replicas if training.stage else 1)
            moved += elements * max(MASTER, source.spec.item_bytes) * (3 + 2 * training.states)
            count += 1
    calls = count if training.stage == 0 else min(count, 1)
    return (
        moved / cluster.memory_bandwidth
        + cluster.launch * (calls > 0)
        + cluster.view * calls * (2 + 3 * training.states)
    )


__all__ = ["StepCost", "Training", "chain_seconds", "optimizer_seconds", "repeated", "step_cost"]
