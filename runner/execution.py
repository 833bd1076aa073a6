"""What one rank runs, whatever the mode: a loss from local batch entries, the tensors behind it, and how to evaluate.

`_sharded` runs the program of the plan, `_staged` that of one stage of a pipeline; `_alone` the user's own module on
one process; `_hybrid` the user's module with its own collectives. All are described by a `Program` (for the last
two without instructions), so that gradients, checkpoints and verification need not know the difference.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from runner import eager
from runner.building import objective
from runner.prepare import WEIGHTS, Prepared, lowered, lowered_evaluation, schedule_of, stage_program
from runner.worker import RankContext
from strategies import collectives
from strategies.engine import compiled, weights
from strategies.engine.communicator import Communicator
from strategies.engine.drawn import as_key
from strategies.engine.partition import build
from strategies.engine.program import Program
from strategies.engine.stages import Peers, StageRunner
from strategies.graph import OperatorGraph, Source
from strategies.layout import Block, Layout
from strategies.mesh import Mesh
from strategies.redistribution import LOCAL, Chain, chain
from strategies.rules.random import mix

Forward = Callable[[Callable[..., Any], Sequence[Tensor], int], Any]
Axes = Callable[[Program], Iterable[Sequence[str]]]


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
    """What runs the stage of this rank, in a pipeline: then `module` returns what the next stage receives."""
    loss_divisor: int = 1
    """The sum of the ranks' losses over `program.loss_axes`, divided by this, is the loss."""


def execution(prepared: Prepared, rank: RankContext, folder: Path, axes: Axes) -> Execution:
    """Build what `rank` runs. `axes` names the groups that the optimizer parallel needs. Collective."""
    if prepared.stages:
        return _staged(prepared, rank, folder, axes)
    builders = {"hybrid": _hybrid, "stand_alone": _alone}
    return builders.get(prepared.config.parallel.mode, _sharded)(prepared, rank, folder, axes)


def _sharded(prepared: Prepared, rank: RankContext, folder: Path, axes: Axes) -> Execution:
    assert prepared.graph is not None and prepared.plan is not None
    program = lowered(prepared.config, prepared.graph, prepared.plan)
    evaluations = {
        rows: lowered_evaluation(prepared.config, one.graph, one.plan) for rows, one in prepared.evaluations.items()
    }
    used = [*_axes_used(program), program.loss_axes, *axes(program)]
    for evaluation in evaluations.values():
        used += _axes_used(evaluation)
    communicator = Communicator(program.mesh, rank.rank, used)
    tensors = weights.read_slices(folder / WEIGHTS, program, rank.rank, rank.device)
    for evaluation in evaluations.values():
        tensors = weights.read_slices(folder / WEIGHTS, evaluation, rank.rank, rank.device) | tensors
    module = build(program, tensors, communicator, rank.device, compiled=prepared.config.train.compile)
    if prepared.config.train.compile:
        compiled.compile_units(module, prepared.device, leaves=prepared.config.parallel.zero.stage == 3)
    modules = {rows: (build(one, tensors, communicator, rank.device), one) for rows, one in evaluations.items()}
    blocks = _blocks(program, rank.rank)

    forward = _calling(program, prepared.graph, prepared.config.train.compile)
    return Execution(program, communicator, module, forward, tensors, blocks, modules)


def _calling(program: Program, graph: OperatorGraph, compiled: bool) -> Forward:
    """Calls a module made from `program`; an error tells the operator of `graph` that it comes from."""

    def forward(model: Callable[..., Any], entries: Sequence[Tensor], key: int) -> Any:
        try:
            return model(*entries, as_key(key) if compiled else key) if program.random else model(*entries)
        except Exception as error:
            if (operator := blamed(error, program, graph)) is not None:
                error.operator = operator  # type: ignore[attr-defined]
            raise

    return forward


