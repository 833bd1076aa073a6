"""What every search works on: the graph, its rules, the mesh and what is fixed beforehand; and the bytes that an
operator causes by itself."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from strategies.core.graph import OperatorGraph, Ref
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.cost.cluster import Cluster
from strategies.memory.estimate import saved
from strategies.rules.sharding import Assignment, Sharding

T = TypeVar("T")


@dataclass(frozen=True)
class Sure:
    """Prices below those of any plan as it runs, see `strategies.search.sure`: what is computed and added takes its
    time on `cluster`; only the redistributions of `sent` values are priced, and not what operators send themselves
    (None: all, as the search's cluster says); `free` operators (by id) take no time. Of the seconds of backward and of
    adding gradients such shares count, the latter in calls of at most `bucket` bytes (None: as many as are chosen, 0:
    any number)."""

    cluster: Cluster
    sent: frozenset[Ref] | None
    free: frozenset[str]
    backward: float
    adding: float
    bucket: int | None


@dataclass(frozen=True)
class Problem:
    """`inputs` are the layouts of the batch entries; `fixed` the assignments of configured operators by id; `outputs`
    the layouts in which configured operators hand on their results; `stage` is that of ZeRO, `states` how many numbers
    the optimizer keeps per parameter element, `moved` the bytes that it reads and writes for one (at least those that
    it must: the weight, its gradient, and two states there and back), `overlaps` whether gradients are added during
    backward, `memory` the bytes that a rank may keep. What is priced is one micro-batch, of which a step takes so many
    `turns`, and its part of what is done once per step; where it is for a bound, as `sure` says."""

    graph: OperatorGraph
    mesh: Mesh
    shardings: Mapping[str, Sharding]
    inputs: Mapping[str, Layout]
    fixed: Mapping[str, Assignment]
    outputs: Mapping[str, tuple[Layout, ...]]
    stage: int = 0
    states: float = 2.0
    memory: float | None = None
    turns: int = 1
    moved: float = 28.0
    overlaps: bool = True
    sure: Sure | None = None
    known: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns; made for the first search that asks for it, and kept for others."""
        if key not in self.known:
            self.known[key] = make()
        found: T = self.known[key]
        return found

    def within(self, memory: float | None) -> Problem:
        """The same with another limit of memory."""
        return self if memory == self.memory else replace(self, memory=memory)

    def counts(self, ref: Ref) -> bool:
        """Whether redistributions of a value are priced."""
        return self.sure is None or self.sure.sent is None or ref in self.sure.sent

    @property
    def trained(self) -> frozenset[Ref]:
        """The values that have a gradient."""
        return self.graph.trained

    @cached_property
    def stored(self) -> frozenset[Ref]:
        """The results that stay for backward."""
        return saved(self.graph)

    @cached_property
    def batch_factors(self) -> dict[str, str]:
        """Per operator: the factor of the dim that carries the batch, where there is one. The batch is dim 0 of every
        input.

        Where an operator keeps that dim whole (or has no rule), a result with the same size in the same place carries
        the batch on.
        """
        dims = {Ref(source.id): 0 for source in self.graph.of_kind("input") if source.spec.shape}
        found: dict[str, str] = {}
        for operator in self.graph.operators:
            sharding = self.shardings[operator.id]
            carried = [
                (position, dims[ref], self.graph.specs[ref].shape)
                for position, ref in enumerate(operator.operands)
                if ref in dims
            ]
            factors = [
                factor for position, dim, _ in carried if (factor := sharding.operands[position][dim]) is not None
            ]
            if factors:
                found[operator.id] = factors[0]
            for index, (result, spec) in enumerate(zip(sharding.results, operator.results, strict=True)):
                if factors:
                    kept = [dim for dim, factor in enumerate(result) if factor == factors[0]]
                else:
                    kept = [dim for _, dim, shape in carried if spec.shape[dim : dim + 1] == shape[dim : dim + 1]]
                if kept:
                    dims[Ref(operator.id, index)] = kept[0]
        return found

    def result_layout(self, ref: Ref, assignment: Assignment) -> Layout:
        """How result `ref` lies when handed on."""
        if ref.id in self.outputs:
            return self.outputs[ref.id][ref.index]
        return self.shardings[ref.id].result_layouts(assignment)[ref.index]
