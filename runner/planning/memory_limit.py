"""`parallel.memory_limit` and `parallel.recompute=auto`: how a plan is made to fit the memory of a rank.

The search sums all stored bytes; a rank needs the peak over time, which requires a trace of its program. So
plans are traced, and where one exceeds the limit either less memory is allowed to the search (`SearchBudget`) or layers
are recomputed (`FewestLayers`). Memory is nearly affine in both variables, so both are found by regula falsi, in few
traces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from runner.config.schema import Config
from runner.planning.clusters import cluster_of
from runner.planning.estimate import settings_of
from strategies.core.errors import StrategyError
from strategies.core.graph import OperatorGraph
from strategies.core.plan import Plan
from strategies.core.program import Program
from strategies.core.request import RecomputeRequest, Request
from strategies.lowering.pipeline_schedule import Schedule
from strategies.memory.limit import check_limit
from strategies.memory.parts import group_memory, memory
from strategies.memory.recompute_selection import RecomputeSelection
from strategies.memory.repeated_blocks import Traces
from strategies.memory.trace import trace

SMALLER = (0.85, 0.7, 0.5)
"""Shares of the limit for which plans are searched again where the first one exceeds it."""
CLOSE = 0.97
"""Of the limit: between a plan that needs so much and a larger one no other is searched."""
FLATTEST, USUAL = 0.25, 0.65
"""What a rank saves of a byte that the search saves: the least that is believed, and before any plan has shown it (a 7B
llama on 8 devices: 0.48 to 0.68)."""


def first_within(
    plan: Plan, request: Request, fit: Callable[[Plan], Plan], search: Callable[[Request], Plan] | None
) -> Plan:
    """`plan` as `fit` makes it keep the limit, else the first plan searched for less memory that `fit` can.

    Args:
        plan: the plan found for `request`.
        request: the planner's request.
        fit: returns a plan that keeps the limit, or raises StrategyError.
        search: finds the plan of a request; None for a plan of a file, to which there is no alternative.

    Raises:
        StrategyError: that of `fit` for `plan`, where no plan keeps the limit.
    """
    try:
        return fit(plan)
    except StrategyError as error:
        if search is None or request.memory_limit is None:
            raise
        refused = error
    tried = [plan.operators]
    for share in SMALLER:
        try:
            smaller = search(replace(request, memory_limit=int(share * request.memory_limit)))
            if smaller.operators not in tried:
                tried.append(smaller.operators)
                return fit(smaller)
        except StrategyError:
            continue  # the first error is raised
    raise refused


def within_limit(
    config: Config, graph: OperatorGraph, plan: Plan, device: str, lowered: Callable[[Plan], Program]
) -> Plan:
    """`plan`, with the recompute that the limit asks for where that is `auto`.

    Args:
        config: with the limit; without one `plan` is returned unchanged.
        graph: the graph of the plan.
        plan: recomputes nothing where that is `auto`.
        device: "cpu" or "cuda".
        lowered: returns the program of a plan.

    Raises:
        StrategyError: the plan needs more than the limit.
    """
    limit, section = config.parallel.memory_limit, config.parallel.recompute
    if limit is None:
        return plan
    settings = settings_of(config, graph, device)
    if section.operators == "auto":
        wanted = RecomputeRequest("full", section.modules, section.communication, section.slice_inputs)
        cluster = cluster_of(config, device, plan.mesh.size)
        return RecomputeSelection(graph, plan, wanted, settings, cluster, lowered).within(limit)
    check_limit(memory(trace(lowered(plan), settings), settings), limit, plan, settings)
    return plan


def check_stages(
    config: Config, graph: OperatorGraph, plan: Plan, device: str, programs: Sequence[Program], schedule: Schedule
) -> None:
    """Check the ranks of a pipeline whose stages have these `programs`. Raises StrategyError."""
    limit = config.parallel.memory_limit
    if limit is None:
        return
    settings, traces = settings_of(config, graph, device), Traces()
    by_stage = {number: traces.of(program, settings) for number, program in enumerate(programs)}
    for group, actions in enumerate(schedule):
        check_limit(group_memory(group, by_stage, actions, len(schedule), settings), limit, plan, settings)


@dataclass
class SearchBudget:
    """Bytes that the next search may use so that a rank keeps `limit`, for plans of one kind on one graph.

    Attributes:
        limit: bytes of a rank.
        most: bytes of a rank per byte of the search, at most.
        slope: the same, as plans have shown it.
    """

    limit: int
    most: float
    slope: float = field(init=False)

    def __post_init__(self) -> None:
        self.slope = USUAL * self.most

    def next(self, seen: Sequence[tuple[float, int]]) -> int | None:
        """The budget of the next search; None where a plan is near the limit, or no budget is left.

        Args:
            seen: bytes of every plan so far, in the search's memory model and traced.
        """
        large = min((one for one in seen if one[1] > self.limit), default=None)
        small = max((one for one in seen if one[1] <= self.limit), default=None)
        if large is None or (small is not None and small[1] >= CLOSE * self.limit):
            return None
        if small is not None:
            share = (self.limit - small[1]) / (large[1] - small[1])
            return int(small[0] + share * (large[0] - small[0]))
        if len(seen) > 1:
            first = max(seen)
            slope = (first[1] - large[1]) / (first[0] - large[0])
            self.slope = min(max(slope, FLATTEST * self.most), self.most)
        budget = int(large[0] - (large[1] - self.limit) / self.slope)
        return budget if budget > 0 else None


@dataclass
class _GroupLayers:
    """How many `layers` a group of ranks recomputes: `low` are too few, at the bytes `above`, `high` are enough, at the
    bytes `below`; `measured` says that `above` was traced."""

    limit: int
    layers: tuple[str, ...]
    above: int
    below: int
    measured: bool
    low: int = field(init=False)
    high: int = field(init=False)

    def __post_init__(self) -> None:
        enough = self.above <= self.limit
        self.low, self.high = (-1, 0) if enough else (0 if self.measured else -1, len(self.layers))

    @property
    def guess(self) -> int:
        if self.high - self.low <= 1:
            return self.high
        guess = self.low + math.ceil((self.high - self.low) * (self.above - self.limit) / (self.above - self.below))
        return min(max(guess, self.low + 1), self.high - 1)

    def update(self, count: int, size: int) -> None:
        if size > self.limit:
            if count >= self.high:  # other groups recomputed fewer layers, of which one was this group's too
                self.high = len(self.layers)
            self.low, self.above = count, size
        elif count < self.high:
            one_less = size + (size - self.below) / (self.high - count)
            self.high, self.below = count, size
            if one_less > self.limit:
                self.low = count - 1


class FewestLayers:
    """The fewest layers to recompute so that every group of ranks keeps the limit.

    Each group has its own number, since groups of a pipeline keep different numbers of micro-batches; all are tried
    together. A group's first layers are taken: they are recomputed when what later layers stored is freed.
    """

    def __init__(
        self,
        limit: int,
        layers: Sequence[tuple[str, ...]],
        none: Sequence[int],
        every: Sequence[int],
        *,
        measured: bool,
    ) -> None:
        """Args:
        limit: bytes of a rank.
        layers: what may be recomputed, by group.
        none: bytes of every group that recomputes none of its layers.
        every: bytes of every group that recomputes all of them.
        measured: whether `none` was traced, not estimated.
        """
        self.limit = limit
        self.groups = [_GroupLayers(limit, *one, measured) for one in zip(layers, none, every, strict=True)]
        self.tried: list[int] = []

    @property
    def lower_bound(self) -> set[str]:
        """Layers that are recomputed in any case."""
        return self._layers([max(group.guess - 1, 0) if group.high else 0 for group in self.groups])

    def next(self) -> set[str] | None:
        """The layers to try; None where the last ones are the fewest, or all are too few."""
        counts = [group.guess for group in self.groups]
        if counts == self.tried:
            return None
        self.tried = counts
        return self._layers(counts)

    def update(self, sizes: Sequence[int]) -> bool:
        """Receive the bytes that every group needs with the last layers. Returns whether all keep the limit."""
        for group, count, size in zip(self.groups, self.tried, sizes, strict=True):
            group.update(count, size)
        return max(sizes) <= self.limit

    def _layers(self, counts: Sequence[int]) -> set[str]:
        return {name for group, count in zip(self.groups, counts, strict=True) for name in group.layers[:count]}
