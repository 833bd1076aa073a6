"""Optimizer parallel of stage 0: whole gradients and optimizer states on every replica, any precision.

After the last micro-batch every gradient is added over the axes that lowering left open (`Program.reductions`), in
buckets: one all-reduce per bucket, all of them in flight at once. Weights of less than 32 bits get fp32 masters, on
which the optimizer works, and their gradients are accumulated and added in fp32. The norm counts every slice once, so
clipping is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.engine.communicator import Communicator
from strategies.engine.program import Program
from strategies.engine.stages import Peers
from strategies.engine.updates import (
    Groups,
    OptimizerFactory,
    UpdateState,
    check_optimizer,
    layout_of,
    learning,
    learning_groups,
    local_elements,
    options_of,
    parameters,
    placed,
    set_options,
)
from strategies.graph import ITEM_BYTES
from strategies.redistribution import ALL_REDUCE

BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True)
class Bucket:
    """Gradients that are added over `axes` by one all-reduce; `dtype` is that of the sum."""

    axes: tuple[str, ...]
    dtype: str
    names: tuple[str, ...]
    elements: int


def buckets(program: Program, size: int = BUCKET_BYTES) -> tuple[Bucket, ...]:
    """The buckets of `program` in the order in which they are reduced, each of `size` bytes at most or one larger
    gradient."""
    sources = {source.name: source for source in parameters(program)}
    # gradients become ready from the last parameter to the first
    open_names = [name for name in reversed(learning(program)) if program.reductions[name]]

    def key(name: str) -> tuple[tuple[str, ...], str]:
        dtype = sources[name].spec.dtype
        return program.reductions[name], dtype if ITEM_BYTES[dtype] >= 4 else "float32"

    found = []
    for (axes, dtype), group in groupby(sorted(open_names, key=key), key=key):
        names: list[str] = []
        elements = 0
        for name in group:
            more = local_elements(program, sources[name])
            if names and (elements + more) * ITEM_BYTES[dtype] > size:
                found.append(Bucket(axes, dtype, tuple(names), elements))
                names, elements = [], 0
            names.append(name)
            elements += more
        found.append(Bucket(axes, dtype, tuple(names), elements))
    return tuple(found)


def predicted(program: Program, *, measure: bool = True) -> dict[str, int]:
    """Bytes that one rank sends per optimizer step for gradients, by collective; `measure` adds the norm (a double)."""
    mesh = program.mesh
    total = sum(_sent(one.elements, mesh.product(one.axes)) * ITEM_BYTES[one.dtype] for one in buckets(program))
    norm = _sent(1, mesh.size) * 8 if measure and mesh.size > 1 else 0
    return {ALL_REDUCE: total + norm} if total + norm else {}


def _sent(elements: int, ranks: int) -> int:
    """Elements that a rank sends in an all-reduce, counted as `Communicator` counts them."""
    return -(-2 * (ranks - 1) * elements // ranks)


class BucketedUpdates:
    """See `Updates`. The communicator must have the groups of `axes_needed`. In a stage of a pipeline, `peers` add what
    other stages hold."""

    def __init__(
        self,
        module: nn.Module,
        program: Program,
        communicator: Communicator,
        optimizer_factory: OptimizerFactory,
        groups: Groups,
        *,
        clip: float | None = None,
        accumulate: int = 1,
        evaluation: nn.Module | None = None,
        peers: Peers | None = None,
    ) -> None:
        self.module, self.evaluation, self._peers = module, evaluation, peers
        self._program, self._communicator = program, communicator
        self._clip, self._accumulate = clip, accumulate
        self._parameters = {source.name: module.get_parameter(source.name) for source in parameters(program)}
        self._masters = {
            name: nn.Parameter(self._parameters[name].detach().float())
            for name in learning(program)
            if self._parameters[name].element_size() < 4
        }
        self._owned = {name: self._masters.get(name, self._parameters[name]) for name in learning(program)}
        self._groups = learning_groups(program, groups)
        self._optimizer = optimizer_factory(
            [{"params": [self._owned[name] for name in names], **options} for names, options in self._groups]
        )
        check_optimizer(self._optimizer, program, 0)
        self._buckets = buckets(program)
        mesh = program.mesh
        copies = {} if peers is None else peers.copies
        self._replicas = {
            name: mesh.product(layout_of(program, name).replica_axes(mesh)) * copies.get(name, 1)
            for name in self._owned
        }

    @property
    def optimizer(self) -> Optimizer:
        return self._optimizer

    def backward(self, loss: Tensor) -> None:
        (loss if self._accumulate == 1 else loss / self._accumulate).backward()  # type: ignore[no-untyped-call]
        self._to_masters()

    def backward_from(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """As `backward`, from the gradients of what a stage of a pipeline handed on."""
        torch.autograd.backward(list(outputs), list(gradients))
        self._to_masters()

    def _to_masters(self) -> None:
        for name, master in self._masters.items():
            gradient, self._parameters[name].grad = self._parameters[name].grad, None
            if gradient is not None:
                master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)

    def reduce(self) -> None:
        running = []
        for bucket in self._buckets:
            holders = [self._owned[name] for name in bucket.names if self._owned[name].grad is not None]
            if not holders:
                continue
            pieces = [holder.grad for holder in holders if holder.grad is not None]
            alone = len(pieces) == 1
            flat = pieces[0].contiguous().view(-1) if alone else torch.cat([piece.reshape(-1) for piece in pieces])
            work = dist.all_reduce(flat, group=self._communicator.group(bucket.axes), async_op=True)
            sent = _sent(flat.numel(), self._program.mesh.product(bucket.axes))
            self._communicator.count(ALL_REDUCE, sent, flat)
            running.append((work, holders, flat))
        for work, holders, flat in running:
            if work is not None:  # torch types it so; a rank is always in its own groups
                work.wait()
            for holder, piece in zip(holders, torch.split(flat, [one.numel() for one in holders]), strict=True):
                holder.grad = piece.view_as(holder)
        if self._peers is not None:
            self._peers.add_shared({name: self._gradient(name) for name in self._peers.copies})

    def _gradient(self, name: str) -> Tensor:
        """The gradient that the optimizer will use, made of zeros where nothing came back."""
        holder = self._owned[name]
        if holder.grad is None:
            holder.grad = torch.zeros_like(holder)
        return holder.grad

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._program.reductions:
            gradient = self._owned[name].grad if name in self._owned else None
            if gradient is not None:
                yield name, gradient
            else:
                parameter = self._parameters[name]
                yield name, torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))

    def update(self, measure: bool = True) -> float | None:
        norm = self._norm() if measure or self._clip is not None else None
        if self._clip is not None and norm is not None:
            scale = self._clip / (norm + 1e-6)
            if not scale >= 1.0:  # also where the norm is not a number, as torch does
                torch._foreach_mul_([holder.grad for holder in self._owned.values() if holder.grad is not None], scale)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, master in self._masters.items():
                self._parameters[name].copy_(master)
        return norm

    def step(self, measure: bool = True) -> float | None:
        self.reduce()
        return self.update(measure)

    def _norm(self) -> float:
        """The 2-norm of the global gradient, the same number on every rank."""
        names = [name for name, holder in self._owned.items() if holder.grad is not None]
        gradients = [gradient for name in names if (gradient := self._owned[name].grad) is not None]
        device = next(iter(self._owned.values())).device
        total = torch.zeros((), dtype=torch.float64, device=device)
        if gradients:
            squares = torch.stack([norm.double() for norm in torch._foreach_norm(gradients)]).square()
            counts = torch.tensor([float(self._replicas[name]) for name in names], dtype=torch.float64, device=device)
            total = (squares / counts).sum()
        mesh = self._program.mesh
        if self._peers is not None:
            self._peers.add_over_all(total)
        elif mesh.size > 1:
            dist.all_reduce(total, group=self._communicator.group(mesh.names))
            self._communicator.count(ALL_REDUCE, _sent(1, mesh.size), total)
        return math.sqrt(total.item()) if total >= 0 else math.nan

    def weight(self, name: str) -> Tensor:
        return self._parameters[name].detach()

    def set_weight(self, name: str, value: Tensor) -> None:
        with torch.no_grad():
            self._parameters[name].copy_(value)
            if name in self._masters:
                self._masters[name].copy_(value)

    def state(self) -> UpdateState:
        state = UpdateState(plain={"groups": options_of(self._optimizer), "other": {}})
        for name, holder in self._owned.items():
            for key, value in self._optimizer.state.get(holder, {}).items():
                if isinstance(value, Tensor):
                    state.sliced.setdefault(key, {})[name] = value
                else:
                    state.plain["other"].setdefault(name, {})[key] = value
        if self._masters:
            state.sliced["master"] = {name: master.detach() for name, master in self._masters.items()}
        return state

    def load(self, state: UpdateState) -> None:
        with torch.no_grad():
            for name, value in state.sliced.get("master", {}).items():
                self._masters[name].copy_(value)
        set_options(self._optimizer, state.plain["groups"])
        for name, holder in self._owned.items():
            found = {key: entries[name] for key, entries in state.sliced.items() if key != "master" and name in entries}
            found |= state.plain["other"].get(name, {})
            self._optimizer.state[holder] = {key: placed(value, holder) for key, value in found.items()}

    def close(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
