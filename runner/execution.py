"""What one rank runs, whatever the mode: a loss from local batch entries, the tensors behind it, and how to evaluate.

`sharded` runs the program of the plan; `alone` the user's own module on one process; `hybrid` the user's module with its own
collectives. All three are described by a `Program` (for the last two without instructions), so that gradients, checkpoints and
verification need not know the difference.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from runner.errors import ConfigError
from runner.prepare import WEIGHTS, Prepared, build_model, objective, options_of, request_of
from runner.reference import ExactRandom
from runner.worker import RankContext
from strategies import collectives
from strategies.capture import Objective
from strategies.engine import weights
from strategies.engine.communicator import Communicator
from strategies.engine.partition import build
from strategies.engine.program import Program, lower
from strategies.graph import OperatorGraph, Ref, Source, TensorSpec
from strategies.layout import Block, Layout
from strategies.mesh import Mesh
from strategies.redistribution import LOCAL, chain

Forward = Callable[[nn.Module, Sequence[Tensor], int], Tensor]


@dataclass(frozen=True)
class Execution:
    """`module` computes the loss through `forward(module, local entries, key)`; `evaluations` maps rows to (module, program);
    `tensors` are the local slices by name; `blocks` the part of the global micro-batch that this rank reads, per entry."""

    program: Program
    communicator: Communicator
    module: nn.Module
    forward: Forward
    tensors: Mapping[str, Tensor]
    blocks: tuple[Block, ...]
    evaluations: Mapping[int, tuple[nn.Module, Program]]
    loss_divisor: int = 1
    """The sum of the ranks' losses over `program.loss_axes`, divided by this, is the loss."""


def execution(prepared: Prepared, rank: RankContext, folder: Path, axes: Callable[[Program], Iterable[Sequence[str]]]) -> Execution:
    """Build what `rank` runs. `axes` names the groups that the optimizer parallel needs. Collective."""
    builders = {"hybrid": _hybrid, "stand_alone": _alone}
    return builders.get(prepared.config.parallel.mode, _sharded)(prepared, rank, folder, axes)


Axes = Callable[[Program], Iterable[Sequence[str]]]


def _sharded(prepared: Prepared, rank: RankContext, folder: Path, axes: Axes) -> Execution:
    assert prepared.graph is not None and prepared.plan is not None
    program = lower(prepared.graph, prepared.plan, options_of(prepared.config))
    evaluations = {rows: lower(one.graph, one.plan) for rows, one in prepared.evaluations.items()}
    used = [*_axes_used(program), program.loss_axes, *axes(program)]
    for evaluation in evaluations.values():
        used += _axes_used(evaluation)
    communicator = Communicator(program.mesh, rank.rank, used)
    tensors = weights.read_slices(folder / WEIGHTS, program, rank.rank, rank.device)
    for evaluation in evaluations.values():
        tensors = weights.read_slices(folder / WEIGHTS, evaluation, rank.rank, rank.device) | tensors
    module = build(program, tensors, communicator, rank.device)
    modules = {rows: (build(evaluation, tensors, communicator, rank.device), evaluation) for rows, evaluation in evaluations.items()}
    blocks = _blocks(program, rank.rank)

    graph = prepared.graph

    def forward(model: nn.Module, entries: Sequence[Tensor], key: int) -> Tensor:
        try:
            loss: Tensor = model(*entries, key) if program.random else model(*entries)
        except Exception as error:
            if (operator := blamed(error, program, graph)) is not None:
                error.operator = operator  # type: ignore[attr-defined]
            raise
        return loss

    return Execution(program, communicator, module, forward, tensors, blocks, modules)


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
    chains = [steps for r in program.redistributions for steps in ((r.forward, r.backward) if r.differentiable else (r.forward,))]
    return list(dict.fromkeys(step.axes for steps in chains for step in steps if step.kind not in LOCAL))


def _blocks(program: Program, rank: int) -> tuple[Block, ...]:
    return tuple(
        program.layouts[source.id].block(source.spec.shape, program.mesh, rank) for source in program.sources if source.kind == "input"
    )


