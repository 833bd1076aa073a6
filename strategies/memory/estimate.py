"""The memory of a rank, estimated without running anything: from shapes, layouts and what autograd saves by the traits
of operators.

`plan_bytes` adds up parameters with their gradients and optimizer states, and what autograd saves, in the layouts of
the operators that save it: searches minimise time within a limit of these. `stored_lower_bound` counts the bytes that a
plan stores at least, `Outline` those that are there beside them. Invariant: lower bounds are never above what
`strategies.memory.trace` counts.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from strategies.core.graph import ITEM_BYTES, Operator, OperatorGraph, Ref
from strategies.core.layout import Layout
from strategies.core.plan import Plan, Recompute
from strategies.core.program import Program
from strategies.cost.problem import Problem
from strategies.cost.step import MASTER
from strategies.memory.sharded import ShardedBytes
from strategies.memory.trace import local_tensors, optimizer_need, parameters_of, persistent_bytes
from strategies.memory.zero import ZeroBuffers
from strategies.optimizer.buckets import buckets
from strategies.optimizer.settings import OptimizerSettings
from strategies.rules import rule_of
from strategies.rules.sharding import Assignment
from strategies.rules.traits import saves_operand, traits


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
    """Bytes of an operator's shares of what autograd saves, and of the parameters of which it is the first user: they
    have the layout that it wants."""
    graph, sharding = problem.graph, problem.shardings[operator.id]
    given = problem.outputs.get(operator.id) or sharding.result_layouts(assignment)
    wanted, specs = sharding.operand_layouts(assignment), [graph.specs[ref] for ref in operator.operands]
    total, shares = 0.0, problem.saved[operator.id]
    for layout, spec, share in zip((*given, *wanted), (*operator.results, *specs), shares, strict=True):
        if share:
            total += share * layout.local_elements(spec.shape, problem.mesh) * spec.item_bytes
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


@dataclass(frozen=True)
class _Use:
    """A use by an operator that does more than return a value; `saves`: autograd surely saves the value there."""

    user: Operator
    position: int
    saves: bool


_uses: dict[int, dict[Ref, tuple[_Use, ...]]] = {}
"""The uses of all results, by graph, cached as long as the graph lives."""


def stored_lower_bound(graph: OperatorGraph, plan: Plan) -> int:
    """A lower bound of the bytes that a rank stores for backward.

    Each tensor that operators certainly save is counted once, in the smallest of the layouts in which it is passed on
    and used; of recomputed modules, their inputs and the saved tensors among those that they keep.

    Args:
        graph: The graph of a step, or of a stage of a pipeline.
        plan: Its plan.
    """
    return int(sum(_stored(graph, plan).values()))


def stored_by_module(graph: OperatorGraph, plan: Plan, modules: Recompute) -> dict[str | None, float]:
    """`stored_lower_bound` of each of the `modules` that makes the tensors; None for tensors made outside of them."""
    by_module: dict[str | None, float] = defaultdict(float)
    regions = {operator.id: modules.region(operator.path) for operator in graph.operators}
    for ref, size in _stored(graph, plan).items():
        by_module[regions[ref.id]] += size
    return by_module


def _stored(graph: OperatorGraph, plan: Plan) -> dict[Ref, float]:
    """Bytes of every result."""
    if id(graph) not in _uses:
        _uses[id(graph)] = {
            Ref(operator.id, index): tuple(_uses_of(graph, Ref(operator.id, index)))
            for operator in graph.operators
            if traits(operator.op).result == "new"
            for index in range(len(operator.results))
        }
        weakref.finalize(graph, _uses.pop, id(graph), None)
    return _StoredTensors(graph, plan, _uses[id(graph)]).by_result()


def _uses_of(graph: OperatorGraph, ref: Ref) -> Iterator[_Use]:
    for user, position in graph.users[ref]:
        if traits(user.op).result != "new":
            for index in range(len(user.results)):
                yield from _uses_of(graph, Ref(user.id, index))
        else:
            sure = traits(user.op).certain and user.id in graph.returning
            yield _Use(user, position, sure and saves_operand(graph, user, position))


@dataclass(frozen=True)
class _StoredTensors:
    """The tensors that one forward stores under a plan."""

    graph: OperatorGraph
    plan: Plan
    uses: Mapping[Ref, tuple[_Use, ...]]
    needed: dict[Ref, bool] = field(default_factory=dict)
    """Whether the second run of its module needs a result."""

    def by_result(self) -> dict[Ref, float]:
        return {ref: self._bytes_of(ref, uses) for ref, uses in self.uses.items() if self.graph.specs[ref].floating}

    def _bytes_of(self, ref: Ref, uses: Sequence[_Use]) -> float:
        """Bytes of a result; 0 where it need not be stored."""
        operator, module = self.graph.by_id[ref.id], self._modules[ref.id]
        assert isinstance(operator, Operator)
        made_once = module is None or operator.name in self._kept
        if not any(self._stores(module, made_once, use) for use in uses):
            return 0.0
        own = self.plan.operators[operator.name]
        given = own.outputs or rule_of(operator, self.graph).result_layouts(own.assignment)
        layouts = [(ref, given[ref.index]), *self._operand_layouts(uses)]
        return min(self._local_bytes(value, layout) for value, layout in layouts)

    def _stores(self, module: str | None, made_once: bool, use: _Use) -> bool:
        """Whether a use stores a result of a recomputed `module`, which makes it once or again."""
        others = self._modules[use.user.id]
        if others not in (None, module):
            return self.plan.recompute is not None and not self.plan.recompute.slices_inputs
        if others == module and module is not None:
            return made_once and self._asks(use)
        return use.saves

    def _asks(self, use: _Use) -> bool:
        """Whether the second run of a module needs an operand of one of its operators: for backward, or to make
        something again that is needed."""
        if use.saves:
            return True
        again = use.user.name not in self._kept
        return again and any(self._is_needed(Ref(use.user.id, index)) for index in range(len(use.user.results)))

    def _is_needed(self, ref: Ref) -> bool:
        if ref not in self.needed:
            module = self._modules[ref.id]
            inside = (use for use in self.uses[ref] if self._modules[use.user.id] == module)
            self.needed[ref] = any(self._asks(use) for use in inside)
        return self.needed[ref]

    def _operand_layouts(self, uses: Sequence[_Use]) -> Iterator[tuple[Ref, Layout]]:
        for use in uses:
            assignment = self.plan.operators[use.user.name].assignment
            layouts = rule_of(use.user, self.graph).operand_layouts(assignment)
            yield use.user.operands[use.position], layouts[use.position]

    def _local_bytes(self, ref: Ref, layout: Layout) -> float:
        spec = self.graph.specs[ref]
        return layout.local_elements(spec.shape, self.plan.mesh) * spec.item_bytes

    @cached_property
    def _modules(self) -> dict[str, str | None]:
        """The recomputed module around every operator."""
        recompute = self.plan.recompute
        return {one.id: None if recompute is None else recompute.region(one.path) for one in self.graph.operators}

    @cached_property
    def _kept(self) -> frozenset[str]:
        return frozenset(() if self.plan.recompute is None else self.plan.recompute.kept)


class KnownBytes:
    """Bytes of one program that need no trace.

    Attributes:
        need: What the optimizer needs per element.
        sizes: Elements of every trainable parameter, as `need` counts them.
        zero: The stand-in for ZeRO, where there is any.
        persistent: What stays from step to step.
        joined: Bytes of the largest bucket of several gradients at stage 0.
    """

    def __init__(self, program: Program, settings: OptimizerSettings) -> None:
        tensors, self.need = local_tensors(program, "meta"), optimizer_need(program, settings)
        parameters = parameters_of(tensors)
        trained = [parameters[name] for name in program.trainable_names]
        self.sizes = [self.need.elements(one.numel(), one.dtype) for one in trained]
        self.zero: ZeroBuffers | ShardedBytes | None = None
        if trained and settings.native:
            self.zero = ShardedBytes(program, self.need, settings)
        elif trained and settings.stage:
            self.zero = ZeroBuffers(program, parameters, self.need, settings)
        self.persistent = persistent_bytes(program, tensors, self.need, self.zero, settings.device)
        wide = ITEM_BYTES["float32"] if settings.stage == 0 else 0  # where weights have masters
        self._added = sum(one.numel() * max(one.itemsize, wide) for one in trained)
        sums = buckets(program, settings.cut) if settings.stage == 0 else ()
        self.joined = max((one.elements * ITEM_BYTES[one.dtype] for one in sums if len(one.names) > 1), default=0)

    @property
    def gradients(self) -> int:
        """Bytes of gradients that have been added up, at least."""
        if isinstance(self.zero, ShardedBytes):
            return self.zero.waiting
        unsharded = self.zero is None or self.zero.stage == 1
        return self._added if unsharded else 0

    @property
    def ending(self) -> int:
        """Bytes at the end of backward: stage 1 of ZeRO copies all gradients at once."""
        if not isinstance(self.zero, ZeroBuffers) or self.zero.stage > 1:
            return 0
        return int(self.bucket) * self.zero.dtype.itemsize + self.copied(self.trainable)

    def update(self, gradients: int) -> int:
        """Peak bytes during the optimizer step with the given bytes of gradients."""
        return gradients + self.need.during(self.sizes) if self.zero is None else self.zero.during_update()

    @property
    def bucket(self) -> float:
        """Elements of a bucket of ZeRO."""
        return self.zero.bucket if isinstance(self.zero, ZeroBuffers) else math.inf

    @property
    def trainable(self) -> int:
        """Elements of all trainable parameters."""
        return sum(self.sizes)

    @property
    def kept(self) -> int:
        """Bytes that adding up the first bucket leaves behind until the update."""
        return self.zero.parts * MASTER if isinstance(self.zero, ZeroBuffers) and self.zero.compact else 0

    def copied(self, elements: int) -> int:
        """Bytes of the copies of a bucket while it is added up."""
        return elements * sum(one.itemsize for one in self.zero.copied) if isinstance(self.zero, ZeroBuffers) else 0


@dataclass(frozen=True)
class Outline:
    """Lower bounds of a rank's bytes, and estimates.

    Attributes:
        persistent: Bytes that stay from step to step; the others are in addition.
        gradients: Bytes between two micro-batches.
        ending: Bytes at the end of the last backward.
        update: Bytes during the optimizer's update.
        moving: Bytes of the gradients that ZeRO adds up, about, by the share of backward that is left.
        gathered: Bytes of the parameters that ZeRO has gathered at one moment, about.
    """

    persistent: int
    gradients: int
    ending: int
    update: int
    moving: Sequence[tuple[float, int]] = ()
    gathered: int = 0

    def least(self, stored: int) -> int:
        """A lower bound of the peak with `stored` bytes for backward."""
        return self.persistent + max(self.gradients + stored, self.ending, self.update)

    def likely(self, stored: int) -> int:
        """An estimate of the peak with `stored` bytes for backward."""
        backward = max(stored, *(int(left * stored) + size for left, size in self.moving), 0)
        return self.persistent + max(self.gradients + self.gathered + backward, self.ending, self.update)

    @classmethod
    def together(cls, stages: Sequence[Outline]) -> Outline:
        """The bounds of programs that one rank runs in turn."""
        return cls(
            sum(one.persistent for one in stages),
            sum(one.gradients for one in stages),
            max(one.ending for one in stages),
            sum(one.update for one in stages),
            [moment for one in stages for moment in one.moving],
            max(one.gathered for one in stages),
        )


def outline(program: Program, settings: OptimizerSettings) -> Outline:
    """The bytes of a program's step that its order does not change. The program may have no trainable parameter."""
    known = KnownBytes(program, settings)
    added = known.gradients if settings.accumulate > 1 else 0
    zero = known.zero if isinstance(known.zero, ShardedBytes) else None
    return Outline(
        known.persistent.total,
        added,
        known.ending,
        known.update(known.gradients),
        () if zero is None else zero.moving,
        0 if zero is None else zero.gathered,
    )
