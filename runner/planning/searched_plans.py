"""The plans that one decision searches, each once.

Invariant: what is taken from another search is what a search of its own would find: a plan that is the best for more
room and keeps less is the best for less; and where nothing is small enough, nothing is at a lower stage or for less
room. But without a limit of memory all stages of ZeRO share the plan without it: theirs are within a hundredth, but for
pipelines, where ZeRO 1 may lose a twentieth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from strategies.core.errors import StrategyError
from strategies.core.graph import OperatorGraph
from strategies.core.plan import Plan, Recompute
from strategies.core.request import RecomputeRequest, Request
from strategies.cost.cluster import Cluster
from strategies.lowering.recompute import recomputed
from strategies.planner.planner import Planning
from strategies.rules import rule_of
from strategies.rules.sharding import Sharding
from strategies.search.kept import plan_bytes
from strategies.search.problem import Problem


@dataclass(frozen=True)
class Searches:
    """Of one `graph` on as many ranks as all requests have."""

    graph: OperatorGraph
    cluster: Cluster
    done: list[_Search] = field(default_factory=list)
    planning: list[Planning] = field(default_factory=list)
    """Of all requests, which differ in ZeRO's stage, the limit and what is computed again; none before the first."""

    recomputed: dict[RecomputeRequest | None, Recompute | None] = field(default_factory=dict)

    @cached_property
    def rules(self) -> Mapping[str, Sharding]:
        """Of all operators, by id."""
        return {operator.id: rule_of(operator, self.graph) for operator in self.graph.operators}

    def plan(self, request: Request, room: int | None) -> Plan:
        """The best plan that keeps `room` bytes, with what `request` computes again. Raises StrategyError."""
        asked = replace(request, recompute=None, memory_limit=room, runner_up=False)
        found = next((one for one in self.done if one.answers(asked)), None)
        if found is None:
            for one in self.done:
                if one.refused is not None and one.refuses(asked):
                    raise one.refused
            found = self._searched(replace(asked, stage=0) if room is None else asked)
        plan = found.plan
        assert plan is not None
        if "bytes" in plan.search and found.asked.stage != asked.stage:
            plan = replace(plan, search={**plan.search, "bytes": self._bytes(found, asked.stage)})
        return self.again(plan, request)

    def again(self, plan: Plan, request: Request) -> Plan:
        """`plan`, with what `request` computes again."""
        return replace(plan, recompute=self._recomputed(request.recompute))

    def _recomputed(self, wanted: RecomputeRequest | None) -> Recompute | None:
        if wanted not in self.recomputed:
            found = None if wanted is None else recomputed(self.graph, self.rules, wanted)
            self.recomputed[wanted] = found
        return self.recomputed[wanted]

    def _searched(self, asked: Request) -> _Search:
        try:
            if not self.planning:
                self.planning.append(Planning(self.graph, asked, self.cluster))
            found = _Search(asked, self.planning[0].plan(asked.stage, asked.memory_limit), None)
        except StrategyError as error:
            self.done.append(_Search(asked, None, error))
            raise
        self.done.append(found)
        return found

    def _bytes(self, found: _Search, stage: int) -> float:
        """What a rank keeps at another stage, by the search's own model."""
        if stage not in found.kept:
            found.kept[stage] = self._counted(found, stage)
        return found.kept[stage]

    def _counted(self, found: _Search, stage: int) -> float:
        plan = found.plan
        assert plan is not None
        planned = {operator.id: plan.operators[operator.name] for operator in self.graph.operators}
        outputs = {id: one.outputs for id, one in planned.items() if one.outputs is not None}
        problem = Problem(self.graph, plan.mesh, self.rules, {}, {}, outputs, stage, found.asked.states)
        return plan_bytes(problem, {id: one.assignment for id, one in planned.items()})


@dataclass(frozen=True)
class _Search:
    """What was `asked`, and the plan or why there is none."""

    asked: Request
    plan: Plan | None
    refused: StrategyError | None
    kept: dict[int, float] = field(default_factory=dict)
    """Bytes of a rank by the search's own model, by stage of ZeRO."""

    def answers(self, asked: Request) -> bool:
        if self.plan is None or asked.memory_limit is None:
            return self.plan is not None and self.asked.memory_limit is None
        more = self.asked.memory_limit is None or asked.memory_limit <= self.asked.memory_limit
        kept = self.plan.search.get("bytes", math.inf)
        return more and asked.stage == self.asked.stage and kept <= asked.memory_limit

    def refuses(self, asked: Request) -> bool:
        """Only a limit makes a search fail for one stage and not for others."""
        if asked.memory_limit is None or self.asked.memory_limit is None:
            return self.asked.memory_limit is None
        return asked.stage <= self.asked.stage and asked.memory_limit <= self.asked.memory_limit
