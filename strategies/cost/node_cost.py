"""Seconds that an operator or a parameter takes whatever its neighbours do: collectives of local programs, and the
update of parameters.

The communication of a local program is found by emitting it, so it is what the engine runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from strategies.core.graph import Operator, TensorSpec
from strategies.core.layout import Layout
from strategies.core.program import Cooperate, Instruction, LoweringOptions, Redistribute
from strategies.core.steps import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from strategies.cost.cluster import Cluster
from strategies.cost.collectives import collective_seconds, path_seconds
from strategies.cost.exposed_communication import cooperation_stages
from strategies.cost.problem import Problem
from strategies.cost.roofline import operator_work
from strategies.cost.step import MASTER, WORK
from strategies.lowering.lowering import local_instructions
from strategies.optimizer.buckets import BUCKET_BYTES
from strategies.optimizer.sharding import usual_limit
from strategies.rules.sharding import Assignment, Sharding


@dataclass(frozen=True)
class NodeCost:
    """Seconds of the nodes of one problem on one cluster."""

    problem: Problem
    cluster: Cluster
    _communicates: dict[int, bool] = field(default_factory=dict, init=False)

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of all parameters."""
        trained = [source.spec for source in self.problem.graph.sources if source.trainable]
        return sum(spec.elements * max(spec.item_bytes, MASTER) for spec in trained)

    @cached_property
    def bucket(self) -> int:
        """Bytes of a bucket of gradients."""
        return min(self.gradient_bytes, BUCKET_BYTES)

    @cached_property
    def largest_call(self) -> int:
        """Bytes of a call for gradients at most, where the problem is relaxed."""
        assert self.problem.relaxation is not None
        single = [s.spec.elements * max(s.spec.item_bytes, MASTER) for s in self.problem.graph.sources if s.trainable]
        limit = self.problem.relaxation.bucket
        bucket = self.bucket if limit is None else limit or self.gradient_bytes
        return max(bucket, *single) if self.problem.stage == 0 else self.gradient_bytes

    def parameter_seconds(self, layout: Layout, spec: TensorSpec) -> float:
        """Seconds of the update of a trained parameter, for one micro-batch.

        They are those of reducing its gradient, as part of a bucket, over the axes over which `layout` is partial, as
        far as backward does not hide it, and of the optimizer's own work, as `strategies.cost.step.optimizer_seconds`
        counts it. ZeRO copies every gradient of a micro-batch; stage 2 reduces it too, and stage 3 gathers the
        parameter. Backward hides what our own ZeRO reduces as it does at stage 0, and compute hides what it gathers.
        """
        problem, mesh, relaxation = self.problem, self.problem.mesh, self.problem.relaxation
        cluster = self.cluster if relaxation is None else relaxation.cluster
        elements, width = layout.local_elements(spec.shape, mesh), max(spec.item_bytes, MASTER)
        work = elements * width / MASTER * problem.optimizer_bytes / cluster.memory_bandwidth / problem.micro_batches
        axes = mesh.sorted(layout.partial if problem.stage == 0 else layout.replica_axes(mesh))
        ranks, native = mesh.product(axes), problem.stage > 0 and problem.engine == "native"
        if problem.stage:
            copies = WORK[problem.engine].copies
            work = work / ranks + elements * width * copies / cluster.memory_bandwidth
        if ranks == 1 or not elements:
            return work

        def seconds(kind: str, item_bytes: int) -> float:
            """ZeRO sends all at once, but for what stage 3 gathers unit by unit, and our own by buckets."""
            at_once = problem.stage and (problem.stage < 3 or kind == REDUCE_SCATTER)
            call = self.gradient_bytes if at_once else self.bucket
            call = min(usual_limit(self.gradient_bytes, problem.stage), self.gradient_bytes) if native else call
            call = call if relaxation is None else self.largest_call
            sent = call * (2 if kind == ALL_REDUCE else 1) * (ranks - 1) / ranks
            return collective_seconds(kind, sent, axes, mesh, cluster) * elements * item_bytes / call

        exposed = 1 - cluster.overlap * bool(problem.hiding) if relaxation is None else relaxation.reduction
        if problem.stage == 0:
            return work + exposed * seconds(ALL_REDUCE, width) / problem.micro_batches
        if problem.stage == 3:
            kept = usual_limit(self.gradient_bytes, 3) / self.gradient_bytes if native else 0.0  # our own last bucket
            # what stays until backward is not gathered again; what stays complete, once per step
            gathers = 2 - min(kept, 1.0) if relaxation is None else 1 / problem.micro_batches
            gathers *= 1 - cluster.overlap * native
            return work + gathers * seconds(ALL_GATHER, spec.item_bytes) + exposed * seconds(REDUCE_SCATTER, width)
        added = seconds(REDUCE_SCATTER, width) if native else seconds(ALL_REDUCE, MASTER)
        reduced = added / (problem.micro_batches if problem.stage == 1 else 1)
        return work + exposed * reduced + seconds(ALL_GATHER, spec.item_bytes) / problem.micro_batches

    def communicates(self, operator: Operator, sharding: Sharding) -> bool:
        """Whether the rule's local program communicates where some factor is sliced."""
        key = self.problem.graph.looks[operator.id]
        if sharding.local is not None and key not in self._communicates:
            sizes = self.problem.mesh.sizes
            sliced = [
                {factor: (axis,)}
                for factor, size in sharding.sizes.items()
                for axis in [next((axis for axis in sizes if size % sizes[axis] == 0), None)]
                if axis is not None
            ]
            self._communicates[key] = any(self._carrying(operator, sharding, one) for one in sliced)
        return self._communicates.get(key, False)

    def local_communication(self, operator: Operator, sharding: Sharding, assignment: Assignment) -> float:
        """Seconds of the collectives of the local program, as far as it does not compute beside them itself."""
        mesh, cluster, relaxation = self.problem.mesh, self.cluster, self.problem.relaxation
        if relaxation is not None and relaxation.resharded is not None:
            return 0.0  # its calls may run beside those that have a cost
        total, trained = 0.0, operator.id in self.problem.graph.returning
        for one in self._carrying(operator, sharding, assignment):
            if isinstance(one, Cooperate):
                work_on = cluster if relaxation is None else relaxation.cluster
                work = operator_work(sharding, assignment, operator, self.problem.graph, mesh, work_on)
                for backward in (False, True)[: 1 + trained]:
                    seconds = work.backward if backward else work.forward
                    total += sum(added for _, added in cooperation_stages(one, seconds, backward, mesh, cluster))
                continue
            total += path_seconds(one.forward, one.spec.item_bytes, mesh, cluster)
            if one.differentiable and trained:
                total += path_seconds(one.backward, one.spec.item_bytes, mesh, cluster)
        return total

    def _carrying(
        self, operator: Operator, sharding: Sharding, assignment: Assignment
    ) -> list[Redistribute | Cooperate]:
        every = self.local_instructions(operator, sharding, assignment)
        return [one for one in every if isinstance(one, Redistribute | Cooperate)]

    def local_instructions(self, operator: Operator, sharding: Sharding, assignment: Assignment) -> list[Instruction]:
        """The local program of an operator, empty where its rule has none."""
        problem = self.problem
        options = LoweringOptions(ring=problem.ring)
        return local_instructions(operator, sharding, assignment, problem.graph, problem.mesh, options)
