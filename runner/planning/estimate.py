"""What a plan is predicted to take, in time and memory: the numbers of plan.json, without all that explains them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from runner.config.schema import Config
from runner.planning import communication
from runner.planning import pipeline as pipelining
from runner.planning.memory_limit import settings_of
from runner.planning.prepare import lowered, options_of, wanted_recompute
from runner.planning.programs import Programs
from strategies.core.graph import OperatorGraph, Ref
from strategies.core.mesh import Mesh
from strategies.core.plan import Plan, Recompute
from strategies.core.program import Program
from strategies.cost.cluster import Cluster
from strategies.cost.lower_bounds import least
from strategies.cost.roofline import Work, operator_work
from strategies.cost.step import (
    StepCost,
    calling_seconds,
    least_with_zero,
    need_of,
    norm_seconds,
    seconds_again,
    step_cost,
)
from strategies.lowering.pipeline.cutting import Stage, recompute_in
from strategies.lowering.pipeline.schedule import Schedule, held
from strategies.lowering.recompute import recomputed
from strategies.memory.parts import Memory, memory
from strategies.memory.pipeline import group_memory
from strategies.memory.repeated_blocks import Outline, Traces, outline
from strategies.memory.saved_bytes import least_stored
from strategies.optimizer.settings import OptimizerSettings
from strategies.planner.description import cost_of_stages
from strategies.rules import rule_of
from strategies.search.cheapest import StepPrice
from strategies.search.sure import Running

USUAL = 1.5
"""Bytes that are stored for backward, of those that are stored at least (a 7B llama on 8 devices: 1.3 to 1.8)."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of every group of ranks: at least, likely (None where nobody knows), and at least where all that backward
    needs is computed again."""

    least: Sequence[int]
    likely: Sequence[int] | None
    bare: Sequence[int]


@dataclass(frozen=True)
class Part:
    """A stage of a pipeline, or the whole step."""

    graph: OperatorGraph
    plan: Plan
    program: Program
    works: Sequence[Work]
    cost: StepCost


@dataclass(frozen=True)
class Price:
    """Of a plan whose `parts` are run by groups of ranks in turn, as `schedule` says; without a pipeline there is one
    of each, and no `stages`. `traces` remembers what was traced before."""

    parts: Sequence[Part]
    stages: Sequence[Stage]
    schedule: Schedule | None
    settings: OptimizerSettings
    cluster: Cluster
    traces: Traces
    known: dict[int, Memory] = field(default_factory=dict)
    """Of a rank of every group that was traced."""

    @property
    def groups(self) -> int:
        return 1 if self.schedule is None else len(self.schedule)

    @cached_property
    def seconds(self) -> float:
        """Of a step."""
        return self._together([part.cost for part in self.parts])

    def _together(self, alone: Sequence[StepCost]) -> float:
        """Seconds of a step of which the parts cost so much."""
        if self.schedule is None:
            return alone[0].total
        told = [cost.to_json() for cost in alone]
        return float(
            cost_of_stages(self.stages, told, self.schedule, self.settings.accumulate, self.cluster)[0]["total"]
        )

    def memory(self, group: int) -> Memory:
        """Of a rank of a group; takes longer the first time."""
        if group not in self.known:
            numbers = range(group, len(self.parts), self.groups)
            traces = {number: self.traces.of(self.parts[number].program, self.settings) for number in numbers}
            if self.schedule is None:
                self.known[group] = memory(traces[0], self.settings)
            else:
                self.known[group] = group_memory(group, traces, self.schedule[group], self.groups, self.settings)
        return self.known[group]

    @property
    def memories(self) -> list[Memory]:
        """Of a rank of every group."""
        return [self.memory(group) for group in range(self.groups)]

    @property
    def counted(self) -> bool:
        """Whether all groups were traced."""
        return len(self.known) == self.groups

    @property
    def sizes(self) -> list[int]:
        """Bytes of a rank of every group, at its fullest moment."""
        return [one.peak for one in self.memories]

    def bytes(self) -> int:
        return max(self.sizes)

    def within(self, limit: int) -> int:
        """Bytes of the fullest rank; of the first one that is found to need more than `limit`, if one does. Those that
        are likely the fullest come first."""
        groups = sorted(range(self.groups), key=lambda group: -self.likely[group])
        return next((one for group in groups if (one := self.memory(group).peak) > limit), None) or self.bytes()

    def of_group(self, group: int) -> Sequence[Part]:
        return self.parts[group :: self.groups]

    @cached_property
    def outlines(self) -> list[Outline]:
        """What is known of the bytes of every group without running anything."""
        groups = range(self.groups)
        return [
            Outline.together([outline(part.program, self.settings) for part in self.of_group(group)])
            for group in groups
        ]

    @property
    def bare(self) -> list[int]:
        """Bytes of every group at least, where all that backward needs is computed again."""
        return [one.least(0) for one in self.outlines]

    def with_stored(self, share: float) -> list[int]:
        """Bytes of every group at least, where `share` of the least is stored for backward."""
        return [one.least(int(share * stored)) for one, stored in zip(self.outlines, self.stored, strict=True)]

    @cached_property
    def stored(self) -> list[int]:
        """Bytes that every group stores for backward at least, known from names and layouts."""
        if self.settings.offload.activations != "none":
            return [0] * self.groups
        least = [least_stored(part.graph, part.plan) for part in self.parts]
        return least if self.schedule is None else [int(held(actions, least)) for actions in self.schedule]

    @property
    def likely(self) -> list[int]:
        """Bytes of every group, as far as they can be told without running anything."""
        return self.with_stored(USUAL)

    def with_zero(self, settings: OptimizerSettings) -> float:
        """The least seconds of the same plan at another stage of ZeRO, where this one has none. The stage of a pipeline
        that works most may be another one then, with the shortest update."""
        found = [least_with_zero(part.cost, part.program, self.cluster, settings) for part in self.parts]
        shortest = min(one.optimizer for one in found)
        return self._together([replace(one, optimizer=shortest) for one in found])

    def again(self, recompute: Recompute | None) -> float:
        """The least seconds of the same plan where it computes so much again, and this one nothing."""
        found = []
        for part in self.parts:
            own = recompute_in(part.graph.operators, recompute)
            seconds = self.settings.accumulate * seconds_again(part.graph, part.works, own)
            found.append(replace(part.cost, recomputed=seconds))
        return self._together(found)

    def layers(self, recompute: Recompute | None) -> list[tuple[str, ...]]:
        """The modules of every group that `recompute` names."""
        found = []
        for group in range(self.groups):
            own = [recompute_in(part.graph.operators, recompute) for part in self.of_group(group)]
            found.append(tuple(name for one in own if one is not None for name in one.modules))
        return found

    def told(self, other: Price | None) -> Sizes:
        """What is known of the bytes without a trace, but for that of `other`, if there is one with the same forward:
        while that runs and behind it, a rank holds as much beside what stands. Before the first backward there are no
        gradients, whatever becomes of them later; where several micro-batches are added up, the most may be in a later
        one."""
        if self.counted:
            bare = []
            for one in self.memories:
                phases = one.peaks.items()
                bare.append(max(size - one.activations * (phase != "update") for phase, size in phases))
            return Sizes(self.sizes, self.sizes, bare)
        if other is None:
            return Sizes(self.with_stored(1.0), None, self.bare)
        least, likely = [], []
        for own, one in zip(self.outlines, other.memories, strict=True):
            forward = 0 if self.settings.accumulate > 1 else one.peaks["forward"] - one.held
            least.append(max(own.stands + forward, own.least(one.activations)))
            likely.append(max(least[-1], own.stands + one.peak - one.held))
        return Sizes(least, likely, self.bare)


def price_of(
    config: Config,
    in_step: tuple[OperatorGraph, Plan],
    settings: OptimizerSettings,
    cluster: Cluster,
    made: Programs,
    traces: Traces,
) -> Price:
    """`in_step` is what a step computes, with its plan; `made` and `traces` remember what was made and traced before.
    Raises StrategyError for what cannot be lowered or cut."""
    options = options_of(config)
    stages = made.stages(config, *in_step, options)
    schedule = None
    if stages:
        schedule = pipelining.schedule_of(config)
        pairs = [(stage.graph, stage.plan) for stage in stages]
        programs = pipelining.programs_of(config, stages, options, made)
    else:
        pairs, programs = [in_step], (lowered(config, *in_step, made),)
    parts = [
        Part(graph, plan, program, works, step_cost(graph, plan, program, cluster, settings, works))
        for (graph, plan), program in zip(pairs, programs, strict=True)
        for works in [made.works(graph, plan, cluster)]
    ]
    return Price(parts, stages, schedule, settings, cluster, traces)


def price_for(
    config: Config,
    graph: OperatorGraph,
    of_step: Callable[[Plan], tuple[OperatorGraph, Plan]],
    device: str,
    ranks: int,
    cluster: Cluster,
) -> StepPrice:
    """How plans of `graph` are priced: as `run plan` tells it. `of_step` says what a step computes."""
    settings, made, traces = settings_of(config, graph, device), Programs(), Traces()

    def seconds(plan: Plan) -> float:
        return price_of(config, of_step(plan), settings, cluster, made, traces).seconds

    parallel = config.parallel
    stages, parts = pipelining.groups_of(config), parallel.pipeline.parts
    if stages > 1 or parallel.copies > 1:
        waits = parallel.pipeline.schedule in ("gpipe", "1f1b") and stages > 1
        found = least(graph, cluster, ())
        floor = found.seconds(stages, ranks // stages, parts, 1, again=False, waits=waits)
        return StepPrice(seconds, floor=config.train.accumulate * floor)
    return StepPrice(seconds, running_of(config, graph, settings, cluster, ranks))


def running_of(
    config: Config, graph: OperatorGraph, settings: OptimizerSettings, cluster: Cluster, ranks: int
) -> Running:
    """What is known of a step without a plan."""
    cut = settings.cut
    bucket = 0 if cut.at is not None else None if cut.size is None else max(cut.size, 1)
    learning = {ref for operator in graph.operators if operator.id in graph.returning for ref in operator.operands}
    count = sum(source.trainable and Ref(source.id) in learning for source in graph.of_kind("parameter"))
    constant = calling_seconds(count, cluster, settings)
    if settings.stage and ranks > 1:
        constant += norm_seconds(Mesh((("all", ranks),)), cluster)
    wanted = wanted_recompute(config.parallel.recompute)
    if wanted is not None:
        rules = {operator.id: rule_of(operator, graph) for operator in graph.operators}
        again, alone = recomputed(graph, rules, wanted), Mesh((("alone", 1),))
        works = [operator_work(rules[operator.id], {}, operator, graph, alone, cluster) for operator in graph.operators]
        constant += config.parts * seconds_again(graph, works, again) / ranks
    beside = config.parallel.comm_async and not config.train.compile
    return Running(beside, bool(communication.joined(config)), bucket, need_of(settings).moved, constant)
