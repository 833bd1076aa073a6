"""What one rank trains in a loop of the user's own: the module of its slices, and the optimizer.

Both are those of `run train`: the module calls the rank's program, the optimizer is that of `strategies.optimizer`.
Invariant: parameters and buffers have the names of the user's module; `Plan.apply` refuses before it makes a process
group.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from meshwright import optimizer_state
from meshwright.evaluations import Evaluations
from runner.build.optimizers import parameter_groups
from runner.build.targets import describe
from runner.config.schema import Optimizer, ParameterGroup
from runner.errors import ConfigError
from runner.launch.orders import RankContext
from runner.planning import lowering
from runner.training.agreement import agree, different, gather
from runner.training.execution import Execution, gather_axes, sharded
from strategies.capture import Objective, check_decided
from strategies.core.graph import Source
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.program import Program
from strategies.core.steps import ALL_REDUCE
from strategies.optimizer.buckets import all_reduce_elements
from strategies.optimizer.own_updates import OwnUpdates
from strategies.optimizer.replicated import BucketedUpdates
from strategies.optimizer.sharded import ShardedUpdates
from strategies.optimizer.stages import make_updates
from strategies.optimizer.updates import Updates, axes_needed, mark
from strategies.rules.random import mix
from strategies.runtime.dtensors import as_dtensor, global_tensor, placements
from strategies.runtime.naming import inside, register
from strategies.runtime.redistributions import Redistribution
from strategies.runtime.slices import slices_of
from strategies.runtime.transfer import cut, filled

if TYPE_CHECKING:
    from meshwright.plans import Planned

F = TypeVar("F", bound=Callable[..., Any])


_log = logging.getLogger("meshwright")
SAMPLED = 16
"""Elements of a tensor that are compared over ranks."""


def _warn_of_replicas(tensors: Mapping[str, Tensor]) -> None:
    """A line on rank 0 where ranks have other weights, as without a seed: replicas differ then (collective)."""
    found = hashlib.blake2b(digest_size=8)
    for _, tensor in sorted(tensors.items()):
        sample = tensor.detach().flatten()[:: max(1, tensor.numel() // SAMPLED)][:SAMPLED].resolve_conj().cpu()
        found.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
    ranks = range(dist.get_world_size())
    differences = different(ranks, gather({"the weights of its module": found.hexdigest()}))
    if differences and dist.get_rank() == 0:
        _log.warning(
            "plan.apply: %s Replicas train other weights then; before the module is made, call torch.manual_seed, and "
            "seed what else its constructor draws from (random, numpy), with the same number, or load the weights.",
            differences,
        )


def _not_traced(method: F) -> F:
    """`method` as torch.compile around a loop, or around the module, leaves it: tracing would drop the hooks and
    collectives by which ranks add up losses and gradients."""
    disabled: F = torch.compiler.disable(method, reason="ranks communicate here")  # type: ignore[no-untyped-call]
    return disabled


class ShardedModule(nn.Module):
    """A module and its loss as one rank of a plan runs them.

    `forward` takes the entries of a batch, by position or name, and returns the loss of the global batch: every entry
    is either global, and sliced here, or this rank's slice already (`local_batch`), but in training no slice once it
    was global: a short last batch may have the shape of one. All ranks call it together. After
    `backward` the gradient of a parameter that several ranks hold is still a sum over them: `ShardedOptimizer.step`
    adds it up, and `ShardedOptimizer.gradients` returns complete ones. Backward alone writes gradients: a norm, or a
    change of their values, would be that of one rank's slices. In evaluation mode it is `Evaluations.run`.

    `state_dict` has the names of the user's module, and DTensors on the memory of the slices; `load_state_dict` takes
    DTensors of any layout and unsharded tensors. Both are collective.
    """

    def __init__(self, planned: Planned, module: nn.Module, device_mesh: DeviceMesh | None) -> None:
        prepared = planned.prepared
        assert prepared.plan is not None and prepared.graph is not None
        rank, self.device = _rank_of(prepared.plan.mesh, device_mesh, prepared.device)
        super().__init__()
        self.prepared, self._given_mesh, self._decided = prepared, device_mesh, planned.captured.decided
        objective = planned.step_of(module)
        tensors = {**planned.captured.tensors, **_by_name(objective)}
        if prepared.plan.mesh.size > 1:
            agree({"the plan": prepared.digest}, "Plan the same module on every rank, or load one file.")
            _warn_of_replicas(tensors)
        context = RankContext(rank, prepared.world_size, 0, self.device, Path())
        execution = sharded(
            prepared,
            context,
            lambda programs: slices_of(tensors, programs[0], rank, self.device),
            lambda program: [*axes_needed(program), *gather_axes(program, _no_dtensors(program))],
        )
        self._execution = (execution,)  # in a tuple, so that its tensors have no second name here
        self._updates: Updates | None = None
        self._step = self._backwards = 0
        self._shown = self.reduced = False
        self._written: dict[str, tuple[int, int]] = {}
        self._weights: dict[str, tuple[int, int]] = {}
        self._loaded: dict[str, Tensor] = {}
        self._came: set[str] = set()
        self._complete: set[str] = set()
        self._sources = execution.program.tensors
        self._evaluations = Evaluations(planned, execution, self.device, self.weight, self.zero == 3, self._check_owned)
        self._always = frozenset(execution.program.trainable_names) - execution.program.optional_names
        self._planned = frozenset(dir(module)) - frozenset(dir(self))
        self._names = _register(self, objective, execution.tensors)
        for part in self.modules():
            if part is not self:
                part.__class__ = _Names
        self.register_state_dict_post_hook(_to_dtensors)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_from_dtensors)  # type: ignore[no-untyped-call]

    def __setattr__(self, name: str, value: Any) -> None:
        if "_names" in self.__dict__:
            if name in self._planned or any(
                name in table for table in (self._parameters, self._buffers, self._modules)
            ):
                _refuse_assignment(name)
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        self._admit(name)
        super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        self._admit(name)
        super().register_buffer(name, tensor, persistent)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        self._admit(name)
        super().add_module(name, module)

    def _admit(self, name: str) -> None:
        if "_names" in self.__dict__:
            _refuse_assignment(name)

    @property
    def execution(self) -> Execution:
        """The rank's program with its tensors and process groups."""
        return self._execution[0]

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """What DistributedDataParallel asks first, before it sends the weights of rank 0 to all ranks."""
        raise ConfigError(
            "MW464",
            "DistributedDataParallel gives all ranks the same weights, but this module has one rank's slices; train "
            "the module itself: optimizer.step() adds up gradients.",
        )

    def __reduce_ex__(self, _: Any) -> Any:
        raise ConfigError(
            "MW464",
            "The module of a rank has process groups, so it can be neither copied nor pickled; copy state_dict(), "
            "whose tensors are DTensors of the slices, or apply the plan to another module.",
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            if (changed := fn(tensor)).dtype != tensor.dtype or changed.device != tensor.device:
                raise ConfigError(
                    "MW464",
                    f"The plan is for {name} of {tensor.dtype} on {tensor.device}, which would be of {changed.dtype} "
                    f"on {changed.device} then; convert the module before meshwright.plan, and give the device there.",
                )
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As that of the optimizer."""
        if not self.zero:
            self.check_weights()
        if isinstance(self._updates, OwnUpdates):
            self._updates.forget()
        super().zero_grad(set_to_none=True)
        if not self.by_deepspeed:
            self.begin()

    @_not_traced
    def forward(self, *entries: Tensor, **named: Tensor) -> Any:
        if not self.training:
            return self._evaluations.run(entries, named)
        if self._updates is None and self.zero:
            raise ConfigError(
                "MW464",
                f"ZeRO stage {self.zero} is part of the optimizer; call plan.optimizer before the first forward.",
            )
        self.check_gradients()
        self.check_weights()
        local = self.local_batch(*entries, **named)
        self._check_rows(dict(zip(self.prepared.names, entries, strict=False)) | named)
        key = mix(self.prepared.config.train.seed, self._step + 1, 0)
        called = self.execution.module if self._updates is None else self._updates.module
        loss: Tensor = self.execution.forward(called, local, key)
        written = {id for id, _ in self.execution.program.updates}
        for name, parameter in self.named_parameters() if written and self._weights else ():
            if self._sources[self.name_of(name)].id in written:  # by the forward itself
                self._weights[name] = mark(parameter)
        self._step += 1
        loss = self._over_ranks(loss)
        if loss.requires_grad:
            loss.register_hook(self._begins_backward)  # type: ignore[no-untyped-call]
        return loss

    @_not_traced
    def _begins_backward(self, gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            raise ConfigError(
                "MW464",
                "Gradients with create_graph=True would have no derivatives of what ranks communicate; compute a "
                "gradient penalty within the module or its loss (torch.autograd.grad in forward), which is captured.",
            )
        if self.reduced:
            raise ConfigError(
                "MW464",
                "The gradients of this step are complete (optimizer.gradients() adds them up over the ranks), so none "
                "can be added; call optimizer.step() or zero_grad() before the next backward.",
            )
        if self.by_deepspeed and self._backwards:
            raise ConfigError(
                "MW464",
                f"DeepSpeed reduces the gradients of ZeRO stage {self.zero} in backward, so a step has one; call "
                "optimizer.step() after every backward, plan for a larger batch, or use zero=0 or the native engine, "
                "which add up several.",
            )
        if not self.zero and not self._backwards:
            self.note_weights()
        self._backwards += 1
        self._set_taken(None)
        Variable._execution_engine.queue_callback(self._ends_backward)

    @_not_traced
    def _ends_backward(self) -> None:
        if self.zero == 3 and not self.by_deepspeed and self._updates is not None:
            self._updates.collect()  # lets go of what was gathered
        if self.by_deepspeed:  # whose callbacks at the end of backward, queued after this one, take gradients
            Variable._execution_engine.queue_callback(self._shows_taken)
        else:
            self._shows_taken()

    @_not_traced
    def _shows_taken(self) -> None:
        self._set_taken(torch.nan)
        self._shown = True
        self.note_gradients()

    def _set_taken(self, value: float | None) -> None:
        """The gradients of stage 3, and those of DeepSpeed, are taken during backward: what reads one between backward
        and step reads NaN, and cannot be written, as clip_grad_norm_ would do without effect."""
        for parameter in self.parameters() if self.zero == 3 or self.by_deepspeed else ():
            parameter.grad = None
            if value is not None and parameter.requires_grad:
                with torch.inference_mode():  # what such a tensor holds cannot be written, even where it has no element
                    shown = torch.full((), value, dtype=parameter.dtype, device=parameter.device)
                    parameter.grad = shown.expand(parameter.shape).as_subclass(_Taken)

    def show_nothing(self) -> None:
        """The optimizer finds the gradients that were taken, and none in their places."""
        self._set_taken(None)

    def note_gradients(self) -> None:
        """The gradients are as they should be."""
        self._written = {name: mark(gradient) for name, gradient in self._writable()}

    def _writable(self) -> Iterator[tuple[str, Tensor]]:
        """The gradients that are there, without those that only show NaN."""
        for name, parameter in self.named_parameters():
            if parameter.grad is not None and not parameter.grad.is_inference():
                yield name, parameter.grad

    def check_gradients(self) -> None:
        """Raises ConfigError for a gradient that backward has not written, unless it is zero, and for one that was
        dropped after it was taken."""
        taken = self._shown and (self.zero == 3 or self.by_deepspeed)
        for name, parameter in self.named_parameters() if taken else ():
            if parameter.requires_grad and parameter.grad is None:
                raise ConfigError(
                    "MW464",
                    f"The gradient of {name} was set to None, but at ZeRO stage {self.zero} backward has reduced it "
                    "already; call optimizer.zero_grad() to forget all gradients, or set requires_grad=False before "
                    "meshwright.plan for parameters that are not trained.",
                )
        for name, gradient in self._writable() if self._written else ():
            if self._written.get(name) != mark(gradient) and gradient.any():
                raise ConfigError(
                    "MW464",
                    f"The gradient of {name} was written after backward, as torch.nn.utils.clip_grad_norm_ does: here "
                    "it belongs to one rank's slices and rows, so ranks would differ. Clip by plan.optimizer(..., "
                    "clip=1.0), scale the loss, or change gradients in the step of an optimizer of your own, which has "
                    "complete ones.",
                )

    def note_weights(self) -> None:
        """The weights are those of the optimizer, or of a backward that waits for one."""
        self._weights = {name: mark(parameter) for name, parameter in self.named_parameters()}

    def check_weights(self) -> None:
        """Raises ConfigError for a weight that was written or frozen where the optimizer's own copy would not follow,
        for one that is to learn after the plan, and for one that was written while its gradient is one rank's part of a
        sum, as another optimizer does."""
        for name, parameter in self.named_parameters() if self._weights else ():
            learns = self._sources[self.name_of(name)].trainable
            if parameter.requires_grad != learns and (self.zero or not learns):
                raise ConfigError(
                    "MW464",
                    f"requires_grad of {name} was changed to {parameter.requires_grad} after the plan, whose program "
                    "and optimizer would not follow; do so before meshwright.plan.",
                )
            if self.zero and self._is_written(name, parameter):
                raise ConfigError(
                    "MW464",
                    f"The weights of ZeRO stage {self.zero} belong to the optimizer, but {name} is not as it left it: "
                    "it was written. Do so before meshwright.plan, by load_state_dict, in the step of an optimizer of "
                    "your own, or with zero=0.",
                )
        if not self.zero and self.pending:
            self._check_untouched()

    def _check_owned(self) -> None:
        """Raises ConfigError where something else than the optimizer of ZeRO has written its weights."""
        if self.zero:
            self.check_weights()

    def _is_written(self, name: str, parameter: nn.Parameter) -> bool:
        if self.zero < 3:
            return self._weights[name] != mark(parameter)
        if not isinstance(self._updates, ShardedUpdates):
            return False  # DeepSpeed itself writes them
        # Their memory is another one whenever they are gathered
        return self._weights[name][0] != parameter._version or self._updates.replaced(self.name_of(name))

    def _check_untouched(self) -> None:
        program = self.execution.program
        for name, parameter in self.named_parameters():
            source = self._sources[self.name_of(name)]
            replicas = program.mesh.product(program.layouts[source.id].replica_axes(program.mesh))
            if source.trainable and replicas > 1 and self._weights[name] != mark(parameter):
                raise ConfigError(
                    "MW464",
                    f"{name} was written after backward, but its gradient is one rank's part of a sum, so ranks would "
                    "differ. Make the optimizer by plan.optimizer(torch.optim.AdamW, lr=...), whose step adds it up.",
                )

    def check_complete(self) -> None:
        """Raises ConfigError at a stage of ZeRO for a parameter on which the loss depends, but of which no backward of
        this step has left a gradient: the optimizer would move it by its momentum, which torch does not."""
        for name, parameter in self.named_parameters() if self.zero else ():
            source = self.name_of(name)
            dropped = name in self._written and parameter.grad is None
            if source in self._always and (dropped or source not in self._came):
                raise ConfigError(
                    "MW464",
                    f"{name} has no gradient in this step, but ZeRO stage {self.zero} updates all parameters together; "
                    "do not drop gradients or choose inputs of backward, set requires_grad=False before "
                    "meshwright.plan for parameters that are not trained, or use zero=0.",
                )

    @property
    def pending(self) -> bool:
        """Whether backward has left gradients that no step has used."""
        return self._backwards > 0

    @property
    def zero(self) -> int:
        """The stage of ZeRO."""
        return self.prepared.config.parallel.zero.known

    @property
    def by_deepspeed(self) -> bool:
        """Whether DeepSpeed reduces the gradients."""
        return self.zero > 0 and self.prepared.config.zero_engine == "deepspeed"

    def begin(self) -> None:
        """The gradients have been used or forgotten; a new step begins."""
        self._backwards, self.reduced, self._written, self._shown = 0, False, {}, False
        self._came.clear()
        self._set_taken(None)

    def local_batch(self, *entries: Tensor, **named: Tensor) -> tuple[Tensor, ...]:
        """This rank's slices of the entries of a batch, on its device; entries that are slices already are left.

        Raises:
            ConfigError: other entries or dtypes than those of the plan, or shapes that are neither global nor local.
        """
        names = self.prepared.names
        values = dict(zip(names, entries, strict=False)) | named
        if len(entries) + len(named) != len(names) or values.keys() != {*names}:
            given = ", ".join([*map(str, range(len(entries))), *named])
            has = f"the entries {given}" if given else "no entries"
            raise ConfigError("MW463", f"The batch has {has}, but the plan is for {', '.join(names)}.")
        program, rank = self.execution.program, self.execution.communicator.rank
        found, inputs = [], {source.name: source for source in program.inputs}
        for name in names:
            value, source = values[name], inputs[name]
            if not isinstance(value, Tensor):
                raise ConfigError("MW463", f"Entry {name} of the batch is {value!r}; give a tensor.")
            layout, shape, own = program.layouts[source.id], source.spec.shape, tuple(value.shape)
            if str(value.dtype) != f"torch.{source.spec.dtype}":
                raise ConfigError(
                    "MW463",
                    f"Entry {name} of the batch is {value.dtype}, but the plan is for torch.{source.spec.dtype}; give "
                    "such a batch, or plan for this one.",
                )
            if value.requires_grad and torch.is_grad_enabled():
                raise ConfigError(
                    "MW463",
                    f"Entry {name} of the batch requires a gradient, of which backward would leave this rank's part "
                    "alone; detach it, or plan the module that computes it together with this one.",
                )
            block = tuple(stop - start for start, stop in layout.block(shape, program.mesh, rank))
            if own == shape:
                value = cut(value, layout, program.mesh, rank)
            elif own not in (block, layout.local_shape(shape, program.mesh)):
                raise ConfigError(
                    "MW463",
                    f"Entry {name} of the batch has the shape {own}, but the plan is for {shape}, of which this rank "
                    f"has {block}; give one of these, or plan for another batch.",
                )
            found.append(filled(value, layout.local_shape(shape, program.mesh)).to(self.device))
        return tuple(found)

    def _check_rows(self, entries: Mapping[str, Tensor]) -> None:
        """Raises ConfigError for slices after global batches, in training: a short one may have as many rows."""
        for source in self.execution.program.inputs if torch.is_grad_enabled() else ():
            given, shape = tuple(entries[source.name].shape), source.spec.shape
            if given == shape:
                self._complete.add(source.name)
            elif source.name in self._complete:
                raise ConfigError(
                    "MW463",
                    f"Entry {source.name} of the batch has the shape {given}, that of a rank's slice, after batches of "
                    f"the global shape {shape}. A short last batch would be taken for every rank's own slice: leave it "
                    "out (DataLoader(drop_last=True)). Or give slices from the first batch on.",
                )

    def _over_ranks(self, loss: Tensor) -> Tensor:
        """The loss of the global batch; its gradient goes to every rank's part."""
        program, communicator = self.execution.program, self.execution.communicator
        if not program.loss_axes:
            return loss

        def added(tensors: Sequence[Tensor]) -> list[Tensor]:
            total = tensors[0].clone()
            communicator.sum(total, communicator.group(program.loss_axes))
            ranks = program.mesh.product(program.loss_axes)
            communicator.count(ALL_REDUCE, all_reduce_elements([1], ranks), total)
            return [total]

        total: Tensor = Redistribution.apply(added, list, (1.0,), True, loss)[0]  # type: ignore[no-untyped-call]
        return total

    def optimizer(
        self,
        factory: Callable[..., torch.optim.Optimizer],
        *,
        clip: float | None = None,
        groups: Sequence[Mapping[str, Any]] = (),
        **options: Any,
    ) -> ShardedOptimizer:
        """The optimizer of this module; see `Plan.optimizer`. Collective. Raises ConfigError for a second one."""
        if self._updates is not None:
            raise ConfigError("MW464", "plan.optimizer: this module has an optimizer already; apply the plan again.")
        if not callable(factory):
            raise ConfigError("MW204", f"plan.optimizer: {factory!r} makes no optimizer; give a class of torch.optim.")
        if not (clip is None or (isinstance(clip, int | float) and clip > 0)):
            raise ConfigError("MW204", f"plan.optimizer: clip = {clip!r}; give the largest norm, above 0, or None.")
        config, program, divided = self.prepared.config, self.execution.program, _divided(groups)

        def made(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
            try:
                return factory(groups, **options)
            except Exception as error:
                name = getattr(factory, "__name__", type(factory).__name__)
                given = ", ".join(f"{key}={value!r}" for key, value in options.items()) or "no options"
                raise ConfigError(
                    "MW304", f"plan.optimizer: {name} cannot be made with {given}: {describe(error)}."
                ) from error

        made([{"params": [nn.Parameter(torch.zeros(1, 1))]}])  # before anything is changed
        self._updates = make_updates(
            self.zero,
            self.execution.module,
            program,
            self.execution.communicator,
            made,
            parameter_groups([source.name for source in program.parameters], program.trainable_names, divided),
            clip=clip,
            precision="fp32" if config.train.precision == "bf16_autocast" else config.train.precision,
            zero_options=lowering.deepspeed_options(config),
            engine=config.zero_engine,
            cut=lowering.bucket_cut(config),
        )
        named = [(self.name_of(key), parameter) for key, parameter in self.named_parameters()]
        for name, parameter in named if self.zero else ():
            if name in self._always:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    partial(self._gradient_came, name)
                )
        self.note_weights()
        return ShardedOptimizer(self, self._updates)

    def _gradient_came(self, name: str, _: nn.Parameter) -> None:
        self._came.add(name)

    def grid(self) -> DeviceMesh:
        """The plan's mesh as torch's, on the ranks of the default group (collective at the first call)."""
        mesh = self.execution.program.mesh
        if self._given_mesh is None or tuple(self._given_mesh.mesh.shape) != tuple(mesh.sizes.values()):
            kind = torch.device(self.device).type
            self._given_mesh = init_device_mesh(kind, tuple(mesh.sizes.values()), mesh_dim_names=mesh.names)
        return self._given_mesh

    def shown(self, name: str, slice_: Tensor) -> Tensor:
        """A slice of the tensor `name` as a DTensor; all of it on every rank where its layout is no DTensor's
        (collective)."""
        program = self.execution.program
        source = self._sources[name]
        layout, shape = program.layouts[source.id], source.spec.shape
        placed = placements(layout, shape, program.mesh, any_order=True)
        if program.mesh.size == 1:
            return slice_
        if placed is None:
            layout, slice_ = Layout.replicated(len(shape)), self.execution.full_tensor(source, slice_)
            placed = placements(layout, shape, program.mesh)
            assert placed is not None
        return as_dtensor(slice_, placed, layout, shape, program.mesh, self.grid())

    def taken(self, name: str, value: Tensor) -> Tensor:
        """This rank's slice of what a state dict has for the tensor `name` (collective for a DTensor of another
        layout)."""
        program, source = self.execution.program, self._sources[name]
        layout, shape, mesh = program.layouts[source.id], source.spec.shape, program.mesh
        if isinstance(value, DTensor) and mesh.size > 1 and value.device_mesh == self.grid():
            if tuple(value.placements) == placements(layout, shape, mesh, any_order=True):
                return filled(value.to_local(), layout.local_shape(shape, mesh))
        return cut(global_tensor(value), layout, mesh, self.execution.communicator.rank)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As `torch.nn.Module.load_state_dict`, of DTensors of any layout and unsharded tensors (collective). Raises
        ConfigError, before anything is loaded, for a state dict of another module, and for `assign`."""
        if assign or not isinstance(state_dict, Mapping):
            what = (
                "assign=True would replace the weights of the program" if assign else f"{state_dict!r:.60} is no dict"
            )
            raise ConfigError("MW464", f"load_state_dict: {what}; give the state dict of the planned module alone.")
        self.check_loading(state_dict, strict=strict)
        self._loaded.clear()
        loaded = super().load_state_dict(state_dict, strict, assign)
        if self._updates is not None:
            execution = self.execution
            optimizer_state.load_weights(self._updates, execution.program, execution.communicator, self._loaded)
        self._loaded.clear()
        self.note_weights()
        return loaded

    def check_loading(self, given: Mapping[str, Any], *, strict: bool) -> None:
        """Raises ConfigError, before anything is loaded, for a state dict of another module."""
        own = self.state_dict()
        for key in dict.fromkeys([*own, *given]) if strict else own.keys() & given.keys():
            there, here = (_described(tensors.get(key)) for tensors in (own, given))
            if there != here:
                raise ConfigError(
                    "MW462",
                    f"load_state_dict: {key} is {there} in the module of this rank and {here} in the state dict; give "
                    "that of the planned module.",
                )
        decided = {**self._decided, **self._evaluations.decided}
        loaded = {name: global_tensor(given[name]) for name in decided if name in given}
        check_decided(decided, loaded, "load_state_dict: the state dict")

    def _load(self, name: str, value: Tensor) -> Tensor:
        """This rank's slice of what a state dict has for the tensor `name`, which torch copies. What an optimizer
        updates may have fp32 copies, and no elements here: that is written by `load_state_dict`."""
        slice_ = self.taken(name, value)
        if self._updates is None or self._sources[name].kind != "parameter":
            return slice_
        self._loaded[name] = slice_.clone()  # which may be on the memory that is written
        return self.execution.tensors[name].detach()

    def name_of(self, key: str) -> str:
        """The first name of the tensor that a state dict calls `key`."""
        return self._names[key]

    def weight(self, name: str) -> Tensor:
        """This rank's slice of a parameter or buffer, by its first name (at ZeRO stage 3 collective)."""
        if self._updates is not None and self._sources[name].kind == "parameter":
            return self._updates.weight(name)
        return self.execution.tensors[name].detach()


def _refuse_assignment(name: str) -> NoReturn:
    raise ConfigError(
        "MW464",
        f"{name!r} cannot be assigned in a rank's module: its program has the tensors and values of the planned one. "
        "Assign it before meshwright.plan, or write weights by load_state_dict.",
    )


IN_PLACE = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"})
"""Further methods of tensors that write; the names of all others end with one underscore."""


class _Taken(Tensor):
    """Stands for a gradient that was taken during backward: it reads NaN."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name in IN_PLACE or (name.endswith("_") and not name.endswith("__")):
            raise ConfigError(
                "MW464",
                f"{name} would change a gradient that backward has reduced and taken already, without effect. Clip by "
                "plan.optimizer(..., clip=1.0), scale the loss, or change gradients in the step of an optimizer of "
                "your own, which has complete ones.",
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class _Names(nn.Module):
    """The names of a part of the user's module, whose operators are in the program of the rank: nothing calls it."""

    def _refused(self, *_: Any, **__: Any) -> Any:
        raise ConfigError(
            "MW464",
            "A part of a rank's module has parameters alone: its operators are in the program, so it can neither be "
            "called nor have hooks. Forward hooks of the unsharded module are part of what meshwright.plan captures.",
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "training" and not name.startswith("_"):
            _refuse_assignment(name)
        super().__setattr__(name, value)

    register_parameter = register_buffer = add_module = _refused
    forward = register_forward_hook = register_forward_pre_hook = _refused
    register_full_backward_hook = register_full_backward_pre_hook = register_backward_hook = _refused


class ShardedOptimizer(torch.optim.Optimizer):
    """A torch optimizer over the slices of one rank.

    `step` first adds up the gradients of parameters that several ranks hold, so it is collective; afterwards gradients
    are gone, as `zero_grad` leaves them. A step may have several backward passes, whose gradients are added up; one
    with ZeRO of DeepSpeed. Schedulers of torch take this object. `state_dict` has DTensors in the layouts of the
    parameters, at every stage of ZeRO: torch.distributed.checkpoint saves it, and `load_state_dict` takes that of
    another plan or stage. Both are collective.

    Attributes:
        norm: that of the global gradient in the last step, before clipping; None where it was not needed.
    """

    def __init__(self, module: ShardedModule, updates: Updates) -> None:
        inner, parameters = updates.optimizer, {module.name_of(key): one for key, one in module.named_parameters()}
        groups = [
            {key: value for key, value in group.items() if key != "names"}
            | {"params": [parameters[name] for name in group["names"]]}
            for group in updates.plain().groups
        ]
        super().__init__(groups, inner.defaults)
        self.state = inner.state
        self.norm: float | None = None
        self._module, self._updates = module, updates

    def _pass_options(self, *, back: bool = False) -> None:
        """Schedulers and loops write options into `param_groups`, which have the parameters of the module, as
        torch.distributed.checkpoint expects; those that update may have other tensors. Some optimizers write options in
        a step (an estimate of the learning rate, a number of steps), which come `back`."""
        for group, inner in zip(self.param_groups, self._updates.optimizer.param_groups, strict=True):
            source, target = (inner, group) if back else (group, inner)
            target.update({key: value for key, value in source.items() if key not in ("params", "names")})

    @_not_traced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Complete the gradients and update the weights. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._module.zero:
            if not self._module.pending:  # as torch, where no parameter has a gradient
                if self._asks_for_states():
                    self.init_state()
                return loss
            self._module.check_weights()
        self._pass_options()
        self._reduce()
        self._module.show_nothing()
        self.norm = self._updates.update(measure=False)
        self._pass_options(back=True)
        self._module.begin()
        self._module.note_weights()
        return loss

    def _asks_for_states(self) -> bool:
        """Whether a step without a backward is that of `get_state_dict` of torch.distributed.checkpoint, which sets
        gradients and learning rates to zero so that an optimizer without states makes them."""
        still = all(group.get("lr", 0.0) == 0.0 for group in self.param_groups)
        given = any(one.grad is not None for group in self.param_groups for one in group["params"])
        return still and given and not self.state

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What torch.amp.GradScaler asks first."""
        raise ConfigError(
            "MW464",
            "torch.amp.GradScaler looks for infinities in one rank's part of the gradients, so ranks would differ; use "
            "bf16, which needs no scaling, or train.precision=fp16 of the command.",
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; with ZeRO of DeepSpeed only `step` does so."""
        if isinstance(self._updates, OwnUpdates):
            self._module.zero_grad()

    @_not_traced
    def gradients(self) -> dict[str, Tensor]:
        """The complete gradient of every trained parameter between backward and `step`, as DTensors (collective)."""
        self._reduce()
        return {name: self._module.shown(name, gradient) for name, gradient in self._updates.gradients()}

    def _reduce(self) -> None:
        self._module.check_gradients()
        if not self._module.reduced:
            self._module.check_complete()
        if not self._module.by_deepspeed and not self._module.reduced:
            self._updates.collect()
            self._updates.reduce()
        self._module.reduced = True
        self._module.note_gradients()

    def state_dict(self) -> dict[str, Any]:
        """Collective. Raises StrategyError for a state of slices that no complete one can be made of."""
        self._pass_options()
        execution = self._module.execution
        return optimizer_state.state_dict(self._module, self._updates, execution.program, execution.communicator)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Collective. Raises ConfigError, before anything is loaded, for a state dict of other parameters."""
        self._pass_options()
        execution = self._module.execution
        optimizer_state.load_state_dict(
            self._module, self._updates, execution.program, execution.communicator, state_dict
        )
        for group, loaded in zip(self.param_groups, self._updates.plain().groups, strict=True):
            group.update({key: value for key, value in loaded.items() if key != "names"})
        self._module.note_weights()

    def init_state(self) -> None:
        """Make the states that the first step makes, by a step without gradients at a learning rate of 0: what
        torch.distributed.checkpoint loads has to be there before. Collective. Raises ConfigError with ZeRO of
        DeepSpeed, and after a backward."""
        updates = self._updates
        if not isinstance(updates, ShardedUpdates | BucketedUpdates) or self._module.pending:
            raise ConfigError(
                "MW464",
                "optimizer.init_state needs zero=0 or the native engine, and no backward before it; load the state "
                "before the first step.",
            )
        self._pass_options()
        rates = [(group, group["lr"]) for group in updates.optimizer.param_groups if "lr" in group]
        for group, rate in rates:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        updates.skip(1)
        updates.reduce()
        updates.update(measure=False)
        for group, rate in rates:
            group["lr"] = rate
        self._module.begin()
        self._module.note_weights()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_updates"):
            raise ConfigError("MW464", "The optimizer of a rank has all parameters of the plan; none can be added.")
        super().add_param_group(param_group)


def _divided(groups: Sequence[Mapping[str, Any]]) -> Optimizer:
    """Parameter groups as a config has them. Raises ConfigError for anything else."""
    for group in groups if isinstance(groups, list | tuple) else (None,):
        globs = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(globs, list | tuple) or not globs or not all(isinstance(glob, str) for glob in globs):
            raise ConfigError(
                "MW204",
                f"plan.optimizer: groups = {groups!r:.200}; give the names of parameters, or globs, with their "
                "options, such as [{'params': ['*.bias', '*norm*'], 'weight_decay': 0.0}].",
            )
    found = [(tuple(one["params"]), {key: value for key, value in one.items() if key != "params"}) for one in groups]
    return Optimizer(groups=tuple(ParameterGroup(match=match, args=args) for match, args in found))


def _rank_of(mesh: Mesh, device_mesh: DeviceMesh | None, planned: str) -> tuple[int, str]:
    """This rank's number and device. Raises ConfigError where the ranks at hand are not those of the plan."""
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.axes)
    wanted = f"plan.apply: the plan is for {mesh.size} ranks ({axes})"
    if not (device_mesh is None or isinstance(device_mesh, DeviceMesh)):
        raise ConfigError(
            "MW204",
            f"plan.apply: device_mesh = {device_mesh!r:.60} is no DeviceMesh; give one of "
            f"torch.distributed.device_mesh.init_device_mesh, or leave it out: all {mesh.size} ranks are used, on the "
            f"device that the plan is for ({planned}).",
        )
    if not (dist.is_available() and dist.is_initialized()):
        if mesh.size == 1 and device_mesh is None:
            return 0, planned
        raise ConfigError(
            "MW461",
            f"{wanted}, but torch.distributed is not initialised in this process; start as many of them, for example "
            f"by torchrun --nproc-per-node {mesh.size}, and call torch.distributed.init_process_group().",
        )
    ranks = list(range(dist.get_world_size())) if device_mesh is None else device_mesh.mesh.flatten().tolist()
    if len(ranks) != mesh.size or dist.get_world_size() != mesh.size:
        world = dist.get_world_size()
        where, remedy = f"the default group has {world} ranks", f"plan with mesh={world}, or start {mesh.size} ranks"
        if len(ranks) != world:
            where += f" and device_mesh {len(ranks)}"
            remedy = "give a device_mesh of all ranks" + f", and {remedy}" * (mesh.size != world)
        raise ConfigError("MW461", f"{wanted}, but {where}; {remedy}.")
    if ranks != sorted(ranks):
        raise ConfigError(
            "MW461", f"{wanted} in their order, but device_mesh has them as {ranks}; use init_device_mesh."
        )
    kind = planned if device_mesh is None else device_mesh.device_type
    return dist.get_rank(), kind if kind == "cpu" else f"{kind}:{torch.cuda.current_device()}"


def _strip(name: str) -> str:
    """A name in an objective as a name in the model."""
    return name.removeprefix("model.")


def _by_name(objective: Objective) -> dict[str, Tensor]:
    """Every tensor of a model and its loss, by all its names."""
    tensors = (
        *objective.named_buffers(remove_duplicate=False),
        *objective.named_parameters(remove_duplicate=False),
    )
    return {_strip(name): tensor for name, tensor in tensors}


def _register(module: ShardedModule, objective: Objective, slices: Mapping[str, Tensor]) -> dict[str, str]:
    """Give `module` the slices of all tensors of an objective under their names. Returns the first name of each, under
    which plans know it."""
    every = _by_name(objective)
    known = {id(tensor): name for name, tensor in reversed(every.items())}
    first = {name: known[id(tensor)] for name, tensor in every.items()}
    for path, part in objective.named_modules(remove_duplicate=False):
        own = inside(module, "" if path == "model" else _strip(path))
        for leaf, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                register(own, leaf, slices[known[id(tensor)]])
        own._non_persistent_buffers_set |= part._non_persistent_buffers_set
    return first


def _no_dtensors(program: Program) -> list[Source]:
    """The tensors whose layouts no DTensor has."""
    tensors = [source for source in program.sources if source.kind != "input"]
    layouts, mesh = program.layouts, program.mesh
    return [one for one in tensors if placements(layouts[one.id], one.spec.shape, mesh, any_order=True) is None]


def _to_dtensors(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    assert isinstance(module, ShardedModule)
    for key in [key for key in state_dict if key.startswith(prefix)]:
        name = module.name_of(key.removeprefix(prefix))
        state_dict[key] = module.shown(name, module.weight(name))


def _described(value: Any) -> str:
    if value is None:
        return "missing"
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.60}"


def _from_dtensors(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    assert isinstance(module, ShardedModule)
    given = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
    module.check_loading(given, strict=False)
    for key in [key for key in state_dict if key.startswith(prefix)]:
        if (own := key.removeprefix(prefix)) in module._names:
            state_dict[key] = module._load(module.name_of(own), state_dict[key])
