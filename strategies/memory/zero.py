"""What DeepSpeed's ZeRO allocates beside the model's own tensors: flat copies, buckets and parts of gradients.

`ZeroBuffers` stands in for `strategies.optimizer.zero.zero`: it makes tensors of the same sizes at the same moments of
a backward, and computes nothing. `gather_late` does the same for the parameters of stage 3. Invariant: neither a
process group nor DeepSpeed is needed, so the memory of a plan can be predicted anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from strategies.core.program import Program
from strategies.optimizer.bytes_per_element import Need
from strategies.optimizer.settings import OptimizerSettings
from strategies.optimizer.updates import (
    Groups,
    layout_of,
    local_elements,
    trainable_groups,
    updated_together,
)
from strategies.optimizer.zero.deepspeed_config import LARGEST_BUCKET, SMALLEST_ON_DISK, SWAP_BUFFERS, SWAPPED_TOGETHER
from strategies.optimizer.zero.partition import elements_of_part

FP32 = 4


@dataclass(frozen=True)
class FlatGroup:
    """Parameters that DeepSpeed concatenates and cuts into one part per replica.

    Attributes:
        elements: Elements of every parameter, by full name.
        replicas: Ranks that have the same parameters.
        part: Elements of one rank's part.
    """

    elements: Mapping[str, int]
    replicas: int
    part: int

    def touched(self) -> int:
        """Elements of the parameters that overlap one rank's part, at most."""
        elements_by_rank = [0] * self.replicas
        start = 0
        for elements in self.elements.values():
            end = start + elements
            for rank in range(start // self.part, min(-(-end // self.part), self.replicas)):
                elements_by_rank[rank] += elements
            start = end
        return max(elements_by_rank)


def flat_groups(program: Program, groups: Groups, stage: int) -> list[FlatGroup]:
    """The flat tensors of DeepSpeed: one per parameter group of the user and set of replicas."""
    sources, flat = {source.name: source for source in program.parameters}, []
    for members, _ in trainable_groups(program, groups):
        by_axes: dict[tuple[str, ...], dict[str, int]] = {}
        for name in members:
            axes = layout_of(program, name).replica_axes(program.mesh)
            by_axes.setdefault(axes, {})[name] = local_elements(program, sources[name])
        for axes, elements in by_axes.items():
            n = program.mesh.product(axes)
            for names in updated_together(program, list(elements)):
                own = {name: elements[name] for name in names}
                flat.append(FlatGroup(own, n, elements_of_part(list(own.values()), n, stage)))
    return flat


@dataclass(frozen=True)
class PersistentBytes:
    """Bytes that stay from step to step, by part; `host` and `disk` are what offload has put there instead."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.parameters + self.gradients + self.optimizer + self.buffers


def complete_bytes(program: Program) -> dict[str, tuple[int, int]]:
    """Bytes of every parameter that DeepSpeed's stage 3 divides: of its elements, and of all parts of it."""
    found = {}
    for source in program.parameters:
        ranks = program.mesh.product(layout_of(program, source.name).replica_axes(program.mesh))
        elements = local_elements(program, source)
        if ranks > 1:
            part = elements_of_part([elements], ranks, 3)
            found[source.name] = elements, ranks * part * source.spec.item_bytes
    return found


class ZeroBuffers:
    """The tensors of stages 1-3 for a rank's `parameters`, by full name; `need` is what the optimizer needs."""

    def __init__(
        self, program: Program, parameters: Mapping[str, nn.Parameter], need: Need, settings: OptimizerSettings
    ) -> None:
        self.stage, self.accumulate, self.offload = settings.stage, settings.accumulate, settings.offload
        self.groups = flat_groups(program, settings.groups_for(program), settings.stage)
        self.parameters, self.need = parameters, need
        self.on_device = self.offload.optimizer == "none"
        first = next(iter(parameters.values()))
        self.dtype, self.item, self.device = first.dtype, first.itemsize, torch.device(settings.device)
        self.low = self.item < FP32
        self.compact = self.low and self.stage == 2
        """Whether gradients are added up in a rank's part in fp32, from the first bucket to the update."""
        every = sum(parameter.numel() for parameter in parameters.values())
        self.bucket = settings.bucket or min(every + every % 2, LARGEST_BUCKET)
        self.names = [name for group in self.groups for name in group.elements]
        self.elements = {name: parameters[name].numel() for name in self.names}
        self.parts = sum(group.part for group in self.groups)
        divided = complete_bytes(program) if settings.stage == 3 else {}
        self.staying = {name: more for name, (size, more) in divided.items() if size <= settings.complete}
        """Bytes of the parameters that stay complete at stage 3, but during an update."""
        self.filled = self.finished = 0
        self.buffer: Tensor | None = None
        self.pieces: list[Tensor] = []
        for name in self.names:
            parameters[name].register_post_accumulate_grad_hook(partial(self._arrived, name))  # type: ignore[no-untyped-call]

    @property
    def touched(self) -> int:
        """Elements of the parameters that overlap a rank's parts, at most."""
        return sum(group.touched() for group in self.groups)

    @property
    def persistent(self) -> PersistentBytes:
        """Bytes between steps. At stages 1 and 2 parameters are views of the flat tensors."""
        trainable = set(self.names)
        frozen = sum(p.numel() for name, p in self.parameters.items() if name not in trainable) * self.item
        states = int(self.parts * (FP32 + self.need.kept))
        if self.stage == 3:  # DeepSpeed adds gradients in fp32 there
            on_device = PersistentBytes(self.parts * self.item + frozen, self.parts * FP32, states, self.bucket * FP32)
        else:
            flat = sum(group.part * group.replicas for group in self.groups) * self.item
            on_device = PersistentBytes(flat + frozen, 0, states, 0)
        offloaded = self._offloaded(on_device)
        return replace(offloaded, parameters=offloaded.parameters + sum(self.staying.values()))

    def _offloaded(self, persistent: PersistentBytes) -> PersistentBytes:
        """Gradients follow the optimizer's states: in fp32, and at stage 3 also as they are added up."""
        item, parts = self.item, self.parts
        largest, host, disk = max(self.elements.values()) * item, 0, 0
        if self.offload.optimizer == "host":
            host = persistent.optimizer + persistent.gradients + parts * FP32
            if self.stage < 3:  # a copy of the new weights, and a gradient on its way, on either side
                host += parts * item + largest
                if self.accumulate > 1:  # gradients wait for those of the next micro-batch
                    host += self.touched * item
                persistent = replace(persistent, buffers=persistent.buffers + largest)
            persistent = replace(persistent, optimizer=0, gradients=0)
        if self.offload.optimizer == "disk":  # gradients stay in the host's memory
            buffers = SWAP_BUFFERS * min(SWAPPED_TOGETHER, max(group.part for group in self.groups)) * FP32
            host, disk = host + persistent.gradients + buffers, disk + persistent.optimizer
            persistent = replace(persistent, optimizer=0, gradients=0)
        if self.offload.parameters == "host":
            host, persistent = host + persistent.parameters, replace(persistent, parameters=0)
        if self.offload.parameters == "disk":  # smaller pieces stay
            pieces = [-(-size // group.replicas) * item for group in self.groups for size in group.elements.values()]
            written = sum(piece for piece in pieces if piece >= SMALLEST_ON_DISK)
            disk, persistent = disk + written, replace(persistent, parameters=persistent.parameters - written)
            host += SWAP_BUFFERS * max(pieces)
        return replace(persistent, host=host, disk=disk)

    def _empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(elements, dtype=dtype, device=self.device)

    def skip(self, micro_batches: int) -> None:
        """The state after the given number of micro-batches of a step."""
        self.finished += micro_batches
        if self.stage == 1:
            self.buffer = self._empty(self.bucket, self.dtype)
            for name in self.names:
                self.parameters[name].grad = torch.zeros_like(self.parameters[name])
        elif self.stage == 2:
            self.pieces = self.taken()

    def _arrived(self, name: str, parameter: Tensor) -> None:
        """A gradient is complete; from stage 2 on it moves into the bucket at once."""
        if self.stage < 3 and self.buffer is None:
            self.buffer = self._empty(self.bucket, self.dtype)
        if self.stage > 1:
            self._fill(name, parameter)

    def _fill(self, name: str, parameter: Tensor) -> None:
        elements = self.elements[name]
        if self.filled and self.filled + elements > self.bucket:
            self._flush()
        if elements <= self.bucket:
            parameter.grad = None
        self.filled += elements

    @property
    def copied(self) -> list[torch.dtype]:
        """The copies of a bucket while it is added up: one is sent, in fp32; gloo works on one more."""
        if self.stage == 3 and self.device.type == "cpu":
            return [torch.float32, torch.float32]
        wide = self.low
        return [self.dtype, torch.float32] if wide else [self.dtype]

    def _flush(self) -> None:
        """Add up the bucket."""
        if self.filled and self.compact and not self.pieces:
            self.pieces = self.taken()
        if self.filled:
            copies = [self._empty(self.filled, dtype) for dtype in self.copied]
            del copies
        for name in self.names if self.stage > 1 else ():
            self.parameters[name].grad = None
        self.filled = 0

    def finish(self) -> None:
        """The end of a backward."""
        self.finished += 1
        last = self.finished == self.accumulate
        if self.stage == 1 and last:
            for name in self.names:
                self.parameters[name].grad = None  # copied into the bucket one after the other
                self.filled += self.elements[name]
        if self.stage > 1 or last:
            self._flush()
        if self.stage == 1 and last:
            self.pieces = self.taken()
        elif self.stage == 2 and not self.compact:
            taken = self.taken()
            self.pieces = self.pieces or taken
            del taken
        if last or self.stage > 1:
            self.buffer = None

    def taken(self) -> list[Tensor]:
        """What the rank keeps of the sums: its part in fp32, or else all parameters that overlap it."""
        if self.compact:
            return [self._empty(group.part, torch.float32) for group in self.groups]
        if not self.on_device:
            return []
        return [self._empty(self.touched, self.dtype)]

    def during_update(self) -> int:
        """Bytes beside the persistent ones while the groups are updated one after the other, at most."""
        if not self.on_device:
            return self.parts * FP32 if self.compact else 0
        if self.stage == 3:
            gradients = 0
        elif self.compact:
            gradients = self.parts * FP32
        else:
            gradients = self.touched * self.item
        most = 0
        for group in self.groups:
            copied = group.part * (FP32 if self.stage > 1 or not self.low else self.item)
            widened = group.part * FP32 if self.low and self.stage == 1 else 0
            left = gradients if group is not self.groups[-1] else 0
            updating = left + group.part * FP32 + self.need.during([group.part])
            most = max(most, gradients + copied + widened, updating)
        return max(most - sum(self.staying.values()), 0)

    def host_in_update(self) -> int:
        """Bytes of the host beside the persistent ones where the optimizer works there."""
        if self.on_device:
            return 0
        gradients = self.parts * FP32 if self.offload.optimizer == "disk" else 0
        return gradients + max(self.need.during([group.part]) for group in self.groups)


class GatheredModule:
    """The parameters of one module at stage 3, complete only while it runs, forward or backward. Several are gathered
    into one flat tensor, and copied out of it."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.shapes = [parameter.shape for parameter in parameters]

    def gather(self) -> None:
        """Make all parameters complete."""
        missing = [(p, shape) for p, shape in zip(self.parameters, self.shapes, strict=True) if p.shape != shape]
        flat = missing[0][0].new_empty(sum(shape.numel() for _, shape in missing)) if len(missing) > 1 else None
        for parameter, shape in missing:
            parameter.data = parameter.data.new_empty(shape)
        del flat

    def release(self) -> None:
        """Free all parameters."""
        for parameter in self.parameters:
            parameter.data = parameter.data.new_empty(0)

    def run(self, forward: Callable[..., Any], *inputs: Any) -> Any:
        """`forward` between a gather and a release; backward of it as well."""
        inputs = _before_gradients(self.release, inputs)
        self.gather()
        results = forward(*inputs)
        self.release()
        several = isinstance(results, tuple)
        outputs = _before_gradients(self.gather, results if several else (results,))
        return outputs if several else outputs[0]


def gather_late(module: nn.Module, staying: Collection[nn.Parameter] = ()) -> list[GatheredModule]:
    """Make every module inside gather its parameters when it runs and release them afterwards, but those `staying`."""
    gathered, complete = [], set(map(id, staying))
    for child in module.modules():
        own = [one for one in child._parameters.values() if one is not None and id(one) not in complete]
        if own:
            gathered.append(GatheredModule(own))
            child.forward = partial(gathered[-1].run, child.forward)
    for holder in gathered:
        holder.release()
    return gathered


class _Hook(torch.autograd.Function):
    """Calls something in backward, when the gradients of what passes are complete."""

    @staticmethod
    def forward(ctx: Any, then: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.then = then
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.then()
        return (None, *gradients)


def _before_gradients(then: Callable[[], None], values: tuple[Any, ...]) -> tuple[Any, ...]:
    """`values`, which call `then` in backward before their gradients go on."""
    at = [i for i, value in enumerate(values) if isinstance(value, Tensor) and value.requires_grad]
    if not at or not torch.is_grad_enabled():
        return values
    passed = dict(zip(at, _Hook.apply(then, *(values[i] for i in at)), strict=True))  # type: ignore[no-untyped-call]
    return tuple(passed.get(i, value) for i, value in enumerate(values))
