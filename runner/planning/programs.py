"""The stages and programs of the plans of one decision: plans that differ only in what is computed again are cut and
lowered once.

Invariant: what is taken from before is what `stages_of` and `lower` would make.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from runner.config.schema import Config
from runner.planning import pipeline as pipelining
from strategies.core.graph import OperatorGraph
from strategies.core.plan import Plan
from strategies.core.program import LoweringOptions, Program
from strategies.cost.cluster import Cluster
from strategies.cost.roofline import Work
from strategies.cost.step import works_of
from strategies.lowering.lowering import lower
from strategies.lowering.pipeline.cutting import Stage, recompute_in

Lower = Callable[[OperatorGraph, Plan, LoweringOptions], Program]


@dataclass(frozen=True)
class Programs:
    """A `Lower` that remembers."""

    done: dict[Hashable, tuple[Plan, Program]] = field(default_factory=dict)
    """By the strategies of a plan: the object, which lives as long as the plan that is kept here."""
    parts: dict[Hashable, tuple[Plan, tuple[Stage, ...]]] = field(default_factory=dict)
    worked: dict[int, tuple[Plan, list[Work]]] = field(default_factory=dict)

    def __call__(
        self,
        graph: OperatorGraph,
        plan: Plan,
        options: LoweringOptions,
        open_axes: Mapping[str, Iterable[str]] = MappingProxyType({}),
        **stage: Any,
    ) -> Program:
        if plan.recompute is not None and plan.recompute.slices_inputs:  # what is stored then depends on the program
            return lower(graph, plan, options, open_axes=open_axes, **stage)
        key = id(plan.operators), options, tuple((name, tuple(axes)) for name, axes in open_axes.items())
        if key not in self.done:
            made = lower(graph, replace(plan, recompute=None), options, open_axes=open_axes, **stage)
            self.done[key] = plan, made
        return replace(self.done[key][1], recompute=plan.recompute)

    def works(self, graph: OperatorGraph, plan: Plan, cluster: Cluster) -> list[Work]:
        """As `works_of`, of one cluster."""
        if id(plan.operators) not in self.worked:
            self.worked[id(plan.operators)] = plan, works_of(graph, plan, cluster)
        return self.worked[id(plan.operators)][1]

    def stages(self, config: Config, graph: OperatorGraph, plan: Plan, options: LoweringOptions) -> tuple[Stage, ...]:
        """As `pipelining.stages_of`."""
        key = id(plan.operators), options, pipelining.groups_of(config)
        if key not in self.parts:
            self.parts[key] = plan, pipelining.stages_of(config, graph, replace(plan, recompute=None), options)
        return tuple(
            replace(one, plan=replace(one.plan, recompute=recompute_in(one.graph.operators, plan.recompute)))
            for one in self.parts[key][1]
        )
