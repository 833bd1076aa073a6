"""What DeepSpeed's ZeRO takes beside the model's own tensors: flat copies, buckets and pieces of gradients.

A stand-in for `strategies.optimizer.zero.zero` that makes tensors of the same sizes at the same moments of a backward,
and computes nothing. Invariant: no process group and no DeepSpeed is needed, so that a plan can be priced anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from strategies.core.program import Program
from strategies.optimizer.bytes_per_element import Need
from strategies.optimizer.updates import Groups, layout_of, parameters, trainable_groups
from strategies.optimizer.zero.deepspeed_config import LARGEST_BUCKET, SMALLEST_ON_DISK, SWAP_BUFFERS, SWAPPED_TOGETHER
from strategies.runtime.offload import NO_OFFLOAD, Offload

ALIGNED = 2
"""Elements to which DeepSpeed rounds a rank's part of a group up, at stages 1 and 2."""
FP32 = 4


@dataclass(frozen=True)
class Group:
    """Parameters that DeepSpeed lays behind one another and cuts into one part per replica: elements by name, and of
    one part."""

    elements: Mapping[str, int]
    replicas: int
    part: int

    def touched(self) -> int:
        """Elements of the parameters that lie at least partly in one rank's part, at most."""
        found = [0] * self.replicas
        start = 0
        for elements in self.elements.values():
            end = start + elements
            for rank in range(start // self.part, min(-(-end // self.part), self.replicas)):
                found[rank] += elements
            start = end
        return max(found)


def groups_of(program: Program, groups: Groups, stage: int) -> list[Group]:
    """The flat tensors of DeepSpeed: one per group of the user and set of replicas."""
    mesh, found = program.mesh, []
    sources = {source.name: source for source in parameters(program)}
    for members, _ in trainable_groups(program, groups):
        by_axes: dict[tuple[str, ...], dict[str, int]] = {}
        for name in members:
            layout = layout_of(program, name)
            local = math.prod(layout.local_shape(sources[name].spec.shape, mesh))
            by_axes.setdefault(layout.replica_axes(mesh), {})[name] = local
        for axes, elements in by_axes.items():
            n = mesh.product(axes)
            if stage == 3:
                part = sum(-(-one // n) for one in elements.values())
            else:
                part = -(-sum(elements.values()) // (n * ALIGNED)) * ALIGNED
            found.append(Group(elements, n, part))
    return found


@dataclass(frozen=True)
class Standing:
    """Bytes that stay from step to step, by part; `host` and `disk` are what offload has put there instead."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    host: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.buffers


class Sharded:
    """Stages 1-3, of parameters on `device`. `bucket` is the size of a bucket in elements, None for the usual one."""

    def __init__(
        self,
        program: Program,
        held: Mapping[str, nn.Parameter],
        groups: Sequence[Group],
        need: Need,
        device: torch.device,
        *,
        stage: int,
        accumulate: int,
        bucket: int | None = None,
        offload: Offload = NO_OFFLOAD,
    ) -> None:
        self.offload, self.lets_go = offload, offload.optimizer != "none"
        self.stage, self.accumulate, self.groups, self.need = stage, accumulate, groups, need
        self.held = held
        one = next(iter(held.values()))
        self.dtype, self.device = one.dtype, device
        self.low = one.element_size() < FP32
        usual = sum(parameter.numel() for parameter in held.values())
        self.bucket = bucket or min(usual + usual % 2, LARGEST_BUCKET)
        self.names = [name for group in groups for name in group.elements]
        self.filled, self.waiting = 0, 0
        self.buffer: Tensor | None = None
        self.pieces: list[Tensor] = []
        self.elements = {name: held[name].numel() for name in self.names}
        for name in self.names:
            held[name].register_post_accumulate_grad_hook(partial(self._arrived, name))  # type: ignore[no-untyped-call]

    @property
    def standing(self) -> Standing:
        """What there is between steps. At stages 1 and 2 parameters are views of the flat tensors."""
        parts = sum(group.part for group in self.groups)
        item = torch.empty(0, dtype=self.dtype).element_size()
        frozen = sum(p.numel() for name, p in self.held.items() if name not in set(self.names)) * item
        states = int(parts * (FP32 + self.need.kept))
        if self.stage == 3:
            # DeepSpeed adds in fp32 at stages 2 and 3
            found = Standing(parts * item + frozen, parts * FP32, states, self.bucket * FP32)
        else:
            found = Standing(sum(group.part * group.replicas for group in self.groups) * item + frozen, 0, states, 0)
        return self._moved(found, parts, item)

    def _moved(self, found: Standing, parts: int, item: int) -> Standing:
        """What offload changes. Gradients follow the states: in fp32, and at stage 3 also as they are added up."""
        largest, host, disk = max(self.elements.values()) * item, 0, 0
        if self.offload.optimizer == "host":
            host = found.optimizer + found.gradients + parts * FP32
            if self.stage < 3:  # a copy of the new weights, and a gradient on its way, on either side
                host += parts * item + largest
                if self.accumulate > 1:  # gradients wait for those of the next micro-batch
                    host += sum(group.touched() for group in self.groups) * item
                found = replace(found, buffers=found.buffers + largest)
            found = replace(found, optimizer=0, gradients=0)
        if self.offload.optimizer == "disk":  # gradients stay in the host's memory
            buffers = SWAP_BUFFERS * min(SWAPPED_TOGETHER, max(group.part for group in self.groups)) * FP32
            host, disk = host + found.gradients + buffers, disk + found.optimizer
            found = replace(found, optimizer=0, gradients=0)
        if self.offload.parameters == "host":
            host, found = host + found.parameters, replace(found, parameters=0)
        if self.offload.parameters == "disk":  # smaller pieces stay
            pieces = [-(-one // group.replicas) * item for group in self.groups for one in group.elements.values()]
            gone = sum(piece for piece in pieces if piece >= SMALLEST_ON_DISK)
            disk, found = disk + gone, replace(found, parameters=found.parameters - gone)
            host += SWAP_BUFFERS * max(pieces)
        return replace(found, host=host, disk=disk)

    def _empty(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(elements, dtype=dtype, device=self.device)

    def skip(self, micro_batches: int) -> None:
        """As behind so many of a step."""
        self.waiting += micro_batches
        if self.stage == 1:
            self.buffer = self._empty(self.bucket, self.dtype)
            for name in self.names:
                self.held[name].grad = torch.zeros_like(self.held[name])
        elif self.stage == 2:
            self.pieces = self.taken()

    def _arrived(self, name: str, parameter: Tensor) -> None:
        """A gradient is there; from stage 2 on it moves into the bucket at once."""
        if self.stage < 3 and self.buffer is None:
            self.buffer = self._empty(self.bucket, self.dtype)
        if self.stage == 1:
            return
        if self.filled and self.filled + self.elements[name] > self.bucket:
            self._flush()
        if self.elements[name] <= self.bucket:
            parameter.grad = None
        self.filled += self.elements[name]

    @property
    def copied(self) -> list[torch.dtype]:
        """The copies of a bucket while it is added up; gloo works on one more."""
        wide = self.low or (self.stage == 3 and self.device.type == "cpu")
        return [self.dtype, torch.float32] if wide else [self.dtype]

    def _flush(self) -> None:
        """Add up the bucket: a copy of it is sent, in fp32."""
        if self.filled:
            copies = [self._empty(self.filled, dtype) for dtype in self.copied]
            del copies
        for name in self.names if self.stage > 1 else ():
            self.held[name].grad = None
        self.filled = 0

    def finish(self) -> None:
        """The end of a backward."""
        self.waiting += 1
        last = self.waiting == self.accumulate
        if self.stage == 1:
            if last:
                for name in self.names:
                    self.held[name].grad = None  # copied into the bucket one after the other
                    self.filled += self.elements[name]
                self._flush()
                self.pieces = self.taken()
        elif self.stage == 2:
            self._flush()
            if not self.pieces:
                self.pieces = self.taken()
            else:
                self.taken()
        else:
            self._flush()
        if last or self.stage > 1:
            self.buffer = None

    def taken(self) -> list[Tensor]:
        """What the rank keeps of the sums: its part in fp32, or else all parameters of which it holds a part."""
        if self.lets_go:
            return []
        if self.low and self.stage == 2:
            return [self._empty(group.part, torch.float32) for group in self.groups]
        return [self._empty(sum(group.touched() for group in self.groups), self.dtype)]

    def during_update(self) -> int:
        """Bytes above those of `standing` while the groups are updated one after the other, at most."""
        item = torch.empty(0, dtype=self.dtype).element_size()
        most = 0
        if self.lets_go:
            return 0
        if self.stage == 3:
            left = 0
        elif self.low and self.stage == 2:
            left = sum(group.part for group in self.groups) * FP32
        else:
            left = sum(group.touched() for group in self.groups) * item
        for group in self.groups:
            copied = group.part * (FP32 if self.stage > 1 or not self.low else item)
            most = max(most, left + copied + (group.part * FP32 if self.low and self.stage == 1 else 0))
            most = max(
                most, (left if group is not self.groups[-1] else 0) + group.part * FP32 + self.need.during([group.part])
            )
        return most

    def host_in_update(self) -> int:
        """The same where the optimizer works on the host."""
        if not self.lets_go:
            return 0
        gradients = sum(group.part for group in self.groups) * FP32 if self.offload.optimizer == "disk" else 0
        return gradients + max(self.need.during([group.part]) for group in self.groups)
