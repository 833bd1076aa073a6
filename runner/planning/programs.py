"""The programs of the plans of one decision: plans that differ only in what is computed again are lowered once.

Invariant: what is taken from before is what `lower` would make.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from strategies.engine.lowering import lower
from strategies.engine.program import Options, Program
from strategies.graph import OperatorGraph
from strategies.plan import Plan

Lower = Callable[[OperatorGraph, Plan, Options], Program]


@dataclass(frozen=True)
class Programs:
    """A `Lower` that remembers."""

    done: dict[tuple[int, Options], tuple[Plan, Program]] = field(default_factory=dict)
    """By the strategies of a plan: the object, which lives as long as the plan that is kept here."""

    def __call__(self, graph: OperatorGraph, plan: Plan, options: Options) -> Program:
        if plan.recompute is not None and plan.recompute.slices_inputs:  # what is stored then depends on the program
            return lower(graph, plan, options)
        key = id(plan.operators), options
        if key not in self.done:
            self.done[key] = plan, lower(graph, replace(plan, recompute=None), options)
        return replace(self.done[key][1], recompute=plan.recompute)