def _staged(prepared: Prepared, rank: RankContext, folder: Path, axes: Axes) -> Execution:
    """The stage of a pipeline that this rank belongs to: ranks of stage 0 come first."""
    assert prepared.plan is not None
    count, size = len(prepared.stages), prepared.plan.mesh.size
    number, local = divmod(rank.rank, size)
    stage = prepared.stages[number]
    program = stage_program(stage, prepared.config)
    used = [*_axes_used(program), program.loss_axes, *axes(program)]
    communicator = Communicator(program.mesh, local, used, stage=number, stages=count)
    tensors = weights.read_slices(folder / WEIGHTS, program, local, rank.device)
    module = build(program, tensors, communicator, rank.device)
    runner = StageRunner(Peers(stage, communicator), program, schedule_of(prepared.config)[number], rank.device)
    blocks = _blocks(program, local)[: len(prepared.names)]  # the batch comes before what earlier stages send
    forward = _calling(program, stage.graph, compiled=False)
    return Execution(program, communicator, module, forward, tensors, blocks, {}, runner)


def blamed(error: BaseException, program: Program, graph: OperatorGraph) -> str | None:
    """The operator, with its source line in the user's model, whose generated code raised `error`.

    A line of generated code assigns the instruction of the same name: `linear_1 = torch.ops.aten.linear.default(...)`.
    """
    by_id = {instruction.id: instruction.operator for instruction in program.instructions}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith("<eval_with_key>") and (name := by_id.get((frame.line or "").partition(" = ")[0])):
            return graph.by_name[name].where if name in graph.by_name else name
    return None


def _axes_used(program: Program) -> list[tuple[str, ...]]:
    chains = [r.forward for r in program.redistributions]
    chains += [r.backward for r in program.redistributions if r.differentiable]
    return list(
        dict.fromkeys(
            [*(step.axes for steps in chains for step in steps if step.kind not in LOCAL), *program.replicas.values()]
        )
    )


def _blocks(program: Program, rank: int) -> tuple[Block, ...]:
    inputs = [source for source in program.sources if source.kind == "input"]
    return tuple(program.layouts[source.id].block(source.spec.shape, program.mesh, rank) for source in inputs)


def _alone(prepared: Prepared, rank: RankContext, folder: Path, axes: Axes) -> Execution:
    """The eager module, untouched; random operators draw from stateless keys, so that runs can be resumed and
    compared."""
    step = objective(prepared.config, prepared.names).to(rank.device).train()
    module = eager.Eager(step)
    eager.start_from(module, weights.read_whole(folder / WEIGHTS))
    mesh = Mesh((("world", 1),))
    program = eager.described(module, mesh, prepared, {})
    tensors = eager.tensors_of(step)
    return Execution(program, Communicator(mesh, 0), module, eager.forward, tensors, _blocks(program, 0), {})


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
    tensors, blocks = eager.tensors_of(step), _blocks(program, rank.rank)
    rows = program.layouts[program.sources[0].id].dims[0]  # the axes that slice the rows of the first batch entry

    def forward(model: Callable[..., Any], entries: Sequence[Tensor], key: int) -> Tensor:
        """Other rows draw other random numbers, ranks that share rows the same."""
        return eager.forward(model, entries, mix(key, mesh.index(rank.rank, rows)) if rows else key)

    return Execution(program, communicator, module, forward, tensors, blocks, {}, loss_divisor=mesh.size)


def gather_axes(program: Program) -> list[tuple[str, ...]]:
    """The groups that `whole` needs for every parameter."""
    sources = [source for source in program.sources if source.kind == "parameter"]
    return list(dict.fromkeys(step.axes for source in sources for step in _to_whole(source, program)))


def whole(source: Source, piece: Tensor, program: Program, communicator: Communicator) -> Tensor:
    """The whole tensor of a source from the ranks' slices (collective)."""
    return communicator.carrier(_to_whole(source, program))(piece)


def _to_whole(source: Source, program: Program) -> Chain:
    shape = source.spec.shape
    return chain(program.layouts[source.id], Layout.replicated(len(shape)), shape, program.mesh)
