"""Optimizer parallel of stages 1-3: DeepSpeed's ZeRO with a replica group per parameter.

DeepSpeed averages over the world but adds only over the ranks that hold the same slice, which it knows as an expert's
data-parallel group; lowering with `sharded_optimizer` multiplies what flows into each parameter by the factor that this
needs. The program must be a tree of modules: stage 3 gathers parameters module by module. Uses of DeepSpeed's private
interface are confined to this file, `state` and `engine`, and each convention has a regression test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.core.errors import StrategyError
from strategies.core.program import Program
from strategies.optimizer.loss_scale import LossScale
from strategies.optimizer.state import OptimizerScalars, States
from strategies.optimizer.updates import (
    Groups,
    OptimizerFactory,
    Precision,
    Updates,
    check_optimizer,
    mark,
    updated_together,
)
from strategies.optimizer.without_gradient import WithoutGradient
from strategies.optimizer.zero.deepspeed_config import (
    SMALLEST_ON_DISK,
    check_parameters,
    engine_config,
    offload_section,
    sizes_of,
    zero_section,
)
from strategies.optimizer.zero.engine import (
    backend,
    count_on,
    data_parallel_group,
    deepspeed_for,
    initialize,
    known_options,
    left_out,
    marker,
    replica_groups,
    swapping_to,
    unrecognised,
)
from strategies.optimizer.zero.state import ZeroState
from strategies.optimizer.zero.swap_files import SwapFiles, keep_gradients
from strategies.runtime.activation_offload import look_up_parameters
from strategies.runtime.communicator import Communicator
from strategies.runtime.disk import Disk
from strategies.runtime.naming import attach, private
from strategies.runtime.offload import NO_OFFLOAD, Offload, OffloadTraffic
from strategies.runtime.peers import Peers
from strategies.runtime.shards import Shards


class ZeroUpdates(Updates):
    """ZeRO by DeepSpeed; see `Updates` for the `shared` arguments. Capture and lower before.

    Weights below fp32 (bf16, fp16) have fp32 masters; gradients are added in fp32. At stage 3 `module` and
    `evaluation` hold their parameters only while they run, by hooks that are placed here. In a pipeline, `peers` add at
    stage 1 what other groups of ranks hold; the module's stages are run without DeepSpeed, which then only updates.

    Args:
        optimizer_factory: makes a torch optimizer from torch's parameter groups.
        stage: 1 to 3.
        precision: dtype of the parameters in the program.
        options: options of DeepSpeed's ZeRO config.
        offload: what DeepSpeed keeps on the host or on a disk.
        loss_scale: constant factor on the loss in fp16; None: one that adapts.
    """

    takes_changes = False

    def __init__(
        self,
        module: nn.Module,
        program: Program,
        communicator: Communicator,
        optimizer_factory: OptimizerFactory,
        groups: Groups,
        *,
        stage: int,
        precision: Precision = "fp32",
        options: Mapping[str, Any],
        offload: Offload = NO_OFFLOAD,
        loss_scale: float | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(module, program, communicator, groups, **shared)
        self._stage, self._offload, self._scaled, self._adapts = stage, offload, precision == "fp16", loss_scale is None
        short, evaluation, peers, on_disk = self._short, self.evaluation, self._peers, offload.optimizer == "disk"
        if peers is not None:
            self._accumulate = 1
        self._sums: dict[str, Tensor] = {}
        self._attached: list[str] = []
        self._shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        for parameter in self._parameters.values():
            if not parameter.dim():  # which DeepSpeed cannot hold; see `reuse.scalars`
                parameter.data = parameter.data.view(1)
        self._trainable, self._waiting = frozenset(program.trainable_names), 0
        check_parameters(self._parameters, self._trainable, stage, precision)
        self._deepspeed = deepspeed_for(next(iter(self._parameters.values())).device)
        elements = sum(parameter.numel() for parameter in self._parameters.values())
        self._files = SwapFiles(Disk(offload.place)) if on_disk or offload.parameters == "disk" else None
        nothing = {"optimizer": OffloadTraffic(), "parameters": OffloadTraffic()}
        self._moved = nothing if self._files is None else self._files.moved
        moving = offload_section(offload, *sizes_of(module, program, self._parameters))
        zero = zero_section(stage, elements, options, known_options(), moving)
        config = engine_config(
            zero, clip=self._clip, accumulate=self._accumulate, precision=precision, loss_scale=loss_scale
        )
        names = replica_groups(self._parameters, program, communicator, stage)
        cut = [one for members, values in self._groups for one in self._by_replicas(members, values, names)]
        optimizer = optimizer_factory([options for _, options in cut])
        check_optimizer(optimizer, program, stage)
        adagrad = isinstance(optimizer, torch.optim.Adagrad)
        if on_disk and adagrad:
            raise StrategyError(
                "MW505",
                "parallel.offload.optimizer = 'disk' cannot be used with Adagrad, whose states exist before DeepSpeed "
                "can write them; use parallel.offload.optimizer=host or another optimizer.",
            )
        for other in (module, short) if stage == 3 else ():
            if other is not None:
                look_up_parameters(other)
        if stage == 3:
            children = {"_short": short, "_evaluation": evaluation}
        else:
            children = {"_replica_groups": marker() if any(names[name] for name in self._trainable) else None}
        for name, child in children.items():  # for DeepSpeed to find, beside the user's
            if child is not None:
                self._attached.append(private(name, module._modules))
                attach(module, self._attached[-1], child)
        group = None if peers is None else data_parallel_group(communicator)
        with unrecognised(optimizer), swapping_to(self._files):
            self._engine = initialize(self._deepspeed, module, optimizer, config, group)
        self._zero = self._engine.optimizer
        self._state = ZeroState(
            self._zero,
            stage,
            program,
            communicator.rank,
            self._parameters,
            [members for members, _ in cut],
            follows=self._follows,
            on_disk=on_disk,
        )
        self._without = WithoutGradient(program, communicator, self._state.masters()[0].device)
        for name in self._without.names:
            arrived = partial(self._without.came, name)
            self._parameters[name].register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
        self._stop_counting = count_on(backend(), communicator)
        if peers is not None:
            self._zero.scaled_global_norm = partial(self._norm_over_groups, peers)
        self._check_swapped()
        if on_disk:
            swapper = self._zero.optimizer_swapper
            swapper._swap_out_gradients = partial(keep_gradients, swapper)
        if adagrad:
            self._begin_adagrad(optimizer)
        evaluations = list(evaluation.children()) if isinstance(evaluation, nn.ModuleDict) else [evaluation]
        for other in [*evaluations, short] if stage == 3 else []:
            if other is not None:
                other.register_forward_pre_hook(self._start_of_pass, prepend=True)

    def _by_replicas(
        self, members: list[str], options: dict[str, Any], names: dict[str, str]
    ) -> Iterator[tuple[list[str], dict[str, Any]]]:
        """One torch group per replica group and what is updated together, with its members: DeepSpeed keeps one flat
        tensor for each."""
        for group in dict.fromkeys(names[name] for name in members):
            for mine in updated_together(self._program, [name for name in members if names[name] == group]):
                found = [self._parameters[name] for name in mine]
                kind = {"name": group, "moe": True} if group else {"name": "dense"}
                yield mine, {**options, "params": found, **kind}

    def _begin_adagrad(self, optimizer: Optimizer) -> None:
        """Adagrad makes its states when it is made, for the parameters; make them for the flat tensors instead."""
        optimizer.state.clear()
        for index, flat in enumerate(self._state.masters()):
            group = optimizer.param_groups[self._state.group_of(index)]
            initial = torch.full_like(flat, group["initial_accumulator_value"])
            optimizer.state[flat] = {"step": torch.zeros((), dtype=torch.float32), "sum": initial}

    def _check_swapped(self) -> None:
        """DeepSpeed would keep everything in memory without a word."""
        written: dict[str, Callable[[], bool]] = {
            "optimizer": lambda: any(map(self._state.swapped, range(len(self._state.masters())))),
            "parameters": lambda: any(part.final_location == "nvme" for part in self._own_parts()),
        }
        for name, check in written.items():
            if getattr(self._offload, name) == "disk" and not check():
                raise StrategyError(
                    "MW505",
                    f"parallel.offload.{name} = 'disk': DeepSpeed never writes pieces below {SMALLEST_ON_DISK // 2**20}"
                    f" MiB, and all that this rank holds of the {name} are smaller. Use parallel.offload.{name}=host, "
                    "a larger model, or fewer ranks.",
                )

    def _norm_over_groups(self, peers: Peers) -> Tensor:
        """The 2-norm of the global gradient for DeepSpeed, which calls it in place of its own at stage 1 (that one
        communicates once per parameter group, of which every stage of a pipeline has another number); -1, as there, if
        it is no number. It counts every slice of every parameter once, and is the same on all ranks."""
        total = torch.zeros((), dtype=torch.float64, device=self._zero.device)
        for name, gradient in self._state.gradients():
            if name not in self._follows:
                norm = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64)
                total += norm.square().to(total.device)
        peers.add_over_all(total)
        norm = total.sqrt().float()
        return norm if torch.isfinite(norm) else torch.full_like(norm, -1.0)

    def _start_of_pass(self, *_: Any) -> None:
        """DeepSpeed learns the order of the modules in one pass for the next. Another program is another pass."""
        self._zero.parameter_offload.get_param_coordinator().reset_step()

    @property
    def module(self) -> Any:
        return self._engine

    @property
    def optimizer(self) -> Optimizer:
        return self._state.optimizer

    def short(self, *args: Any, **kwargs: Any) -> Any:
        self._engine.module = self._short or self._root
        try:
            return self._engine(*args, **kwargs)
        finally:
            self._engine.module = self._root

    def backward(self, loss: Tensor, share: float | None = None, left: int | None = None) -> None:
        if share is not None and left is not None:
            loss = loss * (share * self._accumulate)
            missing = self._accumulate - 1 - left - self._waiting
            self._engine.micro_steps += missing  # by which it knows the last one
            self._waiting += missing
        self._engine.backward(loss)
        self._waiting += 1
        if self._waiting < self._accumulate:
            self._engine.step()  # only counts the micro-batch
        elif self._without.names and self._state.offloaded:
            self._zero.finalize_gradient_accumulation_boundary()  # else what the last micro-batch has none of is lost

    def collect(self) -> None:
        """Gradients below fp32 are added up in fp32; torch adds up the others."""
        for name in self._trainable:
            parameter = self._parameters[name]
            if parameter.grad is not None and parameter.element_size() < 4:
                gradient, parameter.grad = parameter.grad.float(), None
                self._sums[name] = self._sums[name].add_(gradient) if name in self._sums else gradient

    def reduce(self) -> None:
        """In a pipeline only; else DeepSpeed reduces during backward."""
        if self._peers is None:
            return
        for name in self._without.names:
            if name in self._peers.copies or name in self._sums or self._parameters[name].grad is not None:
                self._without.came(name)
        sums = {name: self._sum(name) for name in self._trainable}
        self._peers.add_shared(sums)
        for name, total in sums.items():
            self._parameters[name].grad = total.to(self._parameters[name].dtype)
        self._sums = {}
        self._engine.allreduce_gradients()

    def _sum(self, name: str) -> Tensor:
        """The gradient of a step, of zeros where nothing came back."""
        found = self._sums.get(name, self._parameters[name].grad)
        return torch.zeros_like(self._parameters[name], dtype=torch.float32) if found is None else found

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        scale = self.loss_scale
        for name in self._program.reductions:
            parameter = self._parameters[name]
            found = self._deepspeed.utils.safe_get_full_grad(parameter) if name in self._trainable else None
            if found is None:
                found = torch.zeros(self._shapes[name], device=parameter.device)
            yield name, found.detach().view(self._shapes[name]).float() / (1.0 if scale is None else scale.value)

    def update(self, measure: bool = True) -> float | None:
        with left_out(self.optimizer, self._state.of_names(self._without.agreed())):
            self._engine.step()
        for name in self._without.names:
            self._state.forget_gradient(name)
        if self._peers is not None:  # equal numbers at other places of a flat tensor may be rounded differently
            self._peers.share_weights({name: self._parameters[name].detach() for name in self._peers.copies})
        self._waiting = 0
        self._count()
        # the norm is at hand anyway; a step whose norm is not a number is left out by DeepSpeed
        return float(self._engine.get_global_grad_norm()) if self._engine.was_step_applied() else math.nan

    @property
    def loss_scale(self) -> LossScale | None:
        if not self._scaled:
            return None
        scaler = self._zero.loss_scaler
        good = scaler.cur_iter - scaler.last_overflow_iter - 1 if self._adapts else 0
        return LossScale(float(scaler.cur_scale), self._adapts, good, int(self._engine.skipped_steps))

    def weight(self, name: str) -> Tensor:
        parameter = self._parameters[name]
        if self._stage < 3:
            return parameter.detach().view(self._shapes[name])
        with self._deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone().view(self._shapes[name])

    def pieces(self, write: bool = False) -> Iterator[Shards]:
        return self._state.pieces(write)

    def plain(self) -> OptimizerScalars:
        plain = self._state.plain()
        if (scale := self.loss_scale) is not None:
            plain.loss_scale = asdict(scale)
        return plain

    def begin(self, states: States, plain: OptimizerScalars) -> None:
        if self._scaled and self._adapts and plain.loss_scale is not None:
            saved, scaler = LossScale(**plain.loss_scale), self._zero.loss_scaler
            scaler.cur_scale, scaler.cur_iter = saved.value, scaler.last_overflow_iter + 1 + saved.good
            self._engine.skipped_steps = saved.skipped
        self._state.begin(states, plain)

    def loaded(self) -> None:
        self._state.loaded()

    def marks(self) -> list[tuple[int, int]]:
        return [mark(one) for one in (*self._parameters.values(), *self._state.masters())]

    @property
    def moved(self) -> Mapping[str, OffloadTraffic]:
        traffic = {
            kind: replace(moved) for kind, moved in self._moved.items() if getattr(self._offload, kind) != "none"
        }
        if self._offload.optimizer == "host":
            states = [value for flat in self._state.masters() for value in self.optimizer.state.get(flat, {}).values()]
            tensors = [*self._state.masters(), *(value for value in states if isinstance(value, Tensor))]
            traffic["optimizer"].stored = sum(tensor.nbytes for tensor in tensors)
        if self._offload.parameters == "host":
            traffic["parameters"].stored = self._own_bytes()
        return traffic

    def hosted(self) -> list[Tensor]:
        found: list[Any] = []
        if self._offload.optimizer == "host":
            zero = self._zero
            found += self._state.masters()
            found += [zero.grad_partitions_flat_buffer] if self._stage == 3 else [zero.temp_grad_buffer_for_cpu_offload]
            if self._stage < 3:
                found += [*zero.param_buffer_of_bit16_for_cpu_offload_groups, *zero.accumulated_grads_in_cpu.values()]
        if self._offload.optimizer == "disk":
            found += [self._zero.grad_partitions_flat_buffer]
        if self._offload.parameters == "host":
            found += self._own_parts()
        return [one for tensor in found for one in (tensor, tensor.grad) if one is not None]

    def _own_parts(self) -> list[Any]:
        """This rank's part of every parameter, at stage 3."""
        return [parameter.ds_tensor for parameter in self._parameters.values()]  # type: ignore[attr-defined]

    def _own_bytes(self) -> int:
        return sum(part.nbytes for part in self._own_parts())

    def _count(self) -> None:
        """What DeepSpeed has carried between host and device for one step: gradients out and weights back; parameters
        in for forward and backward of every micro-batch, and out when they are new."""
        if self._offload.optimizer == "host":
            elements, moved = sum(flat.numel() for flat in self._state.masters()), self._moved["optimizer"]
            moved.out += 4 * elements * (1 if self._stage == 3 else self._accumulate)
            moved.back += elements * next(iter(self._parameters.values())).element_size()
        if self._offload.parameters == "host":
            moved = self._moved["parameters"]
            moved.out += self._own_bytes()
            moved.back += 2 * self._accumulate * self._own_bytes()

    def close(self) -> None:
        self._stop_counting()
        self._engine.destroy()
        if self._files is not None:
            self._files.disk.close()
        for name in self._attached:
            self._root._modules.pop(name)
