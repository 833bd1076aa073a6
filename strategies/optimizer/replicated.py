"""Optimizer parallel of stage 0: unsharded gradients and optimizer states on every replica, any precision.

Every gradient is added over the axes that lowering left open (`Program.reductions`), in buckets: one all-reduce per
bucket, all of them in flight at once, with `overlap` while backward of the last micro-batch still runs. Weights of less
than 32 bits get fp32 masters, on which the optimizer works, and their gradients are accumulated and added in fp32. The
norm counts every slice once, so clipping is exact. In fp16 the loss is scaled, and gradients are divided by the scale
once they are added (see `loss_scale`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from strategies.core.graph import Source
from strategies.core.program import Program
from strategies.optimizer.buckets import Reduction, buckets
from strategies.optimizer.kernels import choose_for_device, groups_by_parameter
from strategies.optimizer.loss_scale import LossScale
from strategies.optimizer.own_updates import OwnUpdates
from strategies.optimizer.state import (
    OptimizerScalars,
    States,
    check_shape,
    groups_of,
    is_of_element,
    is_scalar,
    placed,
    set_groups,
)
from strategies.optimizer.updates import (
    DEFAULT_BUCKETS,
    BucketLimits,
    Groups,
    OptimizerFactory,
    check_optimizer,
    layout_of,
    mark,
)
from strategies.runtime.communicator import Communicator
from strategies.runtime.shards import MODEL, OPTIMIZER, KnownShards, Shard, Shards, of_slice, replicated

TOGETHER = 2**25
"""Bytes of the gradients that become fp32 by one call, about."""


class BucketedUpdates(OwnUpdates):
    """Replicated updates; see `Updates` for the `shared` arguments.

    Args:
        optimizer_factory: makes a torch optimizer from torch's parameter groups.
        cut: limits of gradient buckets.
        overlap: reduce gradients during backward.
        scale: the loss scale in fp16.
    """

    def __init__(
        self,
        module: nn.Module,
        program: Program,
        communicator: Communicator,
        optimizer_factory: OptimizerFactory,
        groups: Groups,
        *,
        cut: BucketLimits = DEFAULT_BUCKETS,
        overlap: bool = False,
        scale: LossScale | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(module, program, communicator, groups, scale=scale, **shared)
        self._masters = {
            name: nn.Parameter(self._parameters[name].detach().float())
            for name in program.trainable_names
            if self._parameters[name].element_size() < 4
        }
        self._owned = {name: self._masters.get(name, self._parameters[name]) for name in program.trainable_names}
        self._members = [names for names, _ in self._groups]
        self._optimizer = optimizer_factory(
            [{"params": [self._owned[name] for name in names], **options} for names, options in self._groups]
        )
        check_optimizer(self._optimizer, program, 0)
        choose_for_device(self._optimizer)
        cuts = buckets(program, cut)
        self._reduction = Reduction(cuts, self._owned, communicator, apart=overlap)
        self._micro_batches, self._last, self._known_shards = 0, False, KnownShards()
        self._hooks = [
            self._parameters[name].register_post_accumulate_grad_hook(partial(self._arrived, name))  # type: ignore[no-untyped-call]
            for name in (chain.from_iterable(bucket.names for bucket in cuts) if overlap else ())
        ]
        mesh, copies = program.mesh, {} if self._peers is None else self._peers.copies
        self._replicas = {
            name: mesh.product(layout_of(program, name).replica_axes(mesh)) * copies.get(name, 1)
            for name in self._owned
        }

    def backward(self, loss: Tensor, share: float | None = None, left: int | None = None) -> None:
        self._micro_batches += 1
        self._last = self._micro_batches == self._accumulate if left is None else not left
        self._divided(loss, share).backward()  # type: ignore[no-untyped-call]
        self.collect()

    def skip(self, micro_batches: int) -> None:
        """Count the given number of micro-batches as done, with zero gradients."""
        self._micro_batches += micro_batches
        for holder in self._owned.values():
            holder.grad = torch.zeros_like(holder)

    def collect(self) -> None:
        self._to_masters(self._masters)

    def _arrived(self, name: str, parameter: Tensor) -> None:
        """Backward has just completed the gradient of one micro-batch."""
        if self._last:
            self._to_masters([name])
            self._reduction.ready(name)

    def _to_masters(self, names: Iterable[str]) -> None:
        """Add gradients of less than 32 bits to those of the masters, by few calls and with few of them in memory
        twice."""
        first: list[tuple[nn.Parameter, Tensor]] = []
        for name in names:
            if name in self._masters and (gradient := self._parameters[name].grad) is not None:
                master, self._parameters[name].grad = self._masters[name], None
                if master.grad is not None:
                    master.grad.add_(gradient)
                    continue
                first.append((master, gradient))
                if sum(one.nbytes for _, one in first) >= TOGETHER:
                    _widen(first)
        _widen(first)

    def reduce(self) -> None:
        self._reduction.finish()
        if self._peers is not None:
            self._peers.add_shared({name: self._gradient(name) for name in self._peers.copies})
        if self._scale is not None and (found := self._present()):
            torch._foreach_div_(found, self._scale.value)

    def _present(self) -> list[Tensor]:
        return [gradient for holder in self._owned.values() if (gradient := holder.grad) is not None]

    def _gradient(self, name: str) -> Tensor:
        """The gradient that the optimizer will use, made of zeros where nothing came back."""
        holder = self._owned[name]
        if holder.grad is None:
            holder.grad = torch.zeros_like(holder)
        return holder.grad

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._program.reductions:
            parameter, gradient = self._parameters[name], self._owned[name].grad if name in self._owned else None
            if gradient is None:
                gradient = torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
            yield name, gradient

    def update(self, measure: bool = True) -> float | None:
        self._micro_batches, self._last = 0, False
        return super().update(measure)

    def forget(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)

    def _squares(self) -> Tensor:
        device = next(iter(self._parameters.values())).device
        if not (gradients := self._present()):
            return torch.zeros((), dtype=torch.float64, device=device)
        replicas = [float(self._replicas[name]) for name, holder in self._owned.items() if holder.grad is not None]
        squares = torch.stack(torch._foreach_norm(gradients)).double().square()
        return (squares / torch.tensor(replicas, dtype=torch.float64, device=device)).sum()

    def weight(self, name: str) -> Tensor:
        return self._parameters[name].detach()

    def pieces(self, write: bool = False) -> Iterator[Shards]:
        found = {}
        for source in self._program.parameters:
            shape, name = source.spec.shape, source.name
            if not write and name in self._follows:
                continue
            holder = self._owned.get(name, self._parameters[name])
            made = partial(self._made, source)
            found[MODEL + name] = self._known_shards.of(MODEL + name, holder, partial(made, holder))
            for state, value in self._optimizer.state.get(holder, {}).items():
                if not is_scalar(value, holder) or (write and not shape and is_of_element(state, value)):
                    fits = value.shape == holder.shape
                    check_shape(self._optimizer, state, value, name, fits or holder.shape == shape)
                    key = f"{OPTIMIZER}{state}/{name}"
                    found[key] = self._known_shards.of(key, value, partial(made, value, fits))
        yield found

    def _made(self, source: Source, tensor: Tensor, fits: bool = True) -> list[Shard]:
        """The shards of a parameter, or of a state that may not have its shape."""
        if not fits:
            return [replicated(tensor)]
        shape, layout = source.spec.shape, self._program.layouts[source.id]
        return of_slice(shape, layout.blocks(shape, self._program.mesh, self._communicator.rank), tensor)

    def plain(self) -> OptimizerScalars:
        plain = OptimizerScalars(groups_of(self._optimizer, self._members))
        for name, holder in self._owned.items():
            state = self._optimizer.state.get(holder, {})
            plain.scalars[name] = {key: value for key, value in state.items() if is_scalar(value, holder)}
        if self._scale is not None:
            plain.loss_scale = asdict(self._scale)
        return plain

    def begin(self, states: States, plain: OptimizerScalars) -> None:
        set_groups(self._optimizer, self._members, plain)
        if self._scale is not None and self._scale.adapts and plain.loss_scale is not None:
            self._scale = LossScale(**plain.loss_scale | {"adapts": True})
        shapes = {source.name: source.spec.shape for source in self._program.parameters}
        groups = groups_by_parameter(self._optimizer)
        for name, holder in self._owned.items():
            known = plain.scalars.get(name, {})
            found = {key: placed(key, value, holder, groups[holder]) for key, value in known.items()}
            for key, entries in states.items():
                if name in entries:
                    stored = entries[name]
                    size = holder.shape if stored.shape == shapes[name] else stored.shape
                    dtype = holder.dtype if stored.like_weights else stored.dtype
                    found[key] = torch.zeros(size, dtype=dtype, device=holder.device)
            self._optimizer.state[holder] = found

    def loaded(self) -> None:  # weights below 32 bits follow from their masters
        if self._masters:
            with torch.no_grad():
                weights: list[Tensor] = [self._parameters[name] for name in self._masters]
                torch._foreach_copy_(weights, list[Tensor](self._masters.values()))

    def marks(self) -> list[tuple[int, int]]:
        return [mark(one) for name, master in self._masters.items() for one in (master, self._parameters[name])]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._optimizer.zero_grad(set_to_none=True)


def _widen(first: list[tuple[nn.Parameter, Tensor]]) -> None:
    """Give each master its first gradient in its own dtype, and forget the pairs."""
    if first:
        wide = [torch.empty_like(master) for master, _ in first]
        torch._foreach_copy_(wide, [gradient for _, gradient in first])
        for (master, _), gradient in zip(first, wide, strict=True):
            master.grad = gradient
        first.clear()
