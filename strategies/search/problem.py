"""The input of every search, its node costs and memory estimates, and the result of a search.

`Problem` is the graph with its rules, the mesh and the fixed assignments. `NodeCost` has the seconds that an operator
or a parameter takes whatever its neighbours do: collectives of local programs, and the update of parameters. The
communication of a local program is found by emitting it, so it is what the engine runs. The memory estimate is
additive: bytes of parameters with their gradients and optimizer states, and of results that stay for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from strategies.core.errors import TooLarge
from strategies.core.graph import Operator, OperatorGraph, Ref, TensorSpec
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.program import Cooperate, Instruction, LoweringOptions, Redistribute
from strategies.core.steps import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from strategies.cost.cluster import Cluster
from strategies.cost.collectives import collective_seconds, path_seconds
from strategies.cost.exposed_communication import cooperation_stages
from strategies.cost.roofline import operator_work
from strategies.cost.step import MASTER, WORK
from strategies.cost.styled_modules import ModuleLayouts
from strategies.lowering.lowering import local_instructions
from strategies.memory.estimate import saved
from strategies.memory.parts import in_words
from strategies.optimizer.buckets import BUCKET_BYTES
from strategies.optimizer.sharding import usual_limit
from strategies.optimizer.updates import Engine
from strategies.rules.sharding import Assignment, Sharding

T = TypeVar("T")


@dataclass(frozen=True)
class Relaxation:
    """Costs below those of any plan as it runs; see `strategies.planner.step_certificate`.

    Attributes:
        cluster: what computing and gradient reductions take; resharding is on the cluster of the search.
        resharded: values whose resharding has a cost (None: all). Then what operators send themselves has none.
        free: operators (by id) that take no time.
        backward: share of the seconds of backward that counts.
        reduction: share of the seconds of gradient reductions that counts.
        bucket: bytes of a gradient call at most (None: as many as are chosen, 0: any number).
    """

    cluster: Cluster
    resharded: frozenset[Ref] | None
    free: frozenset[str]
    backward: float
    reduction: float
    bucket: int | None


@dataclass(frozen=True)
class Problem:
    """A graph on a mesh with its fixed and open assignments. Costs are those of one micro-batch, with its share of the
    work done once per step.

    Attributes:
        graph, mesh: the operators, and the axes over which they are sharded.
        shardings: the sharding rule of every operator, by id.
        inputs: layouts of the batch entries, by name.
        fixed: assignments of configured operators, by id.
        outputs: layouts in which configured operators hand on their results, by id.
        stage: of ZeRO.
        optimizer_state_factor: numbers that the optimizer keeps per parameter element.
        memory: bytes that a rank may keep (None: no limit).
        micro_batches: of a step.
        optimizer_bytes: read and written per parameter element; at least the weight, its gradient, and two states
            there and back.
        overlaps: whether gradients are reduced during backward.
        engine: of ZeRO stage 3.
        relaxation: costs of a lower bound instead of those of a plan.
        styled: where only layouts count that a trainer has which slices modules.
        ring: as in `LoweringOptions`.
    """

    graph: OperatorGraph
    mesh: Mesh
    shardings: Mapping[str, Sharding]
    inputs: Mapping[str, Layout]
    fixed: Mapping[str, Assignment]
    outputs: Mapping[str, tuple[Layout, ...]]
    stage: int = 0
    optimizer_state_factor: float = 2.0
    memory: float | None = None
    micro_batches: int = 1
    optimizer_bytes: float = 28.0
    overlaps: bool = True
    engine: Engine = "deepspeed"
    relaxation: Relaxation | None = None
    styled: ModuleLayouts | None = None
    ring: bool = False
    cache: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns; made by the first search that needs it, and kept for others."""
        if key not in self.cache:
            self.cache[key] = make()
        found: T = self.cache[key]
        return found

    def within(self, memory: float | None) -> Problem:
        """The same with another memory limit."""
        return self if memory == self.memory else replace(self, memory=memory)

    def resharding_counts(self, ref: Ref) -> bool:
        """Whether resharding a value has a cost."""
        return self.relaxation is None or self.relaxation.resharded is None or ref in self.relaxation.resharded

    @property
    def hiding(self) -> int:
        """The micro-batches of a step whose backward hides gradient reductions."""
        if not self.overlaps or (self.stage and self.engine != "native"):
            return 0
        return self.micro_batches if self.stage > 1 else 1

    @cached_property
    def stored(self) -> frozenset[Ref]:
        """The results that stay for backward."""
        return saved(self.graph)

    @cached_property
    def kinds(self) -> dict[str, Hashable]:
        """Per operator, by id, all that its candidates and their costs depend on."""
        return {
            one.id: (
                self.graph.looks[one.id],
                tuple(Ref(one.id, index) in self.stored for index in range(len(one.results))),
                None if (fixed := self.fixed.get(one.id)) is None else tuple(fixed.items()),
                self.outputs.get(one.id),
                self.relaxation and (self.resharding_counts(Ref(one.id)), one.id in self.relaxation.free),
                self.styled and self.styled.kind(one),
            )
            for one in self.graph.operators
        }

    def result_layout(self, ref: Ref, assignment: Assignment) -> Layout:
        """The layout in which an operator with this assignment hands on result `ref`."""
        if ref.id in self.outputs:
            return self.outputs[ref.id][ref.index]
        return self.shardings[ref.id].result_layouts(assignment)[ref.index]


