"""What plans are made for and cost: a graph with its rules on a mesh, the assignments that are fixed, and the settings
of a training step on which costs depend.

A relaxation of a problem has costs below those of any plan as it runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from strategies.core.graph import OperatorGraph, Ref
from strategies.core.layout import Layout
from strategies.core.memo import Memo
from strategies.core.mesh import Mesh
from strategies.cost.cluster import Cluster
from strategies.cost.styled_modules import ModuleLayouts
from strategies.optimizer.updates import Engine
from strategies.rules.sharding import Assignment, Sharding
from strategies.rules.traits import saved


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
class Problem(Memo):
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

    def within(self, memory: float | None) -> Problem:
        """The same with another memory limit, with what was made once for this one: nothing of that depends on it."""
        if memory == self.memory:
            return self
        other = replace(self, memory=memory)
        object.__setattr__(other, "_made", self._made)
        return other

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
    def saved(self) -> Mapping[str, list[float]]:
        """What stays for backward: by operator the shares of the bytes of its results and operands."""
        return saved(self.graph)

    @cached_property
    def kinds(self) -> dict[str, Hashable]:
        """Per operator, by id, all that its candidates and their seconds depend on."""
        return {
            one.id: (
                self.graph.looks[one.id],
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