class Eager(nn.Module):
    """The user's module and loss, under the names of the user's module alone (no prefix of a wrapper)."""

    def __init__(self, step: Objective) -> None:
        super().__init__()
        for name, child in step.model.named_children():
            self.add_module(name, child)
        for name, parameter in step.model.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in step.model.named_buffers(recurse=False):
            self.register_buffer(name, buffer)
        self.step = (step,)  # in a tuple, so that it is not registered a second time

    def forward(self, *entries: Tensor, key: int) -> Tensor:
        """The loss, with the random numbers of `key`."""
        with ExactRandom(key):
            return loss_of(self.step[0](*entries))


def eager_forward(model: nn.Module, entries: Sequence[Tensor], key: int) -> Tensor:
    loss: Tensor = model(*entries, key=key)
    return loss


def _alone(prepared: Prepared, rank: RankContext, folder: Path, axes: Axes) -> Execution:
    """The eager module, untouched; dropout draws from stateless keys so that runs can be resumed and compared."""
    config = prepared.config
    step = objective(config, prepared.names)
    _load(step.model, weights.read_whole(folder / WEIGHTS))
    step.to(rank.device).train()
    mesh = Mesh((("world", 1),))
    program = _described(step.model, mesh, prepared, {})
    tensors = dict(step.model.named_parameters()) | dict(step.model.named_buffers())
    return Execution(program, Communicator(mesh, 0), Eager(step), eager_forward, tensors, _blocks(program, 0), {})


def loss_of(output: object) -> Tensor:
    """The loss in what a module returns: a scalar tensor, the first entry of a tuple, or `.loss`. Raises ConfigError otherwise."""
    found = output
    if isinstance(found, (tuple, list)) and found:
        found = found[0]
    if isinstance(found, Mapping) and "loss" in found:
        found = found["loss"]
    found = getattr(found, "loss", found)
    if not isinstance(found, Tensor) or found.dim() or not found.is_floating_point():
        what = f"{found.dtype} of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ConfigError(f"The model and its loss returned {what}; training needs one floating-point scalar.")
    return found


