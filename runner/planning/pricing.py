"""What a plan is predicted to take, in time and memory: the numbers of plan.json, without all that explains them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from runner.planning import pipelining
from runner.planning.prepare import lowered, options_of
from runner.planning.programs import Lower
from runner.schema import Config
from strategies.cost.cluster import Cluster
from strategies.cost.memory import Memory, memory
from strategies.cost.repeating import stands, trace_each, trace_repeated
from strategies.cost.step import StepCost, least_with_zero, step_cost
from strategies.cost.updating import Updating
from strategies.engine.lowering import lower
from strategies.graph import OperatorGraph
from strategies.pipeline.describe import cost_of_stages
from strategies.pipeline.memory import group_memory
from strategies.plan import Plan


@dataclass(frozen=True)
class Size:
    """Bytes of the fullest rank: at least, likely, and at least where all that backward needs is computed again."""

    least: int
    likely: int
    bare: int


@dataclass(frozen=True)
class Price:
    """Predicted seconds of a step; what tells the least of the same plan at a stage of ZeRO, if this one has none; and
    what finds out the bytes that stand between steps (None in a pipeline), and the memory of the fullest rank, which
    takes longer the first time. `accumulates`: gradients of several micro-batches are added up."""

    seconds: float
    with_zero: Callable[[Updating], float]
    stands: Callable[[], int] | None
    count: Callable[[], Memory]
    accumulates: bool = False
    counted: list[Memory] = field(default_factory=list)

    @property
    def memory(self) -> Memory:
        if not self.counted:
            self.counted.append(self.count())
        return self.counted[0]

    def bytes(self) -> int:
        return self.memory.peak

    def told(self, other: Price) -> Size:
        """What is known of the bytes without a trace where `other`, which was traced, has the same forward: while that
        runs and behind it, it holds as much beside what stands. Before the first backward there are no gradients,
        whatever becomes of them later; where several micro-batches are added up, the most may be in a later one."""
        if self.counted or self.stands is None:
            found = self.memory
            bare = max(size - found.activations * (phase != "update") for phase, size in found.peaks.items())
            return Size(found.peak, found.peak, bare)
        stands, memory = self.stands(), other.memory
        forward = 0 if self.accumulates else memory.peaks["forward"] - memory.held
        return Size(stands + max(forward, memory.activations), stands + memory.peak - memory.held, stands)


def price_of(
    config: Config,
    in_step: tuple[OperatorGraph, Plan],
    updating: Updating,
    cluster: Cluster,
    lower: Lower = lower,
) -> Price:
    """`in_step` is what a step computes, with its plan; `lower` makes its program. Raises StrategyError for what cannot
    be lowered or cut."""
    stages = pipelining.stages_of(config, *in_step, options_of(config))
    if not stages:
        program = lowered(config, *in_step, lower)
        cost = step_cost(*in_step, program, cluster, updating)
        return Price(
            cost.total, lambda other: least_with_zero(cost, program, cluster, other).total,
            lambda: stands(program, updating), lambda: memory(trace_repeated(program, updating), updating),
            updating.accumulate > 1,
        )  # fmt: skip
    programs, schedule = pipelining.programs_of(config, stages, options_of(config)), pipelining.schedule_of(config)
    pairs = zip(stages, programs, strict=True)
    costs = [step_cost(stage.graph, stage.plan, program, cluster, updating) for stage, program in pairs]

    def together(alone: Sequence[StepCost]) -> float:
        told = [cost.to_json() for cost in alone]
        return float(cost_of_stages(stages, told, schedule, updating.accumulate, cluster)[0]["total"])

    def with_zero(other: Updating) -> float:
        """The stage that works most may be another one then, with the shortest update."""
        found = [least_with_zero(one, program, cluster, other) for one, program in zip(costs, programs, strict=True)]
        shortest = min(one.optimizer for one in found)
        return together([replace(one, optimizer=shortest) for one in found])

    def fullest() -> Memory:
        traces = trace_each(programs, updating)
        groups = enumerate(schedule)
        found = (group_memory(group, traces, actions, len(schedule), updating) for group, actions in groups)
        return max(found, key=lambda one: one.peak)

    return Price(together(costs), with_zero, None, fullest)