@dataclass(frozen=True)
class Solution:
    """A plan that a search found.

    Attributes:
        assignments: by operator id.
        cost: seconds of a micro-batch, with its share of the work done once per step.
        bytes: memory estimate of a rank.
        lower_bound: seconds that any plan takes at least (0: unknown).
        tensors: layouts of parameters with several uses; others have the layout that their first use wants.
        multiplier: seconds per byte of the memory limit at which it was found.
    """

    assignments: Mapping[str, Assignment]
    cost: float
    bytes: float
    lower_bound: float = 0.0
    tensors: Mapping[Ref, Layout] = field(default_factory=dict)
    multiplier: float = 0.0

    @property
    def gap(self) -> float:
        """The optimality gap: how much cheaper, relative to the bound, a plan can be at most."""
        return (self.cost - self.lower_bound) / self.lower_bound if self.lower_bound > 0 else 0.0


def parameter_bytes(problem: Problem, layout: Layout, ref: Ref) -> float:
    """Bytes per element of a rank's shard that it keeps of a parameter, its gradient and its optimizer states."""
    spec = problem.graph.specs[ref]
    replicas = problem.mesh.product(layout.replica_axes(problem.mesh))
    shards = [replicas if problem.stage >= stage else 1 for stage in (3, 2, 1)]
    if ref not in problem.graph.trained:
        return spec.item_bytes / shards[0]
    masters = MASTER if spec.item_bytes < MASTER else 0
    gradient = max(spec.item_bytes, MASTER) if problem.stage > 1 else spec.item_bytes  # then they are added in fp32
    states = max(spec.item_bytes, MASTER) * problem.optimizer_state_factor + masters
    return spec.item_bytes / shards[0] + gradient / shards[1] + states / shards[2]


def operator_bytes(problem: Problem, operator: Operator, assignment: Assignment) -> float:
    """Of an operator's results, and of the parameters of which it is the first user: they have the layout that it
    wants."""
    graph, sharding, total = problem.graph, problem.shardings[operator.id], 0.0
    given = problem.outputs.get(operator.id) or sharding.result_layouts(assignment)
    for index, (layout, spec) in enumerate(zip(given, operator.results, strict=True)):
        if Ref(operator.id, index) in problem.stored:
            total += layout.local_elements(spec.shape, problem.mesh) * spec.item_bytes
    wanted = sharding.operand_layouts(assignment)
    for position, ref in enumerate(operator.operands):
        node = graph.by_id[ref.id]
        if isinstance(node, Operator) or node.kind != "parameter":
            continue
        user, at = graph.users[ref][0]
        if user.id == operator.id and at == position:
            elements = wanted[position].local_elements(node.spec.shape, problem.mesh)
            total += elements * parameter_bytes(problem, wanted[position], ref)
    return total


def plan_bytes(problem: Problem, chosen: Mapping[str, Assignment]) -> float:
    """Memory estimate of a plan by its assignments, in bytes per rank."""
    return sum(operator_bytes(problem, operator, chosen[operator.id]) for operator in problem.graph.operators)


def too_large(limit: float, smallest: float) -> TooLarge:
    """The error where no plan keeps the limit."""
    return TooLarge(
        "MW502",
        f"parallel.memory_limit = {in_words(int(limit))} per rank, but no plan was found that keeps it: the smallest "
        f"needs {in_words(int(smallest))}. Use more ranks, a higher parallel.zero.stage, smaller batches, or a larger "
        "limit.",
        smallest,
    )


@dataclass(frozen=True)
class NodeCost:
    """Seconds of the nodes of one problem on one cluster."""

    problem: Problem
    cluster: Cluster
    _communicates: dict[int, bool] = field(default_factory=dict, init=False)

    @cached_property
    def gradient_bytes(self) -> int:
        """Of all parameters."""
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
        if ranks == 1:
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
