"""What a config says about a pipeline, in the engine's terms: stages, their programs, the schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runner.config.schema import Config
from runner.errors import ConfigError
from runner.planning import communication
from strategies.core.graph import OperatorGraph
from strategies.core.plan import Plan
from strategies.core.program import LoweringOptions, Program
from strategies.lowering.device_placement import on_host, place
from strategies.lowering.fusion import fuse
from strategies.lowering.lowering import lower, random_ordinals
from strategies.lowering.pipeline.cutting import Stage, cut, cut_evaluation
from strategies.lowering.pipeline.programs import stage_programs
from strategies.lowering.pipeline.schedule import Schedule, make_schedule
from strategies.lowering.pipeline.stage_assignment import as_trained, in_stages


def groups_of(config: Config) -> int:
    """How many groups of ranks share the stages; 1 without a pipeline."""
    return config.parallel.pipeline.known or 1


def turns(accumulate: int, stages: int, micro_batches: int) -> int:
    """How many micro-batches one after another make a step: a stage waits for as many as there are other stages."""
    return accumulate * (micro_batches + stages - 1)


def check_ranks(config: Config, world_size: int) -> None:
    """Where world_size is left open, only now is it known. Raises ConfigError."""
    stages = groups_of(config)
    if world_size % stages:
        raise ConfigError(
            "MW431",
            f"There are {world_size} ranks (world_size is null: as many as devices), which cannot be divided among "
            f"parallel.pipeline.stages = {stages}; set world_size to a multiple of {stages}.",
        )
    ranks, rows = world_size // stages, config.data.batch_size // config.parts
    if stages > 1 and config.parallel.mode == "data_parallel" and rows % ranks:
        raise ConfigError(
            "MW412",
            f"parallel.mode = data_parallel slices the batch over the {ranks} ranks of a stage, but a micro-batch has "
            f"{rows} samples (data.batch_size / train.accumulate / parallel.pipeline.micro_batches); take a "
            f"multiple of {ranks}, or fewer parallel.pipeline.micro_batches.",
        )


def stages_of(config: Config, graph: OperatorGraph, plan: Plan, options: LoweringOptions) -> tuple[Stage, ...]:
    """The stages of a training graph; none without a pipeline. Raises StrategyError for cuts that do not fit the
    model."""
    wanted = config.parallel.pipeline
    if wanted.known is None:
        return ()
    placed = in_stages(graph, wanted.known, wanted.cuts, wanted.virtual)
    return cut(graph, plan, placed, random_ordinals(graph, plan, options))


def evaluation_stages(
    stages: Sequence[Stage], graph: OperatorGraph, plan: Plan, options: LoweringOptions
) -> tuple[Stage, ...]:
    """The stages of an evaluation graph, for the ranks that run those of training; none without a pipeline."""
    if not stages:
        return ()
    placed = as_trained(graph, stages)
    return cut_evaluation(graph, plan, placed, random_ordinals(graph, plan, options), len(stages))


def programs_of(
    config: Config, stages: Sequence[Stage], options: LoweringOptions, lower: Callable[..., Program] = lower
) -> tuple[Program, ...]:
    """The program of every stage, with its operators placed, its collectives joined and started early, as is asked.
    `lower` makes them."""
    joined, found = communication.joined(config), []
    for stage, program in zip(stages, stage_programs(stages, groups_of(config), options, lower), strict=True):
        placed = place(program, on_host(stage.graph, config.parallel.place, strict=False))
        found.append(communication.beside_computation(fuse(placed, joined), stage.graph, stage.plan, config))
    return tuple(found)


def schedule_of(config: Config) -> Schedule:
    """The order in which the groups of ranks work."""
    wanted = config.parallel.pipeline
    return make_schedule(wanted.schedule, groups_of(config), wanted.parts, wanted.virtual)
