"""Seconds that an operator or a parameter takes whatever its neighbours do: collectives of local programs, and the
update of parameters.

Invariant: what a local program sends is found by emitting it, so it is what the engine will run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from strategies.core.graph import Operator, OperatorGraph, Ref, TensorSpec
from strategies.core.layout import Layout
from strategies.core.plan import OperatorPlan
from strategies.core.program import DEFAULT_OPTIONS, Instruction, LoweringOptions, Redistribute
from strategies.core.steps import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from strategies.cost.cluster import Cluster
from strategies.cost.collectives import collective_seconds, path_seconds
from strategies.cost.exposed_communication import main_calls
from strategies.cost.step import MASTER, ZERO_COPIES
from strategies.lowering.emitter import Emitter
from strategies.optimizer.buckets import LARGEST, PARTS, SMALLEST
from strategies.rules.sharding import Assignment, Sharding
from strategies.search.problem import Problem


@dataclass(frozen=True)
class Own:
    """Such seconds of one problem on one cluster."""

    problem: Problem
    cluster: Cluster

    @cached_property
    def learned(self) -> int:
        """Bytes of all gradients."""
        learned = [source.spec for source in self.problem.graph.sources if source.trainable]
        return sum(spec.elements * max(spec.item_bytes, MASTER) for spec in learned)

    @cached_property
    def bucket(self) -> int:
        """Bytes of a bucket of gradients."""
        return min(max(self.learned // PARTS, SMALLEST), LARGEST)

    @cached_property
    def largest(self) -> int:
        """Bytes of a call for gradients at most, where there is a bound."""
        sure = self.problem.sure
        assert sure is not None
        alone = [s.spec.elements * max(s.spec.item_bytes, MASTER) for s in self.problem.graph.sources if s.trainable]
        bucket = self.bucket if sure.bucket is None else sure.bucket or self.learned
        return max(bucket, *alone) if self.problem.stage == 0 else self.learned

    def parameter_seconds(self, layout: Layout, spec: TensorSpec) -> float:
        """Seconds of the update of a trained parameter, for one micro-batch: of adding its gradient, as part of a
        bucket, over the axes over which `layout` is partial, what backward does not hide; and of the optimizer's own
        work, as `strategies.cost.step.optimizer_seconds` counts it. ZeRO copies every gradient of a micro-batch; stage
        2 adds it too, and stage 3 gathers the parameter."""
        problem, mesh, sure = self.problem, self.problem.mesh, self.problem.sure
        cluster = self.cluster if sure is None else sure.cluster
        elements, wide = math.prod(layout.local_shape(spec.shape, mesh)), max(spec.item_bytes, MASTER)
        work = elements * wide / MASTER * problem.moved / cluster.memory_bandwidth / problem.turns
        axes = mesh.sorted(layout.partial if problem.stage == 0 else layout.replica_axes(mesh))
        ranks = mesh.product(axes)
        if problem.stage:
            work = work / ranks + elements * wide * ZERO_COPIES / cluster.memory_bandwidth
        if ranks == 1:
            return work

        def carried(kind: str, item_bytes: int) -> float:
            """ZeRO sends all at once, but for what stage 3 gathers unit by unit."""
            call = self.learned if problem.stage and (problem.stage < 3 or kind == REDUCE_SCATTER) else self.bucket
            call = call if sure is None else self.largest
            whole = call * (2 if kind == ALL_REDUCE else 1) * (ranks - 1) / ranks
            return collective_seconds(kind, whole, axes, mesh, cluster) * elements * item_bytes / call

        if problem.stage == 0:
            hidden = cluster.overlap if problem.overlaps else 0.0
            counted = 1 - hidden if sure is None else sure.adding
            return work + counted * carried(ALL_REDUCE, wide) / problem.turns
        if problem.stage == 3:
            gathers = 2 if sure is None else 1  # what is kept until backward is not gathered again
            return work + gathers * carried(ALL_GATHER, spec.item_bytes) + carried(REDUCE_SCATTER, MASTER)
        added = carried(ALL_REDUCE, MASTER) / (problem.turns if problem.stage == 1 else 1)
        return work + added + carried(ALL_GATHER, spec.item_bytes) / problem.turns

    def least_of_use(self, spec: TensorSpec, uses: int) -> float:
        """Seconds per element of a rank's slice of a trained parameter that one of its `uses` takes at least, wherever
        the parameter lies: a rank holds the element, and updates it for all of them, or receives it."""
        problem, cluster = self.problem, self.cluster
        touched = ZERO_COPIES if problem.stage else problem.moved / MASTER / problem.turns
        updated = touched * max(spec.item_bytes, MASTER) / cluster.memory_bandwidth / uses
        inside, rings, peers = 1, 0.0, 0.0
        for level in reversed(cluster.levels):
            fastest = max(link.bandwidth for link in (level.link, *level.kinds.values()))
            rings, peers = max(rings, fastest * inside), peers + fastest
            inside *= level.size
        return min(updated, spec.item_bytes / max(rings, peers))

    def talks(self, operator: Operator, sharding: Sharding) -> bool:
        """Whether the rule's local program communicates where some factor is sliced."""
        return bool(self.talking(operator, sharding))

    def talking(self, operator: Operator, sharding: Sharding) -> frozenset[str]:
        """The factors which, where they are sliced, make the rule's local program communicate."""
        found = set()
        for factor, size in sharding.sizes.items():
            axes = tuple(axis for axis in self.problem.mesh.names if size % self.problem.mesh.sizes[axis] == 0)[:1]
            if axes and self._emitted(operator, sharding, {factor: axes}):
                found.add(factor)
        return frozenset(found)

    def inside(self, operator: Operator, sharding: Sharding, assignment: Assignment) -> float:
        """Seconds of the collectives of the local program."""
        mesh, cluster = self.problem.mesh, self.cluster
        if self.problem.sure is not None and self.problem.sure.sent is not None:
            return 0.0  # its own calls may run beside them
        total = 0.0
        for one in self._emitted(operator, sharding, assignment):
            total += path_seconds(one.forward, one.spec.item_bytes, mesh, cluster)
            if one.differentiable and operator.id in self.problem.graph.returning:
                total += path_seconds(one.backward, one.spec.item_bytes, mesh, cluster)
        return total

    def waits(self, operator: Operator, ref: Ref) -> bool:
        """Whether what stands for all that an operator computes needs this operand, whatever it slices."""
        sharding = self.problem.shardings[operator.id]
        if sharding.local is None:
            return True
        mesh = self.problem.mesh
        single = [
            {factor: (axis,)}
            for axis in mesh.names[:1]
            for factor, size in sharding.sizes.items()
            if size % mesh.sizes[axis] == 0
        ]
        for assignment in ({}, *single):
            emitted, needing = self._instructions(operator, sharding, assignment), set[str]()
            main = next(iter(main_calls(emitted).values()), None)
            for one in emitted:
                if any(taken == ref or taken.id in needing for taken in one.operands):
                    needing.add(one.id)
            if main is not None and main.id not in needing:
                return False
        return True

    def _emitted(self, operator: Operator, sharding: Sharding, assignment: Assignment) -> list[Redistribute]:
        return [one for one in self._instructions(operator, sharding, assignment) if isinstance(one, Redistribute)]

    def _instructions(self, operator: Operator, sharding: Sharding, assignment: Assignment) -> list[Instruction]:
        assert sharding.local is not None
        rehearsal = _Rehearsal(self.problem.graph, self.problem.mesh)
        planned = OperatorPlan(assignment, "default")
        emitter = Emitter(rehearsal, operator, sharding, planned, operator.args, dict(operator.kwargs))
        sharding.local(operator, emitter)
        return rehearsal.instructions


@dataclass
class _Rehearsal:
    """The lowering of one operator alone."""

    graph: OperatorGraph
    mesh: Any
    options: LoweringOptions = DEFAULT_OPTIONS
    instructions: list[Instruction] = field(default_factory=list)

    def fresh(self, name: str) -> str:
        return f"{name}_{len(self.instructions)}"

    def ordinal(self, operator: Operator) -> int:
        return 0
