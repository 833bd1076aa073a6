"""What a plan is predicted to take, in time and memory: the numbers of plan.json, without all that explains them."""

from __future__ import annotations

from collections.abc import Iterator

from runner import pipelining
from runner.memory_limit import updating_of
from runner.prepare import lowered, options_of
from runner.schema import Config
from strategies.cost.cluster import Cluster
from strategies.cost.memory import memory
from strategies.cost.repeating import trace_repeated
from strategies.cost.step import step_cost
from strategies.graph import OperatorGraph
from strategies.pipeline.describe import cost_of_stages
from strategies.pipeline.memory import group_memory
from strategies.plan import Plan
from strategies.search.joint import Priced


def priced(
    config: Config,
    graph: OperatorGraph,
    plan: Plan,
    in_step: tuple[OperatorGraph, Plan],
    device: str,
    cluster: Cluster,
) -> Iterator[Priced]:
    """First the seconds of a step, then also the bytes of the fullest rank, which take longer to find out. `in_step` is
    what a step computes for `graph` and `plan`. Raises StrategyError for what cannot be lowered or cut."""
    updating = updating_of(config, graph, device)
    stages = pipelining.stages_of(config, *in_step, options_of(config))
    if not stages:
        program = lowered(config, *in_step)
        seconds = step_cost(*in_step, program, cluster, updating).total
        yield Priced(plan, seconds, None)
        yield Priced(plan, seconds, memory(trace_repeated(program, updating), updating).peak)
        return
    programs, schedule = pipelining.programs_of(config, stages, options_of(config)), pipelining.schedule_of(config)
    alone = [
        step_cost(stage.graph, stage.plan, program, cluster, updating).to_json()
        for stage, program in zip(stages, programs, strict=True)
    ]
    seconds = cost_of_stages(stages, alone, schedule, updating.accumulate, cluster)[0]["total"]
    yield Priced(plan, seconds, None)
    traces = [trace_repeated(program, updating) for program in programs]
    groups = enumerate(schedule)
    peak = max(group_memory(group, traces, actions, len(schedule), updating).peak for group, actions in groups)
    yield Priced(plan, seconds, peak)