def _load(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Initial weights by name. Raises ConfigError where a reference module does not have the parameters of the module it stands for."""
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name not in values or values[name].shape != tensor.shape:
                held = f"has shape {tuple(values[name].shape)}" if name in values else "does not exist"
                raise ConfigError(f"verify.reference: {name} {list(tensor.shape)} {held} in the module it is compared with.")
            tensor.copy_(values[name])


def _hybrid(prepared: Prepared, rank: RankContext, folder: Path, axes: Axes) -> Execution:
    """The user's module with its own collectives. Gradients of J = mean of the ranks' losses: the sum over a parameter's replica
    group divided by the world size (which a sharded optimizer divides by itself)."""
    config = prepared.config
    request = request_of(config, rank.world_size)
    mesh = Mesh(request.mesh or (("world", rank.world_size),))
    communicator = Communicator(mesh, rank.rank)
    collectives.use(communicator)
    step = objective(config, prepared.names, build_model(config)).to(rank.device).train()
    inputs = _hybrid_inputs(prepared, mesh)
    program = _described(step.model, mesh, prepared, inputs)
    communicator.prepare([program.loss_axes, *axes(program)])
    if config.parallel.zero.stage == 0:
        for parameter in step.model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: gradient / mesh.size)
    tensors = dict(step.model.named_parameters()) | dict(step.model.named_buffers())
    module = Eager(step)
    return Execution(program, communicator, module, eager_forward, tensors, _blocks(program, rank.rank), {}, loss_divisor=mesh.size)


def _hybrid_inputs(prepared: Prepared, mesh: Mesh) -> dict[str, Layout]:
    """How the batch is fed to a hybrid module: sliced by rows over all ranks unless the dataset strategy says otherwise."""
    wanted = prepared.config.parallel.dataset_strategy
    request = request_of(prepared.config, mesh.size)
    found = {}
    if isinstance(request.dataset_strategy, tuple) and len(request.dataset_strategy) != len(prepared.names):
        raise ConfigError(
            f"parallel.dataset_strategy gives {len(request.dataset_strategy)} entries, the batch has {len(prepared.names)} "
            f"({', '.join(prepared.names)})."
        )
    for position, (name, shape) in enumerate(zip(prepared.names, prepared.shapes, strict=True)):
        if wanted == "full_batch":
            found[name] = Layout.replicated(len(shape))
            continue
        operand = request.dataset_strategy[position] if isinstance(request.dataset_strategy, tuple) else (mesh.size, *(1,) * (len(shape) - 1))
        if not isinstance(operand, tuple):
            raise ConfigError("parallel.dataset_strategy: in hybrid mode give counts per dim, e.g. [[1, 2], [1, 1]].")
        found[name] = _counted(operand, shape, mesh, name)
    return found


def _counted(counts: tuple[int, ...], shape: tuple[int, ...], mesh: Mesh, name: str) -> Layout:
    """Counts to axes of the named mesh: for each dim the first run of unused neighbouring axes with that product."""
    free, dims = [axis for axis in mesh.names if mesh.sizes[axis] > 1], []
    for dim, count in enumerate(counts):
        runs = [tuple(free[i:j]) for i in range(len(free)) for j in range(i, len(free) + 1)]
        run = next((run for run in runs if mesh.product(run) == count), None)
        if len(counts) != len(shape) or run is None or shape[dim] % count:
            raise ConfigError(
                f"parallel.dataset_strategy for batch entry {name!r} of shape {shape}: {counts} does not fit mesh {dict(mesh.axes)}."
            )
        free = [axis for axis in free if axis not in run]
        dims.append(run)
    return Layout(tuple(dims))


def _described(model: nn.Module, mesh: Mesh, prepared: Prepared, inputs: Mapping[str, Layout]) -> Program:
    """A program without instructions: how the batch and the module's tensors lie."""
    sources, layouts, reductions = [], {}, {}
    for name, shape in zip(prepared.names, prepared.shapes, strict=True):
        sources.append(Source(f"input_{name}", "input", name, TensorSpec(shape, "float32")))
        layouts[f"input_{name}"] = inputs.get(name, Layout.replicated(len(shape)))
    for name, parameter in model.named_parameters():
        layout, shape = collectives.declared(parameter)
        dtype = str(parameter.dtype).removeprefix("torch.")
        sources.append(Source(name, "parameter", name, TensorSpec(shape, dtype), parameter.requires_grad))
        layouts[name] = layout
        if parameter.requires_grad:
            reductions[name] = layout.replica_axes(mesh)
    for name, buffer in model.named_buffers():
        sources.append(Source(name, "buffer", name, TensorSpec(tuple(buffer.shape), str(buffer.dtype).removeprefix("torch."))))
        layouts[name] = Layout.replicated(buffer.dim())
    order = tuple(source.name for source in sources if source.kind != "input")
    outputs = tuple(Ref(source.id) for source in sources if source.trainable)  # the loss depends on all of them
    return Program(mesh, tuple(sources), layouts, (), outputs, reductions, order, False, mesh.sorted(mesh.names))


def gather_axes(program: Program) -> list[tuple[str, ...]]:
    """The groups that `whole` needs for every parameter."""
    steps = [
        step
        for source in program.sources
        if source.kind == "parameter"
        for step in chain(program.layouts[source.id], Layout.replicated(len(source.spec.shape)), source.spec.shape, program.mesh)
    ]
    return list(dict.fromkeys(step.axes for step in steps))


def whole(source: Source, piece: Tensor, program: Program, communicator: Communicator) -> Tensor:
    """The whole tensor of a source from the ranks' slices (collective)."""
    steps = chain(program.layouts[source.id], Layout.replicated(len(source.spec.shape)), source.spec.shape, program.mesh)
    return communicator.carrier(steps)(piece)
