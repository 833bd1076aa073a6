"""The user's own module on a rank: alone on one process (the reference), or with its own collectives (mode hybrid).

Invariant: the module is not changed. Around it only its random numbers are replaced by stateless ones, and a `Program`
without instructions describes the layouts of batch and tensors, so that gradients, checkpoints and verification handle
it like a sharded program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runner.errors import ConfigError
from runner.planning.prepare import Prepared
from runner.planning.sources import request_of
from runner.training.reference import ExactRandom
from strategies import collectives
from strategies.capture import Objective, loss_in
from strategies.core.graph import Ref, Source, TensorSpec
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.program import Program


class Eager(nn.Module):
    """The user's module and loss, under the names of the user's module alone; tensors of the loss are `loss.NAME`.

    With `single_draws`, random numbers in fp64 are those that fp32 draws.
    """

    def __init__(self, step: Objective, *, single_draws: bool = False) -> None:
        super().__init__()
        self.single_draws = single_draws
        self.step = (step,)  # in a tuple, so that it is not registered a second time
        self._modules.update(step.model.named_children())  # under names that may be those of attributes
        # the model's own tables: its forward may replace a buffer
        self._parameters, self._buffers = step.model._parameters, step.model._buffers
        if step.loss is not None and [*step.loss.parameters(), *step.loss.buffers()]:
            self._modules["loss"] = step.loss

    def forward(self, *entries: Tensor, key: int, outputs: Sequence[str] = ()) -> Any:
        """The loss with the random numbers of `key`; with `outputs`, the names of the entries, the output of the model
        alone in evaluation."""
        (step,) = self.step
        with ExactRandom(key, single=self.single_draws):
            if not outputs:
                return loss_of(step(*entries))
            pairs = zip(outputs, entries, strict=True)
            kept = {name: tensor for name, tensor in pairs if name not in step.targets}
            step.model.eval()
            output = Objective(step.model, None, tuple(kept), (), step.autocast)(*kept.values())
            step.model.train()
            return output

    def tensors(self) -> Mapping[str, Tensor]:
        """Every parameter and buffer by name, as it is when it is read."""
        return _Current(self)


def nudge(module: nn.Module, precision: str, number: int) -> None:
    """Multiply every parameter of a module by 1 + 2**-50 or 1 - 2**-50, at random: four neighbouring numbers of fp64,
    by which sums of some 16 terms differ in another order. Of one that computes in fp32, by 1 +- 2**-21. Another
    `number` has other signs."""
    distance = 4 * torch.finfo(torch.float32 if precision == "fp32" else torch.float64).eps
    draw = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for parameter in module.parameters():
            signs = 2 * torch.randint(2, parameter.shape, generator=draw, dtype=torch.float64) - 1
            parameter.mul_(1 + distance * signs.to(parameter.device))


class _Current(Mapping[str, Tensor]):
    """Tensors of a module by name: each is looked up anew, because a forward may replace a buffer."""

    def __init__(self, module: nn.Module) -> None:
        parts = dict(module.named_modules(remove_duplicate=False))
        self._tables: dict[str, tuple[Mapping[str, Tensor | None], str]] = {}
        for name, _ in (*module.named_parameters(), *module.named_buffers()):
            path, _, key = name.rpartition(".")
            part = parts[path]
            self._tables[name] = (part._parameters if key in part._parameters else part._buffers), key

    def __getitem__(self, name: str) -> Tensor:
        table, key = self._tables[name]
        if (tensor := table[key]) is None:
            raise ConfigError(
                "MW908",
                f"forward has replaced the buffer {name} by None; a checkpoint stores the tensors that the model has "
                "before training, so write into the buffer, or set it aside in an attribute that is no buffer.",
            )
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)


def forward(model: Callable[..., Any], entries: Sequence[Tensor], key: int) -> Tensor:
    """The loss of `Eager`, called as sharded programs are."""
    loss: Tensor = model(*entries, key=key)
    return loss


def loss_of(output: object) -> Tensor:
    """The loss in what a module returned: a scalar tensor, the first entry of a tuple, or `loss`.

    Raises ConfigError where there is none.
    """
    loss = loss_in(output)
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        what = f"{loss.dtype} of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError("MW320", f"The model and its loss returned {what}; training needs one floating-point scalar.")
    return loss


def start_from(module: Eager, values: Mapping[str, Tensor]) -> None:
    """Load initial weights by name; buffers missing in `values` keep their constructor values.

    Raises ConfigError where a reference module does not have the tensors of the module that it stands for.
    """
    for name, tensor in module.tensors().items():
        if name not in values and not isinstance(tensor, nn.Parameter):
            continue
        if name not in values or values[name].shape != tensor.shape:
            actual = f"has shape {list(values[name].shape)}" if name in values else "does not exist"
            raise ConfigError(
                "MW326",
                f"verify.reference: {name} {list(tensor.shape)} {actual} in the module it is compared with.",
            )
    take(module, values)


def take(module: Eager, values: Mapping[str, Tensor]) -> None:
    """Load this rank's shards, by name and in the shapes of the module's own tensors."""
    with torch.no_grad():
        for name, tensor in module.tensors().items():
            if name in values:
                tensor.copy_(values[name])


def hybrid_mesh(prepared: Prepared) -> Mesh:
    """The configured mesh, or all ranks as the axis `world`."""
    return Mesh(request_of(prepared.config, prepared.world_size).mesh or (("world", prepared.world_size),))


def hybrid_inputs(prepared: Prepared, mesh: Mesh, rows: int) -> dict[str, Layout]:
    """How a batch of `rows` is fed to a hybrid module: sliced by rows over all ranks unless dataset_strategy says
    otherwise.

    Raises ConfigError for a strategy that does not fit the batch or the mesh.
    """
    wanted, names = request_of(prepared.config, mesh.size).dataset_strategy, prepared.names
    if isinstance(wanted, tuple) and len(wanted) != len(names):
        raise ConfigError(
            "MW409",
            f"parallel.dataset_strategy gives {len(wanted)} entries, the batch has {len(names)} ({', '.join(names)}).",
        )
    if wanted == "full_batch":
        return {name: Layout.replicated(len(shape)) for name, shape in zip(names, prepared.shapes, strict=True)}
    layouts = {}
    unbatched = {*map(str, prepared.config.data.unbatched)}
    for position, (name, (first, *sizes)) in enumerate(zip(names, prepared.shapes, strict=True)):
        rows_only = (1 if name in unbatched else mesh.size, *(1,) * len(sizes))
        operand = wanted[position] if isinstance(wanted, tuple) else rows_only
        if not isinstance(operand, tuple):
            raise ConfigError(
                "MW409", "parallel.dataset_strategy: in hybrid mode give counts per dim, e.g. [[1, 2], [1, 1]]."
            )
        layouts[name] = _counted(operand, (first if name in unbatched else rows, *sizes), mesh, name)
    return layouts


def _counted(counts: tuple[int, ...], shape: tuple[int, ...], mesh: Mesh, name: str) -> Layout:
    """Counts to axes of the named mesh: for each dim the first run of unused neighbouring axes with that product."""
    if len(counts) != len(shape) or any(size % count for size, count in zip(shape, counts, strict=True)):
        raise ConfigError(
            "MW409", f"parallel.dataset_strategy: {counts} cannot slice batch entry {name!r} of shape {shape}."
        )
    free = [axis for axis in mesh.names if mesh.sizes[axis] > 1]
    dims = []
    for count in counts:
        runs = [tuple(free[i:j]) for i in range(len(free)) for j in range(i, len(free) + 1)]
        run = next((run for run in ((), *runs) if mesh.product(run) == count), None)
        if run is None:
            raise ConfigError(
                "MW409",
                f"parallel.dataset_strategy for batch entry {name!r}: no neighbouring axes of mesh {dict(mesh.axes)} "
                f"make the counts {counts}.",
            )
        free = [axis for axis in free if axis not in run]
        dims.append(run)
    return Layout(tuple(dims))


def described(module: Eager, mesh: Mesh, prepared: Prepared, inputs: Mapping[str, Layout]) -> Program:
    """A program without instructions: layouts of the batch (replicated where `inputs` has none) and of the tensors."""
    sources, layouts, reductions = [], {}, {}
    for name, shape in zip(prepared.names, prepared.shapes, strict=True):
        sources.append(Source(f"input_{name}", "input", name, TensorSpec(shape, "float32")))
        layouts[f"input_{name}"] = inputs.get(name, Layout.replicated(len(shape)))
    for name, parameter in module.named_parameters():
        layout, shape = collectives.declared(parameter)
        sources.append(Source(name, "parameter", name, TensorSpec(shape, _dtype(parameter)), parameter.requires_grad))
        layouts[name] = layout
        if parameter.requires_grad:
            reductions[name] = layout.replica_axes(mesh)
    for name, buffer in module.named_buffers():
        sources.append(Source(name, "buffer", name, TensorSpec(tuple(buffer.shape), _dtype(buffer))))
        layouts[name] = Layout.replicated(buffer.dim())
    order = tuple(source.name for source in sources if source.kind != "input")
    outputs = tuple(Ref(source.id) for source in sources if source.trainable)  # the loss depends on all of them
    return Program(mesh, tuple(sources), layouts, (), outputs, reductions, order, False, mesh.sorted(mesh.names))


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
