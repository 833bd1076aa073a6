"""What each operator of a plan costs one rank per step: seconds of computing, of redistributions and of adding its
parameters' gradients, bytes sent and bytes held.

A redistribution belongs to the operator that asks for it, a parameter to its first user. Invariant: nothing is counted
twice, and the seconds of computing and of gradients add up to those of the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from strategies.core.graph import Operator, OperatorGraph, Ref, Source
from strategies.core.mesh import Mesh
from strategies.core.plan import Plan
from strategies.core.program import Program
from strategies.core.steps import ALL_GATHER, ALL_REDUCE, LOCAL, REDUCE_SCATTER, ReshardingPath
from strategies.cost.cluster import Cluster
from strategies.cost.collectives import collective_seconds, path_seconds
from strategies.cost.roofline import operator_work, shares
from strategies.cost.step import repeated, step_cost
from strategies.optimizer.buckets import LARGEST
from strategies.optimizer.settings import OptimizerSettings
from strategies.rules import rule_of
from strategies.rules.traits import traits

GRADIENTS = {
    0: (ALL_REDUCE,),
    1: (ALL_REDUCE, ALL_GATHER),
    2: (REDUCE_SCATTER, ALL_GATHER),
    3: (REDUCE_SCATTER, ALL_GATHER, ALL_GATHER),
}
"""The collectives that a replicated parameter causes per step, by ZeRO stage: its gradient is added, and what ranks
hold or have updated by parts is gathered."""


@dataclass(frozen=True)
class OperatorCost:
    """Seconds and bytes of one rank per step. `backward` holds what is computed again, `gradients` the operator's share
    of what is added or gathered for parameters and not hidden behind backward. `flops` are those of the whole operator,
    forward, for one micro-batch; `flop_bound` says whether computing takes as long as its flops ask for, and `calls` is
    the part of `forward` and `backward` that it takes to begin. `levels` are the seconds of communication by the
    slowest level that they cross."""

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
        """Of two copies of one operator, which have its parameters together."""
        return OperatorCost(
            self.forward + other.forward,
            self.backward + other.backward,
            self.communication + other.communication,
            self.gradients + other.gradients,
            self.sent + other.sent,
            max(self.parameters, other.parameters),
            self.results + other.results,
            self.flops + other.flops,
            self.flop_bound,
            self.calls + other.calls,
            {key: self.levels.get(key, 0.0) + other.levels.get(key, 0.0) for key in {**self.levels, **other.levels}},
        )


def operator_costs(
    graph: OperatorGraph, plan: Plan, program: Program, cluster: Cluster, settings: OptimizerSettings
) -> dict[str, OperatorCost]:
    """The costs by plan name, of a step that goes on as `settings` says."""
    zero_stage, accumulate = settings.stage, settings.accumulate
    step = step_cost(graph, plan, program, cluster, settings)
    found, owned = _Communication(plan, program, cluster, accumulate), _first_users(graph)
    gradients = found.gradients(graph, owned, zero_stage, step.exposed + sum(step.zero.values()))
    costs = {}
    for operator in graph.operators:
        sharding, assignment = rule_of(operator, graph), plan.operators[operator.name].assignment
        work = operator_work(sharding, assignment, operator, graph, plan.mesh, cluster)
        held = 0
        for source in owned.get(operator.name, ()):
            replicas = plan.tensors[source.name].replica_axes(plan.mesh)
            held += _slice_bytes(source, plan) // (plan.mesh.product(replicas) if zero_stage == 3 else 1)
        layouts = plan.operators[operator.name].outputs or sharding.result_layouts(assignment)
        results = sum(
            math.prod(layout.local_shape(spec.shape, plan.mesh)) * spec.item_bytes
            for layout, spec in zip(layouts, operator.results, strict=True)
        )
        flops = sharding.flops * math.prod(shares(sharding, assignment, plan.mesh).values())
        dtype = next((spec.dtype for spec in operator.results if spec.floating), "float32")
        twice = plan.recompute is not None and repeated(operator, plan.recompute)
        again = work.forward if twice else 0.0
        begun = cluster.view if traits(operator.op).view else cluster.launch
        costs[operator.name] = OperatorCost(
            accumulate * work.forward,
            accumulate * (work.backward + again),
            found.seconds.get(operator.name, 0.0),
            gradients.get(operator.name, 0.0),
            found.sent.get(operator.name, 0),
            held,
            results,
            sharding.flops,
            flops / cluster.peak(dtype) + cluster.launch >= 0.999 * work.forward > 0,
            accumulate * (work.calls + (begun if twice else 0.0)),
            found.levels.get(operator.name, {}),
        )
    return costs


class _Communication:
    """Seconds and bytes of what is sent, by operator."""

    def __init__(self, plan: Plan, program: Program, cluster: Cluster, accumulate: int) -> None:
        self.plan, self.program, self.mesh = plan, program, plan.mesh
        self.cluster, self.accumulate = cluster, accumulate
        self.seconds: dict[str, float] = {}
        self.sent: dict[str, int] = {}
        self.levels: dict[str, dict[str, float]] = {}
        for redistribution in program.redistributions:
            ways = (redistribution.forward, redistribution.backward)
            for chain in ways if redistribution.differentiable else ways[:1]:
                self._add(redistribution.operator, chain, redistribution.spec.item_bytes)

    def _add(self, operator: str, chain: ReshardingPath, item_bytes: int) -> None:
        for step in chain:
            seconds = self.accumulate * path_seconds((step,), item_bytes, self.mesh, self.cluster)
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
                ranks, size = self.mesh.product(axes), _slice_bytes(source, self.plan)
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
    with_it, without = (collective_seconds(kind, size, axes, mesh, cluster) for size in (LARGEST + sent, LARGEST))
    return with_it - without


def _slice_bytes(source: Source, plan: Plan) -> int:
    """Of a rank's slice of a parameter."""
    return math.prod(plan.tensors[source.name].local_shape(source.spec.shape, plan.mesh)) * source.spec.item_bytes


def _first_users(graph: OperatorGraph) -> dict[str, list[Source]]:
    """The parameters that an operator is the first to use."""
    found: dict[str, list[Source]] = {}
    order: Mapping[str, int] = {operator.id: number for number, operator in enumerate(graph.operators)}
    for source in graph.of_kind("parameter"):
        users: list[Operator] = sorted(
            (user for user, _ in graph.users[Ref(source.id)]), key=lambda user: order[user.id]
        )
        if users:
            found.setdefault(users[0].name, []).append(source)
    return found
