"""The execution of one rank in any mode: a loss from local batch entries, the tensors behind it, and how to evaluate.

`_sharded` runs the program of the plan, `_staged` that of one stage of a pipeline; `_alone` the user's own module on
one process; `_hybrid` the user's module with its own collectives. All are described by a `Program` (for the last
two without instructions), so that gradients, checkpoints and verification handle all modes uniformly.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule

from runner.build.modules import objective
from runner.errors import ConfigError
from runner.launch.orders import RankContext
from runner.planning import lowering
from runner.planning.prepare import WEIGHTS, Prepared
from runner.training import eager
from strategies import collectives
from strategies.core.graph import OperatorGraph, Source
from strategies.core.layout import Block, Layout
from strategies.core.mesh import Mesh
from strategies.core.program import Program
from strategies.core.steps import ReshardingPath
from strategies.lowering.pipeline import Stage, joined
from strategies.lowering.pipeline_schedule import stages_of
from strategies.resharding.path import resharding_path
from strategies.rules.random import mix
from strategies.runtime import compiled
from strategies.runtime import initial_weights as weights
from strategies.runtime.communicator import Communicator
from strategies.runtime.compiled import as_key
from strategies.runtime.flight_recorder import recorder
from strategies.runtime.module_tree import MODULE, OPERATORS, build
from strategies.runtime.peers import Peers
from strategies.runtime.pipeline_stage import RankStage, StageRunner
from strategies.runtime.transfer import filled, in_order

Forward = Callable[[Callable[..., Any], Sequence[Tensor], int], Any]
Axes = Callable[[Program], Iterable[Sequence[str]]]
Slices = Callable[[Sequence[Program]], dict[str, Tensor]]


@dataclass(frozen=True)
class ShortExecution:
    """An `Execution` for the short last micro-batch of an epoch: on the same tensors, and in a pipeline run by its
    runner."""

    module: nn.Module | None
    forward: Forward
    blocks: tuple[Block, ...]
    loss_axes: tuple[str, ...]


@dataclass(frozen=True)
class Execution:
    """`module` computes the loss through `forward(module, local entries, key)`; `evaluations` maps rows to (module,
    program), and is empty where the module itself is evaluated; `tensors` are the local slices by name; `blocks` the
    part of the global micro-batch that this rank reads, per entry."""

    program: Program
    communicator: Communicator
    module: nn.Module
    forward: Forward
    tensors: Mapping[str, Tensor]
    blocks: tuple[Block, ...]
    evaluations: Mapping[int, tuple[nn.Module, Program]]
    runner: StageRunner | None = None
    """What runs the stages of this rank, in a pipeline: then `program` and `module` hold all of them, and are not run
    themselves."""
    loss_divisor: int = 1
    """The sum of the ranks' losses over `program.loss_axes`, divided by this, is the loss."""
    short: ShortExecution | None = None

    def full_tensor(self, source: Source, shard: Tensor) -> Tensor:
        """All-gather the full tensor of a source from the ranks' shards (collective)."""
        gathered = self.communicator.carried(_to_replicated(source, self.program), shard)
        return in_order(gathered, self.program.layouts[source.id], self.program.mesh)


def execution(prepared: Prepared, rank: RankContext, folder: Path, axes: Axes) -> Execution:
    """Build what `rank` runs. `axes` names the groups that the optimizer parallel needs. Collective."""
    if prepared.stages:
        return _staged(prepared, rank, folder, axes)
    builders = {"hybrid": _hybrid, "stand_alone": _alone}
    return builders.get(prepared.config.parallel.mode, _from_folder)(prepared, rank, folder, axes)


def _from_folder(prepared: Prepared, rank: RankContext, folder: Path, axes: Axes) -> Execution:
    return sharded(prepared, rank, partial(_tensors, rank=rank.rank, device=rank.device, folder=folder), axes)


