"""Preparation of a module and a batch that are in memory: what `prepare` and `prepare_decided` do for those that a
config names. Everything else of the plan is still said by a config.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from runner.config.schema import Config
from runner.planning import lowering
from runner.planning.clusters import cluster_of, device_of
from runner.planning.estimate import Programs, estimate, settings_of
from runner.planning.joint import JointDecision, choice_of, with_choice
from runner.planning.prepare import Prepared, check_model, with_plan
from runner.planning.sources import request_of, with_recompute
from strategies.capture import Captured, Objective, capture
from strategies.core.errors import StrategyError
from strategies.core.gc_paused import gc_paused
from strategies.core.graph import OperatorGraph
from strategies.core.plan import Plan
from strategies.core.request import check
from strategies.lowering.device_placement import on_host
from strategies.memory.parts import over
from strategies.memory.repeated_blocks import Traces


def prepare_given(
    config: Config,
    step: Objective,
    tensors: Sequence[Tensor],
    say: Callable[[str], None],
    plan_of: Callable[[OperatorGraph], tuple[OperatorGraph, Plan]] | None = None,
) -> tuple[Prepared, Captured]:
    """Capture and plan a step.

    Args:
        config: its `model`, `loss` and `data` are names for messages; `data.batch_size` is that of `tensors`.
        step: model and loss.
        tensors: a global batch.
        say: prints notices for the user.
        plan_of: the plan of a graph, instead of a search, and the graph with the weights packed that it packs.

    Returns:
        The preparation, with a config in which nothing is open, and what was captured of `step`.

    Raises:
        ConfigError, StrategyError: as `prepare_decided`.
    """
    device, world_size = device_of(config)
    captured, plan = capture(step, tensors, training=True), None
    check_model(config, step)
    on_host(captured.graph, config.parallel.place)
    lowering.check_ranks(config, world_size)
    lowering.rows_per_split(config)
    if plan_of is not None:
        request = request_of(config, lowering.planned_ranks(config, world_size))
        graph, plan = plan_of(captured.graph)
        captured, plan = replace(captured, graph=graph), with_recompute(plan, graph, request)
    elif config.parallel.open or config.parallel.memory_limit is not None:
        given = {config.data.batch_size: (step, captured, list(tensors))}
        plan = JointDecision(config, say, given).plan()
        if config.parallel.open:
            config = with_choice(config, choice_of(plan.search["decided"]), plan.recompute)
    elif config.parallel.plan is None:
        check(request_of(config, lowering.planned_ranks(config, world_size)))
    prepared = Prepared(
        config,
        world_size,
        device,
        step.names,
        tuple(tuple(tensor.shape) for tensor in tensors),
        tuple(name for name in step.names if name in step.targets),
        config.data.batch_size,
        graph=None,
        plan=None,
        evaluations={},
        digest="",
        steps=1,
        published=frozenset(step.model.state_dict()),
    )
    prepared = with_plan(prepared, step, tensors, captured.graph, plan, say)
    if plan_of is not None and config.parallel.memory_limit is not None:
        _check_limit(prepared, config.parallel.memory_limit)
    return prepared, captured


def _check_limit(prepared: Prepared, limit: int) -> None:
    """Raises StrategyError where a plan that was not searched needs more bytes of a rank than the limit."""
    assert prepared.step is not None
    config, (graph, plan) = prepared.config, prepared.step
    cluster = cluster_of(config, prepared.device, prepared.world_size)
    settings = settings_of(config, graph, prepared.device)
    with gc_paused():
        found = estimate(config, prepared.step, settings, cluster, Programs(), Traces(), prepared.schedule)
    needed = max(found.memories, key=lambda one: one.peak)
    if needed.peak > limit:
        raise StrategyError("MW501", over(needed, limit, settings, recomputes=plan.recompute is not None))
