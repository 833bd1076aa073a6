"""`parallel.memory_limit` and `parallel.recompute=auto`: the plan that keeps the limit, or one paragraph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from runner.build import optimizers
from runner.build.offload import offload_of
from runner.config.schema import Config
from runner.planning import communication
from runner.planning.clusters import cluster_of
from strategies.core.errors import StrategyError
from strategies.core.graph import OperatorGraph
from strategies.core.plan import Plan
from strategies.core.program import Program
from strategies.core.request import RecomputeRequest, Request
from strategies.lowering.pipeline.schedule import Schedule
from strategies.memory.limit import check_limit
from strategies.memory.parts import memory
from strategies.memory.pipeline import group_memory
from strategies.memory.recompute_selection import Fitting
from strategies.memory.repeated_blocks import Traces
from strategies.memory.trace import trace
from strategies.optimizer.settings import OptimizerSettings


def settings_of(config: Config, graph: OperatorGraph, device: str) -> OptimizerSettings:
    """How a step goes on after backward, for the prediction of its memory."""
    sources = graph.of_kind("parameter")
    names, trainable = [one.name for one in sources], [one.name for one in sources if one.trainable]
    return OptimizerSettings(
        config.parallel.zero.known,
        optimizers.optimizer_factory(config.optimizer),
        optimizers.parameter_groups(names, trainable, config.optimizer),
        config.parts,
        communication.cut(config),
        communication.overlapped(config) and config.parallel.pipeline.known is None,
        communication.zero_options(config).get("reduce_bucket_size"),
        offload_of(config, None),
        device,
    )


ROOM = (0.85, 0.7, 0.5)
"""Shares of the limit for which plans are searched anew where the plan that was found does not keep it."""


def first_within(
    plan: Plan, request: Request, fit: Callable[[Plan], Plan], search: Callable[[Request], Plan] | None
) -> Plan:
    """`plan` as `fit` makes it keep the limit, or else the first plan for less room that it can: a search knows memory
    by an estimate, which may be too low. Without `search` (a plan of a file) there is no other.

    Raises the StrategyError of `fit` for `plan` where none keeps the limit.
    """
    try:
        return fit(plan)
    except StrategyError as error:
        if search is None or request.memory_limit is None:
            raise
        refused = error
    seen = [plan.operators]
    for share in ROOM:
        try:
            other = search(replace(request, memory_limit=int(share * request.memory_limit)))
            if other.operators not in seen:
                seen.append(other.operators)
                return fit(other)
        except StrategyError:
            continue  # what was refused first is told
    raise refused


def within_limit(
    config: Config, graph: OperatorGraph, plan: Plan, device: str, lowered: Callable[[Plan], Program]
) -> Plan:
    """`plan`, with what must be computed again if that was left open. `lowered` makes the program of a plan.

    Raises StrategyError for a plan that needs more than the limit.
    """
    limit, asked = config.parallel.memory_limit, config.parallel.recompute
    if limit is None:
        return plan
    settings = settings_of(config, graph, device)
    if asked.operators == "auto":
        wanted = RecomputeRequest("full", asked.modules, asked.communication, asked.slice_inputs)
        cluster = cluster_of(config, device, plan.mesh.size)
        return Fitting(graph, plan, wanted, settings, cluster, lowered).within(limit)
    check_limit(memory(trace(lowered(plan), settings), settings), limit, plan, settings)
    return plan


def check_stages(
    config: Config, graph: OperatorGraph, plan: Plan, device: str, programs: Sequence[Program], schedule: Schedule
) -> None:
    """The same for the ranks of a pipeline, whose stages have these `programs`. Raises StrategyError."""
    limit = config.parallel.memory_limit
    if limit is None:
        return
    settings = settings_of(config, graph, device)
    found = Traces()
    traces = {number: found.of(program, settings) for number, program in enumerate(programs)}
    for group, actions in enumerate(schedule):
        check_limit(group_memory(group, traces, actions, len(schedule), settings), limit, plan, settings)