def sharded(prepared: Prepared, rank: RankContext, slices: Slices, axes: Axes) -> Execution:
    """Build what `rank` runs of a plan without a pipeline. Collective.

    Args:
        prepared: with a plan.
        rank: the identity of this rank.
        slices: returns this rank's slices of the tensors of programs.
        axes: names the groups that are needed besides those of the programs.
    """
    assert prepared.step is not None
    config, short, compile_ = prepared.config, prepared.short, prepared.config.train.compile
    graph, plan = prepared.step
    program = lowering.training_program(config, graph, plan.of_rank(rank.rank))
    evaluations = {
        rows: lowering.evaluation_program(config, evaluation.graph, evaluation.plan)
        for rows, evaluation in prepared.evaluations.items()
    }
    used = [*program.axes, *axes(program), *chain(*(one.axes for one in evaluations.values()))]
    short_program = None
    if short is not None and short.graph is not None and short.plan is not None:
        reductions = lowering.with_reductions({id(short.graph): program.reductions})
        short_program = lowering.training_program(config, short.graph, short.plan, reductions)
        used += short_program.axes
    communicator = Communicator(program.mesh, rank.rank, used)
    tensors = slices([program, *evaluations.values(), *([] if short_program is None else [short_program])])
    module = build(program, tensors, communicator, rank.device, compiled=compile_)
    if compile_:
        compiled.compile_units(module, prepared.device, leaves=config.parallel.zero.stage == 3)
    modules = {
        rows: (build(own, tensors, communicator.sliced_as(own.mesh), rank.device), own)
        for rows, own in evaluations.items()
    }
    recorder.explain({operator.name: operator.where for operator in prepared.step[0].operators})
    forward = _calling(program, prepared.step[0], compile_)
    short_execution = None
    if short is not None and short.graph is not None and short_program is not None:
        short_execution = ShortExecution(
            build(short_program, tensors, communicator.sliced_as(short_program.mesh), rank.device),
            _calling(short_program, short.graph, False),
            _blocks(prepared, short_program, rank.rank),
            short_program.loss_axes,
        )
    blocks = _blocks(prepared, program, rank.rank)
    return Execution(program, communicator, module, forward, tensors, blocks, modules, short=short_execution)


def _tensors(programs: Sequence[Program], rank: int, device: str, folder: Path) -> dict[str, Tensor]:
    """This rank's slices of the tensors of `programs`; those that several have are sliced as the first one does."""
    tensors: dict[str, Tensor] = {}
    for program in programs:
        tensors |= weights.read_slices(folder / WEIGHTS, program, rank, device, known=tensors)
    return tensors


def _calling(program: Program, graph: OperatorGraph, compiled: bool) -> Forward:
    """Calls a module made from `program`, which takes slices of one size: those at the end of rows that do not divide
    are filled up. An error names the operator of `graph` that it comes from."""
    shapes = [program.layouts[one.id].local_shape(one.spec.shape, program.mesh) for one in program.inputs]

    def forward(model: Callable[..., Any], entries: Sequence[Tensor], key: int) -> Any:
        entries = [filled(entry, shape) for entry, shape in zip(entries, shapes, strict=True)]
        with naming_operator(graph):
            return model(*entries, as_key(key) if compiled else key) if program.random else model(*entries)

    return forward


@contextmanager
def naming_operator(graph: OperatorGraph) -> Iterator[None]:
    """Note in an error of generated code the operator of `graph` that it comes from."""
    try:
        yield
    except Exception as error:
        if (operator := blamed(error, graph)) is not None:
            error.operator = operator  # type: ignore[attr-defined]
        raise


