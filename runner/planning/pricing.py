"""What a plan is predicted to take, in time and memory: the numbers of plan.json, without all that explains them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from runner.planning import pipelining
from runner.planning.prepare import lowered, options_of
from runner.planning.programs import Lower
from runner.schema import Config
from strategies.cost.cluster import Cluster
from strategies.cost.memory import Memory, memory
from strategies.cost.repeating import Traces, stands
from strategies.cost.step import StepCost, between, least_with_zero, step_cost
from strategies.cost.updating import Updating
from strategies.engine.lowering import lower
from strategies.engine.program import Program
from strategies.graph import OperatorGraph
from strategies.pipeline.describe import cost_of_stages
from strategies.pipeline.memory import group_memory
from strategies.pipeline.schedule import Schedule
from strategies.plan import Plan


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

    cost: StepCost
    program: Program

    @property
    def again(self) -> tuple[str, ...]:
        """The modules that are computed again."""
        return () if self.program.recompute is None else self.program.recompute.modules


@dataclass(frozen=True)
class Price:
    """Of a plan whose `parts` are run by as many `groups` of ranks in turn. `together` gives the seconds of a step from
    the costs of the parts, `count` the memory of a rank of every group, which takes longer the first time."""

    parts: Sequence[Part]
    groups: int
    updating: Updating
    cluster: Cluster
    together: Callable[[Sequence[StepCost]], float]
    count: Callable[[], Sequence[Memory]]
    counted: list[Sequence[Memory]] = field(default_factory=list)

    @cached_property
    def seconds(self) -> float:
        """Of a step."""
        return self.together([part.cost for part in self.parts])

    @property
    def memories(self) -> Sequence[Memory]:
        """Of a rank of every group."""
        if not self.counted:
            self.counted.append(self.count())
        return self.counted[0]

    @property
    def sizes(self) -> list[int]:
        """Bytes of a rank of every group, at its fullest moment."""
        return [one.peak for one in self.memories]

    def bytes(self) -> int:
        return max(self.sizes)

    def of_group(self, group: int) -> Sequence[Part]:
        return self.parts[group :: self.groups]

    @cached_property
    def stands(self) -> list[int]:
        """Bytes that stay from step to step in every group, known without running anything."""
        return [sum(stands(part.program, self.updating) for part in self.of_group(group)) for group in range(self.groups)]

    def with_zero(self, updating: Updating) -> float:
        """The least seconds of the same plan at another stage of ZeRO, where this one has none. The stage of a pipeline
        that works most may be another one then, with the shortest update."""
        found = [least_with_zero(part.cost, part.program, self.cluster, updating) for part in self.parts]
        shortest = min(one.optimizer for one in found)
        return self.together([replace(one, optimizer=shortest) for one in found])

    def partly(self, other: Price, modules: Collection[str]) -> float:
        """Seconds where of what `other`, of the same plan, computes again only these `modules` are: layers of a stage
        are taken to be alike."""
        found = []
        for mine, others in zip(self.parts, other.parts, strict=True):
            share = len({*modules} & {*others.again}) / max(len(others.again), 1)
            found.append(between(mine.cost, others.cost, share))
        return self.together(found)

    def told(self, other: Price | None) -> Sizes:
        """What is known of the bytes without a trace, but for that of `other`, if there is one with the same forward:
        while that runs and behind it, a rank holds as much beside what stands. Before the first backward there are no
        gradients, whatever becomes of them later; where several micro-batches are added up, the most may be in a later
        one."""
        if self.counted:
            parts = [(one, one.peaks.items()) for one in self.memories]
            bare = [max(n - one.activations * (phase != "update") for phase, n in peaks) for one, peaks in parts]
            return Sizes(self.sizes, self.sizes, bare)
        if other is None:
            return Sizes(self.stands, None, self.stands)
        least, likely = [], []
        for stands, one in zip(self.stands, other.memories, strict=True):
            forward = 0 if self.updating.accumulate > 1 else one.peaks["forward"] - one.held
            least.append(stands + max(forward, one.activations))
            likely.append(stands + one.peak - one.held)
        return Sizes(least, likely, self.stands)


def price_of(
    config: Config,
    in_step: tuple[OperatorGraph, Plan],
    updating: Updating,
    cluster: Cluster,
    lower: Lower = lower,
    traces: Traces | None = None,
) -> Price:
    """`in_step` is what a step computes, with its plan; `lower` makes its program, `traces` remembers what was traced
    before. Raises StrategyError for what cannot be lowered or cut."""
    stages, options = pipelining.stages_of(config, *in_step, options_of(config)), options_of(config)
    traces = Traces() if traces is None else traces
    if not stages:
        program = lowered(config, *in_step, lower)
        part = Part(step_cost(*in_step, program, cluster, updating), program)
        return Price(
            [part], 1, updating, cluster, lambda alone: alone[0].total,
            lambda: [memory(traces.of(program, updating), updating)],
        )  # fmt: skip
    programs, schedule = pipelining.programs_of(config, stages, options), pipelining.schedule_of(config)
    pairs = zip(stages, programs, strict=True)
    parts = [Part(step_cost(stage.graph, stage.plan, program, cluster, updating), program) for stage, program in pairs]

    def together(alone: Sequence[StepCost]) -> float:
        told = [cost.to_json() for cost in alone]
        return float(cost_of_stages(stages, told, schedule, updating.accumulate, cluster)[0]["total"])

    return Price(
        parts, len(schedule), updating, cluster, together, lambda: _memories(programs, schedule, updating, traces)
    )


def _memories(programs: Sequence[Program], schedule: Schedule, updating: Updating, traces: Traces) -> list[Memory]:
    found = [traces.of(program, updating) for program in programs]
    return [group_memory(group, found, actions, len(schedule), updating) for group, actions in enumerate(schedule)]
