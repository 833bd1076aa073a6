"""Which layers to recompute in backward so that a plan keeps a limit of memory at the least extra time.

Every repeated layer is stored, recomputed where that is cheap ("selective"), or recomputed in full. What each mode
stores is traced once for all layers; how many layers of each kind (those that cost and save the same) get which mode is
a knapsack, solved exactly by its Pareto front of time and bytes. Collectives inside are kept in all layers or repeated
in all: both are solved. Invariant: the plan that is returned was traced as one program and keeps the limit. Within a
kind the first layers are recomputed before later ones: their second run comes when the tensors of later ones are freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from strategies.core.errors import StrategyError
from strategies.core.graph import OperatorGraph
from strategies.core.plan import Plan, Recompute
from strategies.core.program import Program
from strategies.core.request import RecomputeRequest
from strategies.cost.cluster import Cluster
from strategies.cost.step import step_cost
from strategies.lowering.recompute import layers, recomputed
from strategies.memory.limit import over
from strategies.memory.parts import Memory, memory
from strategies.memory.trace import stored_in, trace
from strategies.optimizer.settings import OptimizerSettings
from strategies.rules import rule_of

Mode = Literal["full", "selective"]
Handling = Literal["keep", "recompute"]
MODES: tuple[Mode, ...] = ("full", "selective")
HANDLINGS: tuple[Handling, ...] = ("recompute", "keep")
Layer = Mapping[Mode, tuple[float, int]]
"""Extra seconds per step of one layer and bytes that it stores less, by mode."""


@dataclass(frozen=True)
class RecomputedLayers:
    """How many layers of each kind get which mode: extra seconds per step, and bytes that are stored less."""

    seconds: float
    saves: int
    counts: Mapping[tuple[str, Mode], int]


def pareto_front(every: Iterable[RecomputedLayers]) -> list[RecomputedLayers]:
    """Those that no other beats in both time and bytes, by rising time."""
    front: list[RecomputedLayers] = []
    for one in sorted(every, key=lambda one: (one.seconds, -one.saves)):
        if not front or one.saves > front[-1].saves:
            front.append(one)
    return front


def front_of_kind(count: int, kind: str, layer: Layer) -> list[RecomputedLayers]:
    """The front of `count` layers of one kind."""
    every = []
    for full in range(count + 1 if "full" in layer else 1):
        for cheap in range(count - full + 1 if "selective" in layer else 1):
            counts: dict[tuple[str, Mode], int] = {(kind, "full"): full, (kind, "selective"): cheap}
            used = [(n, layer[mode]) for (_, mode), n in counts.items() if n]
            seconds, saves = sum(n * one[0] for n, one in used), sum(n * one[1] for n, one in used)
            every.append(RecomputedLayers(seconds, saves, counts))
    return pareto_front(every)


def combined(one: Sequence[RecomputedLayers], other: Sequence[RecomputedLayers]) -> list[RecomputedLayers]:
    """The front of the layers of both."""
    return pareto_front(
        RecomputedLayers(a.seconds + b.seconds, a.saves + b.saves, {**a.counts, **b.counts}) for a in one for b in other
    )


@dataclass(frozen=True)
class RecomputeSelection:
    """The selection for one plan.

    Attributes:
        graph: What a step computes.
        plan: Its plan, which recomputes nothing.
        wanted: What may be recomputed; its `operators` are not used.
        settings: Of the optimizer step.
        cluster: The machine.
        lowered: Makes the program of a plan.
    """

    graph: OperatorGraph
    plan: Plan
    wanted: RecomputeRequest
    settings: OptimizerSettings
    cluster: Cluster
    lowered: Callable[[Plan], Program]

    def within(self, limit: int) -> Plan:
        """The plan with the recompute that keeps `limit` bytes per rank; without any if none is needed.

        Raises:
            StrategyError: Recomputing all layers is not enough.
        """
        needed = self._memory(self.plan)
        if needed.peak <= limit:
            return self.plan
        paths = layers(self.graph, self.wanted.modules)
        stored = stored_in(self.lowered(self.plan), self.settings, paths)
        fitting: list[tuple[float, Plan]] = []
        for handling in HANDLINGS if self.wanted.communication is None else (self.wanted.communication,):
            kinds = self._kinds(paths, stored, handling)
            front = [RecomputedLayers(0.0, 0, {})]
            for kind, members in kinds.items():
                front = combined(front, front_of_kind(len(members), members[0], dict(kind)))
            ordered = {members[0]: members for members in kinds.values()}
            enough = [one for one in front if one.saves >= needed.peak - limit] or front[-1:]
            first = self._first([self._with(one.counts, ordered, handling) for one in enough], limit)
            fitting += [] if first is None else [(self._seconds(first), first)]
        if fitting:
            return min(fitting, key=lambda one: one[0])[1]
        least = self._memory(self._all(paths))
        raise StrategyError("MW502", over(least, limit, self.settings, recomputes=True, all_of_it=True))

    def _first(self, plans: Sequence[Plan], limit: int) -> Plan | None:
        """The first of `plans`, which store less and less, that keeps `limit`. Likely it is the very first; but a
        recomputed layer needs room for all that it does not store."""
        low, high, middle, first = 0, len(plans) - 1, 0, None
        while low <= high:
            if self._memory(plans[middle]).peak <= limit:
                high, first = middle - 1, plans[middle]
            else:
                low = middle + 1
            middle = (low + high) // 2
        return first

    def _memory(self, plan: Plan) -> Memory:
        return memory(trace(self.lowered(plan), self.settings), self.settings)

    def _seconds(self, plan: Plan) -> float:
        """Seconds of a step."""
        return step_cost(self.graph, plan, self.lowered(plan), self.cluster, self.settings).total

    def _all(self, paths: Sequence[str]) -> Plan:
        handling = self.wanted.communication or "recompute"
        return self._with({(path, "full"): 1 for path in paths}, {path: [path] for path in paths}, handling)

    def _kinds(
        self, paths: Sequence[str], stored: Mapping[str, int], handling: Handling
    ) -> dict[tuple[tuple[Mode, tuple[float, int]], ...], list[str]]:
        """Layers that cost and save the same, in order, by what the modes cost and save; a mode that saves nothing is
        left out."""
        alone = {path: [path] for path in paths}
        stored_by_mode: dict[Mode, dict[str, int]] = {}
        for mode in MODES:
            plan = self._with({(path, mode): 1 for path in paths}, alone, handling)
            stored_by_mode[mode] = stored_in(self.lowered(plan), self.settings, paths)
        seconds = self._seconds(self.plan)
        kinds: dict[tuple[tuple[Mode, tuple[float, int]], ...], list[str]] = {}
        for path in paths:
            modes: list[tuple[Mode, tuple[float, int]]] = []
            for mode in MODES:
                saves = stored[path] - stored_by_mode[mode][path]
                if saves > 0:
                    slower = self._seconds(self._with({(path, mode): 1}, alone, handling)) - seconds
                    modes.append((mode, (round(max(slower, 0.0), 9), saves)))
            kinds.setdefault(tuple(modes), []).append(path)
        return kinds

    def _with(
        self, counts: Mapping[tuple[str, Mode], int], kinds: Mapping[str, Sequence[str]], handling: Handling
    ) -> Plan:
        """The plan that recomputes `counts` layers: of each kind the first ones in full, then selective ones."""
        paths: dict[Mode, list[str]] = {mode: [] for mode in MODES}
        for kind, members in kinds.items():
            left = list(members)
            for mode in MODES:
                count = counts.get((kind, mode), 0)
                paths[mode] += left[:count]
                left = left[count:]
        if not any(paths.values()):
            return self.plan
        shardings = {operator.id: rule_of(operator, self.graph) for operator in self.graph.operators}
        slices = self.wanted.slice_inputs
        parts = [
            recomputed(self.graph, shardings, RecomputeRequest(mode, tuple(paths[mode]), handling, slices))
            for mode in MODES
            if paths[mode]
        ]
        modules = tuple(path for part in parts for path in part.modules)
        kept = tuple(name for part in parts for name in part.kept)
        return replace(self.plan, recompute=Recompute(modules, kept, handling == "keep", slices))