class Stages(nn.Module):
    """The modules of the stages of one rank. Each of them names all parameters that the rank holds."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        for number, module in enumerate(modules):
            self.add_module(f"stage_{number}", module)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return next(self.children()).named_parameters(*args, **kwargs)


def _staged(prepared: Prepared, rank: RankContext, folder: Path, axes: Axes) -> Execution:
    """The stages of a pipeline that this rank runs: ranks of the first group come first."""
    assert prepared.plan is not None
    config, stages = prepared.config, prepared.stages
    assert prepared.schedule is not None
    count, owners = len(prepared.schedule), prepared.owners
    number, local = divmod(rank.rank, prepared.plan.mesh.size)
    groups = [stages_of(group, owners) for group in range(count)]
    mine = groups[number]
    programs = lowering.pipeline_programs(config, stages, owners, lowering.training_options(config))
    evaluations = {
        rows: lowering.pipeline_programs(config, evaluation.stages, owners, lowering.evaluation_options(config))
        for rows, evaluation in prepared.evaluations.items()
    }
    by_group = [joined([stages[k] for k in ks], [programs[k] for k in ks]) for ks in groups]
    program = by_group[number]
    # A group of ranks across the stages is named by how many each rank has made before.
    used = [names for of_group in by_group for names in (*of_group.axes, *axes(of_group))]
    used += chain(*(of_stage.axes for evaluation in evaluations.values() for of_stage in evaluation))
    short = () if prepared.short is None else prepared.short.stages
    short_programs: Sequence[Program] = ()
    if short:
        pairs = zip(short, programs, strict=False)
        reductions = lowering.with_reductions({id(stage.graph): own.reductions for stage, own in pairs})
        short_programs = lowering.pipeline_programs(
            config, short, owners, lowering.training_options(config), reductions
        )
        used += chain(*(one.axes for one in short_programs))
    communicator = Communicator(program.mesh, local, used, stage=number, stages=count)
    evaluated = [evaluation[k] for evaluation in evaluations.values() for k in mine]
    shorter = [short_programs[k] for k in mine] if short else []
    tensors = _tensors([program, *evaluated, *shorter], local, rank.device, folder)

    def unit(stage: Stage, lowered: Program, trains: bool, compile_: bool = False) -> tuple[RankStage, nn.Module]:
        module = build(lowered, tensors, communicator, rank.device, compiled=compile_)
        module.meta[MODULE] = ""
        if compile_:
            compiled.compile_units(module, prepared.device)
        forward = _calling(lowered, stage.graph, compile_)
        trained = tuple(tensors[name] for name in lowered.reductions) if trains else ()
        return RankStage(stage, lowered, partial(forward, module), trained), module

    units = [unit(stages[k], programs[k], True, config.train.compile) for k in mine]
    evaluation_stages = {
        rows: [unit(evaluation.stages[k], evaluations[rows][k], False)[0] for k in mine]
        for rows, evaluation in prepared.evaluations.items()
    }
    recorder.explain({operator.name: operator.where for k in mine for operator in stages[k].graph.operators})
    peers = Peers(communicator, stages, owners)
    short_units = [unit(short[k], short_programs[k], True)[0] for k in mine] if short else []
    runner = StageRunner(
        peers,
        [stage for stage, _ in units],
        prepared.schedule,
        config.parts,
        rank.device,
        evaluation_stages,
        short_units,
    )
    short_execution = None
    if short:
        own = joined([short[k] for k in mine], [short_programs[k] for k in mine])
        short_execution = ShortExecution(None, _not_run, _blocks(prepared, own, local), own.loss_axes)
    modules = [module for _, module in units]
    module = modules[0] if len(modules) == 1 else Stages(modules)
    blocks = _blocks(prepared, program, local)
    return Execution(program, communicator, module, _not_run, tensors, blocks, {}, runner, short=short_execution)


def _not_run(module: Callable[..., Any], entries: Sequence[Tensor], key: int) -> Any:
    raise AssertionError("the stages of a pipeline are run by its runner")


def blamed(error: BaseException, graph: OperatorGraph) -> str | None:
    """The operator, with its source line in the user's model, whose generated code raised `error`.

    A line of generated code assigns a value: `linear_1 = torch.ops.aten.linear.default(...)`. Layers share their code;
    the unit that ran it knows what computes this value there.
    """
    trace = error.__traceback__
    pairs = zip(traceback.walk_tb(trace), traceback.extract_tb(trace), strict=True)
    for (frame, _), line in reversed(list(pairs)):
        unit = frame.f_locals.get("self")
        if line.filename.startswith("<eval_with_key>") and isinstance(unit, GraphModule):
            values, operators = unit.meta[OPERATORS]
            value = (line.line or "").partition(" = ")[0]
            if value in values:
                name = operators[values.index(value)]
                return graph.by_name[name].where if name in graph.by_name else str(name)
    return None


def _blocks(prepared: Prepared, program: Program, rank: int) -> tuple[Block, ...]:
    """What `rank` holds of the entries of a batch, which come before weights of means and what earlier stages send."""
    entries = program.inputs[: len(prepared.names)]
    return tuple(program.layouts[one.id].block(one.spec.shape, program.mesh, rank) for one in entries)


def _alone(prepared: Prepared, rank: RankContext, folder: Path, axes: Axes) -> Execution:
    """The eager module, untouched; random operators draw from stateless keys, so that runs can be resumed and
    compared."""
    step = objective(prepared.config, prepared.names).to(rank.device).train()
    if prepared.means:
        step = step.weighed(len(prepared.means))
    module = eager.Eager(step, single_draws=prepared.single_draws)
    eager.start_from(module, weights.read_all(folder / WEIGHTS))
    if prepared.nudged is not None:
        eager.nudge(module, *prepared.nudged)
    mesh = Mesh((("world", 1),))
    program = eager.described(module, mesh, prepared, {})
    tensors, blocks = module.tensors(), _blocks(prepared, program, 0)
    short = None
    if prepared.short is not None:
        rows = (0, prepared.short.rows)
        short = ShortExecution(None, eager.forward, tuple((rows, *beyond) for _, *beyond in blocks), ())
    return Execution(program, Communicator(mesh, 0), module, eager.forward, tensors, blocks, {}, short=short)


def _hybrid(prepared: Prepared, rank: RankContext, folder: Path, axes: Axes) -> Execution:
    """The user's module with its own collectives. Gradients of J = mean of the ranks' losses: the sum over a
    parameter's replica group divided by the world size (which a sharded optimizer divides by itself)."""
    mesh = eager.hybrid_mesh(prepared)
    communicator = Communicator(mesh, rank.rank)
    collectives.use(communicator)
    step = objective(prepared.config, prepared.names).to(rank.device).train()
    module = eager.Eager(step)
    program = eager.described(module, mesh, prepared, eager.hybrid_inputs(prepared, mesh, prepared.rows))
    eager.take(module, weights.read_slices(folder / WEIGHTS, program, rank.rank, rank.device, pretrained=True))
    communicator.prepare([program.loss_axes, *axes(program)])
    if prepared.config.parallel.zero.stage == 0:
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: gradient / mesh.size)  # type: ignore[no-untyped-call]
    tensors, blocks = module.tensors(), _blocks(prepared, program, rank.rank)
    rows = program.layouts[program.sources[0].id].dims[0]  # the axes that slice the rows of the first batch entry

    def forward(model: Callable[..., Any], entries: Sequence[Tensor], key: int) -> Tensor:
        """Other rows draw other random numbers, ranks that share rows the same."""
        return eager.forward(model, entries, mix(key, mesh.index(rank.rank, rows)) if rows else key)

    short = None
    if prepared.short is not None:
        shapes = [(prepared.short.rows, *shape[1:]) for shape in prepared.shapes]
        try:
            fed = eager.hybrid_inputs(prepared, mesh, prepared.short.rows)
        except ConfigError as error:
            raise ConfigError(
                "MW325", f"data.drop_last = false: an epoch ends with {prepared.short.rows} rows. {error}"
            ) from error
        parts = [fed[name].block(shape, mesh, rank.rank) for name, shape in zip(prepared.names, shapes, strict=True)]
        short = ShortExecution(None, forward, tuple(parts), program.loss_axes)
    return Execution(program, communicator, module, forward, tensors, blocks, {}, loss_divisor=mesh.size, short=short)


def gather_axes(program: Program, sources: Iterable[Source] | None = None) -> list[tuple[str, ...]]:
    """The groups that `full_tensor` needs for `sources`; None: every parameter."""
    wanted = program.parameters if sources is None else sources
    return list(dict.fromkeys(step.axes for source in wanted for step in _to_replicated(source, program)))


def _to_replicated(source: Source, program: Program) -> ReshardingPath:
    shape, layout = source.spec.shape, Layout(program.layouts[source.id].dims)
    return resharding_path(layout, Layout.replicated(len(shape)), shape, program.mesh)
