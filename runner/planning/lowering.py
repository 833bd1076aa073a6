"""Lowering options from a config: options, fused and overlapped collectives, pipeline stages, batch splits,
and the programs of training and evaluation steps that follow.

Invariant: DeepSpeed's defaults apply unless the config changes them, and `parallel.zero.options` come last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from runner.config.schema import Config
from runner.errors import ConfigError
from runner.planning.clusters import DESCRIBING, cluster_of, device_of
from strategies.capture import Objective, capture
from strategies.core.errors import StrategyError
from strategies.core.graph import OperatorGraph
from strategies.core.plan import Plan
from strategies.core.program import LoweringOptions, Program
from strategies.cost.roofline import flops_of
from strategies.cost.step import works_of
from strategies.lowering.batch_splits import split_batch
from strategies.lowering.device_placement import on_host, place_on_host
from strategies.lowering.fusion import KINDS, LARGEST, fuse
from strategies.lowering.lowering import lower, random_ordinals
from strategies.lowering.overlap import overlap
from strategies.lowering.pipeline import Stage, as_trained, cut, cut_evaluation, in_stages, stage_programs
from strategies.lowering.pipeline_schedule import Schedule, make_schedule
from strategies.optimizer.buckets import buckets
from strategies.optimizer.updates import BucketLimits

Lower = Callable[..., Program]
"""As `strategies.lowering.lowering.lower`."""


def training_options(config: Config) -> LoweringOptions:
    """How training graphs are lowered."""
    return replace(evaluation_options(config), sharded_optimizer=config.parallel.zero.known > 0, partial_loss=True)


def evaluation_options(config: Config) -> LoweringOptions:
    """How evaluation graphs are lowered."""
    ring = config.parallel.context_parallel == "ring"
    return LoweringOptions(config.train.random == "exact", wide_sums=reduces_in_fp32(config), ring=ring)


def reduces_in_fp32(config: Config) -> bool:
    """Whether collectives reduce values of fewer bits in fp32.

    By default on CPU only: a GPU has fast products for such values alone and accumulates its own part in fp32. A
    machine that is only described counts as a GPU if its flops in bf16 exceed those in fp32.
    """
    wanted, machine = config.parallel.reduce_precision, config.cluster.machine
    if wanted != "auto":
        return wanted == "fp32"
    if machine is not None and config.job.name in DESCRIBING:
        return machine.flops.get("bfloat16", 0.0) <= machine.flops["float32"]
    return device_of(config)[0] == "cpu"


def training_program(config: Config, graph: OperatorGraph, plan: Plan, lower: Lower = lower) -> Program:
    """The program of a training step without a pipeline.

    Raises:
        StrategyError: the config asks for something that this program cannot do.
    """
    program = _placed(config, graph, lower(graph, plan, training_options(config)))
    program = fuse(program, fused_bytes(config))
    buckets(program, bucket_cut(config))
    return _overlapped(program, graph, plan, config)


def evaluation_program(config: Config, graph: OperatorGraph, plan: Plan) -> Program:
    """The program of an evaluation step; operators in `parallel.place` may be absent from its graph."""
    return _placed(config, graph, lower(graph, plan, evaluation_options(config)))


def with_reductions(reductions: Mapping[int, Mapping[str, tuple[str, ...]]]) -> Lower:
    """A `Lower` for the short last batch, whose gradients must stay partial over the same axes as those of full ones.

    Args:
        reductions: the axes by parameter, for every graph by its `id()`.
    """

    def lower_with(graph: OperatorGraph, plan: Plan, options: LoweringOptions, **given: Any) -> Program:
        wanted = reductions[id(graph)]
        program = lower(graph, plan, options, **given | {"open_axes": wanted})
        if program.reductions != wanted:
            raise StrategyError(
                "MW325",
                "data.drop_last = false: a short last batch would reduce gradients over other ranks than full batches; "
                "use data.drop_last=true, or a data.batch_size that divides the samples.",
            )
        return program

    return lower_with


def _placed(config: Config, graph: OperatorGraph, program: Program) -> Program:
    return place_on_host(program, on_host(graph, config.parallel.place, strict=False))


# Collectives


def fused_bytes(config: Config) -> dict[str, int]:
    """The most bytes of one call, by kind of collective that may be fused."""
    sections = {kind: getattr(config.parallel.comm_fusion, kind) for kind in KINDS}
    return {
        kind: section.bytes if section.mode == "size" else LARGEST
        for kind, section in sections.items()
        if section.mode != "none"
    }


def _overlapped(program: Program, graph: OperatorGraph, plan: Plan, config: Config) -> Program:
    """`program` with redistributions beside independent computation. Compiled programs communicate synchronously:
    torch.compile would undo the interleaving."""
    if not config.parallel.comm_async or config.train.compile:
        return program
    return overlap(program, flops_of(graph, plan), by_unit=config.parallel.zero.stage == 3)


def bucket_cut(config: Config) -> BucketLimits:
    """How gradients are divided into buckets at ZeRO stage 0."""
    section = config.parallel.comm_fusion.all_reduce
    if isinstance(section.config, tuple):
        return BucketLimits(at=section.config)
    return BucketLimits(0) if section.mode == "none" else BucketLimits(section.bytes)


def overlaps_backward(config: Config) -> bool:
    """Whether gradients are reduced during backward. Not for a hybrid module: it may run parts of
    backward twice, so no point is known at which a gradient is complete."""
    return config.parallel.comm_overlap and config.parallel.mode not in ("stand_alone", "hybrid")


def deepspeed_options(config: Config) -> dict[str, Any]:
    """LoweringOptions of DeepSpeed's ZeRO: bucket sizes from `parallel.comm_fusion`, then `parallel.zero.options`. Our
    own ZeRO has one kind of buckets."""
    zero, fusion = config.parallel.zero, config.parallel.comm_fusion
    sections = {"reduce_bucket_size": fusion.reduce_scatter if zero.known == 3 else fusion.all_reduce}
    if zero.known < 3 and config.zero_engine == "deepspeed":
        sections["allgather_bucket_size"] = fusion.all_gather
    elements = {
        key: section.bytes // 4
        for key, section in sections.items()
        if section.mode == "size" and section.bytes is not None
    }
    return {key: max(count + count % 2, 2) for key, count in elements.items()} | dict(zero.options)


def planned_ranks(config: Config, world_size: int) -> int:
    """The ranks of `world_size` that a plan slices its operators over."""
    if config.parallel.elastic:
        return config.parallel.server.working(world_size)
    return world_size // pipeline_groups(config)


# Pipelines


def pipeline_groups(config: Config) -> int:
    """How many groups of ranks share the stages; 1 without a pipeline."""
    return config.parallel.pipeline.known or 1


def pipeline_slots(accumulate: int, stages: int, micro_batches: int) -> int:
    """The number of consecutive micro-batch slots of a step, including the pipeline bubble."""
    return accumulate * (micro_batches + stages - 1)


def check_ranks(config: Config, world_size: int) -> None:
    """Check what depends on a `world_size` that the config leaves open. Raises ConfigError."""
    stages = pipeline_groups(config)
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


def check_written(config: Config, graph: OperatorGraph) -> None:
    """Raises ConfigError where forward writes a parameter that learns, of which there are copies: the optimizer's, or
    what a compiled backward computes with."""
    stage, precision = config.parallel.zero.known, config.train.precision
    causes = [f"parallel.zero.stage = {stage}"] if stage else []
    causes += [f"train.precision = {precision}"] if precision in ("bf16", "fp16") else []
    causes += ["train.compile = true"] if config.train.compile else []
    if causes and graph.written:
        raise ConfigError(
            "MW451",
            f"{causes[0]}: the model's forward writes its parameter {graph.written[0]}, and copies of it would not "
            "follow; use parallel.zero.stage=0 in fp32, fp64 or bf16_autocast without train.compile, or freeze the "
            "parameter.",
        )


def cut_of(config: Config, graph: OperatorGraph, plan: Plan, owners: Sequence[int]) -> tuple[Stage, ...]:
    """The stages of a training graph, run by `owners`; none without a pipeline.

    Raises:
        StrategyError: `parallel.pipeline.cuts` do not fit the model.
    """
    section = config.parallel.pipeline
    if section.known is None:
        return ()
    seconds = _seconds_by_stage(config, graph, plan, owners) if config.cluster.groups and section.cuts == "auto" else ()
    assignment = in_stages(graph, section.known, section.cuts, section.virtual, seconds)
    return cut(graph, plan, assignment, random_ordinals(graph, training_options(config)))


def _seconds_by_stage(config: Config, graph: OperatorGraph, plan: Plan, owners: Sequence[int]) -> list[list[float]]:
    """The seconds of forward and backward of every operator on the devices of each stage."""
    groups, ranks = pipeline_groups(config), plan.mesh.size
    cluster = cluster_of(config, device_of(config)[0], groups * ranks)
    own = [cluster.of_group(group, ranks) for group in owners]
    works = {one: works_of(graph, plan, one) for one in dict.fromkeys(own)}
    return [[work.forward + work.backward for work in works[one]] for one in own]


def stages_as(config: Config, stages: Sequence[Stage], graph: OperatorGraph, plan: Plan) -> tuple[Stage, ...]:
    """The training graph of another batch size in the same stages; none without a pipeline."""
    if not stages:
        return ()
    return cut(graph, plan, as_trained(graph, stages), random_ordinals(graph, training_options(config)))


def evaluation_stages(config: Config, stages: Sequence[Stage], graph: OperatorGraph, plan: Plan) -> tuple[Stage, ...]:
    """An evaluation graph in the stages of training; none without a pipeline."""
    if not stages:
        return ()
    ordinals = random_ordinals(graph, evaluation_options(config))
    return cut_evaluation(graph, plan, stages, ordinals)


def pipeline_programs(
    config: Config, stages: Sequence[Stage], owners: Sequence[int], options: LoweringOptions, lower: Lower = lower
) -> tuple[Program, ...]:
    """The program of every stage, with device placement, fused and overlapped collectives as configured."""
    programs = stage_programs(stages, owners, options, lower)
    return tuple(
        _overlapped(fuse(_placed(config, stage.graph, program), fused_bytes(config)), stage.graph, stage.plan, config)
        for stage, program in zip(stages, programs, strict=True)
    )


def schedules_of(config: Config) -> tuple[Schedule, ...]:
    """The order in which the groups of ranks run forward and backward of micro-batches. With `auto` there is one for
    every placement of stages, under whose first plans are compared: 1f1b, or its like for several stages per rank;
    `runner.planning.schedules` then makes that of the plan."""
    section, kinds = config.parallel.pipeline, [str(config.parallel.pipeline.schedule)]
    if section.schedule == "auto":
        kinds = {1: ["1f1b"], 2: ["interleaved_1f1b", "zbv"]}.get(section.virtual, ["interleaved_1f1b"])
    return tuple(make_schedule(kind, pipeline_groups(config), section.parts, section.virtual) for kind in kinds)


# Batch splits


def rows_per_split(config: Config) -> int:
    """Rows of a micro-batch in each batch split (`parallel.copies`). Raises ConfigError unless they divide evenly."""
    rows, count = config.data.batch_size // config.parts, config.parallel.copies
    if rows % count:
        raise ConfigError(
            "MW440",
            f"parallel.copies = {count} divides the rows of a micro-batch, but there are {rows} (data.batch_size = "
            f"{config.data.batch_size} in {config.parts} micro-batches); take a multiple of {count}, or fewer copies.",
        )
    return rows // count


def training_step(
    config: Config, objective: Objective, tensors: Sequence[Tensor], graph: OperatorGraph, plan: Plan
) -> tuple[OperatorGraph, Plan]:
    """The graph and plan of a training step: the model's own, or both with an operator per batch split. For all plans
    of a graph the model is captured a second time, with the rows of one split, which shows every size that depends on
    them.

    Raises:
        ConfigError, StrategyError: the batch cannot be split.
    """
    count = config.parallel.copies
    if count == 1:
        return graph, plan
    rows, split = config.data.batch_size // config.parts, rows_per_split(config)
    short = [one[:split] if one.dim() and len(one) == rows else one for one in tensors]
    try:
        part = graph.once(("rows", split), lambda: capture(objective, short, training=True, like=graph).graph)
    except StrategyError as error:
        raise StrategyError(
            error.code,
            f"{error} With parallel.copies = {count} it gets {split} of the {rows} rows at a time; take copies=1 for a "
            "model that depends on their number.",
        ) from error
    made = split_batch(graph, part, plan, count, split, exact=config.train.random == "exact")
    return made.graph, made.plan
