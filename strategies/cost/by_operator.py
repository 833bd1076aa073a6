"""What each operator of a plan costs one rank per step: seconds of compute, of redistributions and of reducing its
parameters' gradients, bytes sent and bytes of memory.

A redistribution belongs to the operator that asks for it, a parameter to its first user. Invariant: nothing is counted
twice, and the seconds of computing and of gradients add up to those of the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, fields

from strategies.core.graph import OperatorGraph, Ref, Source
from strategies.core.mesh import Mesh
from strategies.core.plan import Plan
from strategies.core.program import Program
from strategies.core.steps import ALL_GATHER, ALL_REDUCE, LOCAL, REDUCE_SCATTER, ReshardingPath
from strategies.cost.cluster import Cluster
from strategies.cost.collectives import collective_seconds, step_seconds
from strategies.cost.roofline import forward_pace, operator_work, result_dtype, shares
from strategies.cost.step import StepCost, is_recomputed
from strategies.optimizer.buckets import BUCKET_BYTES
from strategies.optimizer.settings import OptimizerSettings
from strategies.rules import rule_of

GRADIENTS = {
    0: (ALL_REDUCE,),
    1: (ALL_REDUCE, ALL_GATHER),
    2: (REDUCE_SCATTER, ALL_GATHER),
    3: (REDUCE_SCATTER, ALL_GATHER, ALL_GATHER),
}
"""The collectives that a replicated parameter causes per step, by ZeRO stage: its gradient is added, and the parts that
ranks own or have updated are gathered."""


@dataclass(frozen=True)
class OperatorCost:
    """Seconds and bytes of one rank per step.

    Attributes:
        forward: Seconds of compute.
        backward: Seconds of compute, including recompute.
        communication: Seconds of redistributions without overlap.
        gradients: Seconds of reducing gradients and gathering parameters, as far as backward does not hide them.
        sent: Bytes of communication.
        parameters: Bytes of the parameters that it is the first to use.
        results: Bytes of its results.
        flops: Of the unsliced operator, forward, for one micro-batch.
        flop_bound: Whether flops, not bytes, are the bottleneck of forward.
        calls: The part of `forward` and `backward` that kernel launches take.
        levels: Seconds of communication by the slowest level of the cluster that they cross.
    """

    forward: float
    backward: float
    communication: float
    gradients: float
    sent: int
    parameters: int
    results: int
    flops: float
    flop_bound: bool
    calls: float
    levels: Mapping[str, float]

    def __add__(self, other: OperatorCost) -> OperatorCost:
        """The sum over two batch splits of one operator, which share its parameters."""
        summed = {one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(self)[:-1]}
        levels = {
            key: self.levels.get(key, 0.0) + other.levels.get(key, 0.0) for key in {**self.levels, **other.levels}
        }
        shared = {"parameters": max(self.parameters, other.parameters), "flop_bound": self.flop_bound}
        return OperatorCost(**{**summed, **shared}, levels=levels)


def operator_costs(
    graph: OperatorGraph,
    plan: Plan,
    program: Program,
    cluster: Cluster,
    settings: OptimizerSettings,
    step: StepCost,
    served: Set[str] = frozenset(),
) -> dict[str, OperatorCost]:
    """The cost of every operator by its plan name, of a step with these `settings` that costs `step`; `program` is
    `plan` lowered. Bytes sent to and by the parameter servers of those named `served` are not divided among
    operators."""
    zero_stage, accumulate = settings.stage, settings.accumulate
    communication, owned = _Communication(plan, program, cluster, accumulate), _first_users(graph)
    reduced = {name: [one for one in found if one.name not in served] for name, found in owned.items()}
    gradients = communication.gradients(graph, reduced, zero_stage, step.exposed + sum(step.zero.values()))
    costs = {}
    for operator in graph.operators:
        sharding, assignment = rule_of(operator, graph), plan.operators[operator.name].assignment
        work = operator_work(sharding, assignment, operator, graph, plan.mesh, cluster)
        parameters = 0
        for source in owned.get(operator.name, ()):
            replicas = plan.mesh.product(plan.tensors[source.name].replica_axes(plan.mesh))
            parameters += plan.local_bytes(source) // (replicas if zero_stage == 3 else 1)
        layouts = plan.operators[operator.name].outputs or sharding.result_layouts(assignment)
        results = sum(
            layout.local_elements(spec.shape, plan.mesh) * spec.item_bytes
            for layout, spec in zip(layouts, operator.results, strict=True)
        )
        flops = sharding.flops * math.prod(shares(sharding, assignment, plan.mesh).values())
        twice = plan.recompute is not None and is_recomputed(operator, plan.recompute)
        recomputed = work.forward if twice else 0.0
        pace = forward_pace(operator, cluster)
        costs[operator.name] = OperatorCost(
            accumulate * work.forward,
            accumulate * (work.backward + recomputed),
            communication.seconds.get(operator.name, 0.0),
            gradients.get(operator.name, 0.0),
            communication.sent.get(operator.name, 0),
            parameters,
            results,
            sharding.flops,
            pace.factor * flops / cluster.peak(result_dtype(operator)) + pace.call >= 0.999 * work.forward > 0,
            accumulate * (work.calls + (pace.call if twice else 0.0)),
            communication.levels.get(operator.name, {}),
        )
    return costs


class _Communication:
    """Seconds and bytes of communication, by operator."""

    def __init__(self, plan: Plan, program: Program, cluster: Cluster, accumulate: int) -> None:
        self.plan, self.program, self.mesh = plan, program, plan.mesh
        self.cluster, self.accumulate = cluster, accumulate
        self.seconds: dict[str, float] = {}
        self.sent: dict[str, int] = {}
        self.levels: dict[str, dict[str, float]] = {}
        for redistribution in program.redistributions:
            paths = (redistribution.forward, redistribution.backward)
            for path in paths if redistribution.differentiable else paths[:1]:
                self._add(redistribution.operator, path, redistribution.spec.item_bytes)

    def _add(self, operator: str, path: ReshardingPath, item_bytes: int) -> None:
        for step in path:
            seconds = self.accumulate * step_seconds(step, item_bytes, self.mesh, self.cluster)
            self.seconds[operator] = self.seconds.get(operator, 0.0) + seconds
            if step.kind not in LOCAL:
                sent = self.accumulate * step.busiest(self.mesh) * item_bytes
                self.sent[operator] = self.sent.get(operator, 0) + sent
                self._cross(operator, step.axes, seconds)

    def gradients(
        self, graph: OperatorGraph, owned: Mapping[str, list[Source]], zero_stage: int, total: float
    ) -> dict[str, float]:
        """The seconds `total` divided among the operators by what their parameters would take alone."""
        alone: dict[str, float] = {}
        crossed: list[tuple[str, tuple[str, ...], float]] = []
        for operator in graph.operators:
            for source in owned.get(operator.name, ()):
                replicas = self.plan.tensors[source.name].replica_axes(self.mesh)
                axes = replicas if zero_stage else self.program.reductions.get(source.name, ())
                ranks, size = self.mesh.product(axes), self.plan.local_bytes(source)
                for kind in GRADIENTS[zero_stage] if ranks > 1 and source.trainable else ():
                    sent = -(-(2 if kind == ALL_REDUCE else 1) * size * (ranks - 1) // ranks)
                    self.sent[operator.name] = self.sent.get(operator.name, 0) + sent
                    seconds = marginal_seconds(kind, sent, axes, self.mesh, self.cluster)
                    alone[operator.name] = alone.get(operator.name, 0.0) + seconds
                    crossed.append((operator.name, axes, seconds))
        together = sum(alone.values())
        scale = total / together if together else 0.0  # 0 where no parameter has replicas: only the norm is added
        for name, axes, seconds in crossed:
            self._cross(name, axes, scale * seconds)
        return {name: scale * seconds for name, seconds in alone.items()}

    def _cross(self, operator: str, axes: tuple[str, ...], seconds: float) -> None:
        spread = self.cluster.spread(self.mesh, axes)
        for level, peers in zip(self.cluster.levels, spread, strict=True):
            if peers > 1:
                levels = self.levels.setdefault(operator, {})
                levels[level.name] = levels.get(level.name, 0.0) + seconds
                return


def marginal_seconds(kind: str, sent: float, axes: tuple[str, ...], mesh: Mesh, cluster: Cluster) -> float:
    """Seconds that `sent` bytes add to a collective that carries many tensors."""
    larger, smaller = (
        collective_seconds(kind, size, axes, mesh, cluster) for size in (BUCKET_BYTES + sent, BUCKET_BYTES)
    )
    return larger - smaller


def _first_users(graph: OperatorGraph) -> dict[str, list[Source]]:
    """The parameters that an operator is the first to use."""
    owned: dict[str, list[Source]] = {}
    for source in graph.of_kind("parameter"):
        users = graph.users[Ref(source.id)]  # in the order of the graph
        if users:
            owned.setdefault(users[0][0].name, []).append(source)
    return owned
