"""Which layers to compute again in backward so that a plan keeps a limit of memory at the least extra time.

Every repeated layer is stored, computed again where that is cheap, or computed again whole. What each way stores is
traced once for all layers; how many layers of each kind (those that cost and save the same) are treated in which way is
a knapsack, solved exactly by keeping what no other choice beats in both time and bytes. Collectives inside are kept in
all layers or repeated in all: both are solved. Invariant: the plan that is returned was traced as a whole and keeps the
limit. Within a kind the first layers are computed again before later ones: their second run comes when what later
layers stored is gone.
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

Way = Literal["full", "selective"]
Handling = Literal["keep", "recompute"]
WAYS: tuple[Way, ...] = ("full", "selective")
HANDLINGS: tuple[Handling, ...] = ("recompute", "keep")
Ways = Mapping[Way, tuple[float, int]]
"""Extra seconds per step and bytes that are stored less, for one layer."""


@dataclass(frozen=True)
class Choice:
    """How many layers of each kind are treated in each way: extra seconds per step and bytes that are saved."""

    time: float
    saves: int
    counts: Mapping[tuple[str, Way], int]


def best_of(found: Iterable[Choice]) -> list[Choice]:
    """Those that no other beats in both, by rising time."""
    kept: list[Choice] = []
    for one in sorted(found, key=lambda choice: (choice.time, -choice.saves)):
        if not kept or one.saves > kept[-1].saves:
            kept.append(one)
    return kept


def choices(layers: int, kind: str, ways: Ways) -> list[Choice]:
    """What may be done with `layers` layers of one kind; `ways` gives seconds and bytes of one layer."""
    found = []
    for full in range(layers + 1 if "full" in ways else 1):
        for cheap in range(layers - full + 1 if "selective" in ways else 1):
            counts: dict[tuple[str, Way], int] = {(kind, "full"): full, (kind, "selective"): cheap}
            parts = [(count, ways[way]) for (_, way), count in counts.items() if count]
            time, saves = sum(n * one[0] for n, one in parts), sum(n * one[1] for n, one in parts)
            found.append(Choice(time, saves, counts))
    return best_of(found)


def together(one: Sequence[Choice], other: Sequence[Choice]) -> list[Choice]:
    """What may be done with the layers of both."""
    return best_of(Choice(a.time + b.time, a.saves + b.saves, {**a.counts, **b.counts}) for a in one for b in other)


@dataclass(frozen=True)
class Fitting:
    """`plan` computes nothing again; `lowered` makes a plan's program. Of `wanted` only `operators` is not used."""

    graph: OperatorGraph
    plan: Plan
    wanted: RecomputeRequest
    settings: OptimizerSettings
    cluster: Cluster
    lowered: Callable[[Plan], Program]

    def within(self, limit: int) -> Plan:
        """The plan with the recompute that keeps `limit` bytes per rank; without any if none is needed.

        Raises StrategyError if even computing again all that may be is not enough.
        """
        needed = self._needed(self.plan)
        if needed.peak <= limit:
            return self.plan
        paths = layers(self.graph, self.wanted.modules)
        stored = stored_in(self.lowered(self.plan), self.settings, paths)
        found: list[tuple[float, Plan]] = []
        for handling in HANDLINGS if self.wanted.communication is None else (self.wanted.communication,):
            kinds = self._kinds(paths, stored, handling)
            frontier = [Choice(0.0, 0, {})]
            for kind, members in kinds.items():
                frontier = together(frontier, choices(len(members), members[0], dict(kind)))
            ordered = {members[0]: members for members in kinds.values()}
            enough = [one for one in frontier if one.saves >= needed.peak - limit] or frontier[-1:]
            first = self._first([self._with(one.counts, ordered, handling) for one in enough], limit)
            found += [] if first is None else [(self._time(first), first)]
        if found:
            return min(found, key=lambda one: one[0])[1]
        least = self._needed(self._all(paths))
        raise StrategyError("MW502", over(least, limit, self.settings, recomputes=True, all_of_it=True))

    def _first(self, plans: Sequence[Plan], limit: int) -> Plan | None:
        """The first of `plans`, which store less and less, that keeps `limit`. Likely it is the very first; but a layer
        that is computed again needs room for all that it does not store."""
        low, high, middle, found = 0, len(plans) - 1, 0, None
        while low <= high:
            if self._needed(plans[middle]).peak <= limit:
                high, found = middle - 1, plans[middle]
            else:
                low = middle + 1
            middle = (low + high) // 2
        return found

    def _needed(self, plan: Plan) -> Memory:
        return memory(trace(self.lowered(plan), self.settings), self.settings)

    def _time(self, plan: Plan) -> float:
        """Seconds of a step."""
        return step_cost(self.graph, plan, self.lowered(plan), self.cluster, self.settings).total

    def _all(self, paths: Sequence[str]) -> Plan:
        handling = self.wanted.communication or "recompute"
        return self._with({(path, "full"): 1 for path in paths}, {path: [path] for path in paths}, handling)

    def _kinds(
        self, paths: Sequence[str], stored: Mapping[str, int], handling: Handling
    ) -> dict[tuple[tuple[Way, tuple[float, int]], ...], list[str]]:
        """Layers that cost and save the same, in order, by what the ways cost and save; a way that saves nothing is
        left out."""
        alone = {path: [path] for path in paths}
        less: dict[Way, dict[str, int]] = {}
        for way in WAYS:
            plan = self._with({(path, way): 1 for path in paths}, alone, handling)
            less[way] = stored_in(self.lowered(plan), self.settings, paths)
        time = self._time(self.plan)
        found: dict[tuple[tuple[Way, tuple[float, int]], ...], list[str]] = {}
        for path in paths:
            ways: list[tuple[Way, tuple[float, int]]] = []
            for way in WAYS:
                saves = stored[path] - less[way][path]
                if saves > 0:
                    slower = self._time(self._with({(path, way): 1}, alone, handling)) - time
                    ways.append((way, (round(max(slower, 0.0), 9), saves)))
            found.setdefault(tuple(ways), []).append(path)
        return found

    def _with(
        self, counts: Mapping[tuple[str, Way], int], kinds: Mapping[str, Sequence[str]], handling: Handling
    ) -> Plan:
        """The plan with so many layers computed again: of each kind the first ones whole, then those that are cheap."""
        paths: dict[Way, list[str]] = {way: [] for way in WAYS}
        for kind, members in kinds.items():
            left = list(members)
            for way in WAYS:
                count = counts.get((kind, way), 0)
                paths[way] += left[:count]
                left = left[count:]
        if not any(paths.values()):
            return self.plan
        shardings = {operator.id: rule_of(operator, self.graph) for operator in self.graph.operators}
        slices = self.wanted.slice_inputs
        parts = [
            recomputed(self.graph, shardings, RecomputeRequest(way, tuple(paths[way]), handling, slices))
            for way in WAYS
            if paths[way]
        ]
        modules = tuple(path for part in parts for path in part.modules)
        kept = tuple(name for part in parts for name in part.kept)
        return replace(self.plan, recompute=Recompute(modules, kept, handling == "keep", slices))
