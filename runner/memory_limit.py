"""`parallel.memory_limit` and `parallel.recompute=auto`: the plan that keeps the limit, or one paragraph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runner import communication, optimizers
from runner.offloading import offload_of
from runner.schema import Config
from strategies.cost.activations import trace
from strategies.cost.estimate import GPU, LAPTOP, Machine
from strategies.cost.fitting import Fitting
from strategies.cost.limit import check_limit
from strategies.cost.memory import memory, under_way
from strategies.cost.updating import Updating
from strategies.engine.program import Program
from strategies.graph import OperatorGraph
from strategies.pipeline.schedule import Schedule, held
from strategies.plan import Plan
from strategies.request import WantedRecompute


def machine_of(device: str) -> Machine:
    """The machine whose seconds are predicted."""
    return GPU if device == "cuda" else LAPTOP


def updating_of(config: Config, graph: OperatorGraph, device: str) -> Updating:
    """How a step goes on after backward, for the prediction of its memory."""
    sources = graph.of_kind("parameter")
    names, trainable = [one.name for one in sources], [one.name for one in sources if one.trainable]
    return Updating(
        config.parallel.zero.stage,
        optimizers.optimizer_factory(config.optimizer),
        optimizers.parameter_groups(names, trainable, config.optimizer),
        config.parts,
        communication.cut(config),
        communication.overlapped(config) and config.parallel.pipeline.stages is None,
        communication.zero_options(config).get("reduce_bucket_size"),
        offload_of(config, None),
        device,
    )


def within_limit(
    config: Config, graph: OperatorGraph, plan: Plan, device: str, lowered: Callable[[Plan], Program]
) -> Plan:
    """`plan`, with what must be computed again if that was left open. `lowered` makes the program of a plan.

    Raises StrategyError for a plan that needs more than the limit.
    """
    limit, asked = config.parallel.memory_limit, config.parallel.recompute
    if limit is None:
        return plan
    updating = updating_of(config, graph, device)
    if asked.operators == "auto":
        wanted = WantedRecompute("full", asked.modules, asked.communication, asked.slice_inputs)
        return Fitting(graph, plan, wanted, updating, machine_of(device), lowered).within(limit)
    check_limit(memory(trace(lowered(plan), updating), updating), limit, plan, updating)
    return plan


def check_stages(
    config: Config, graph: OperatorGraph, plan: Plan, device: str, programs: Sequence[Program], schedule: Schedule
) -> None:
    """The same for the stages of a pipeline. Raises StrategyError."""
    limit = config.parallel.memory_limit
    updating = updating_of(config, graph, device)
    for program, actions in zip(programs, schedule, strict=True) if limit is not None else ():
        check_limit(under_way(memory(trace(program, updating), updating), held(actions)), limit or 0, plan, updating)
