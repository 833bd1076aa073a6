"""Which gradients are added by one call: buckets, in the order in which backward completes them; and their reduction,
bucket by bucket, while backward still computes others.

A gradient is complete when backward has passed the first use of its parameter, so the order follows from the program
alone and is the same on all ranks. A bucket leaves as soon as its last gradient is there and all buckets before it have
left, so all ranks call in one order whatever happens between. Overlapped calls have process groups of their own: calls
of the program, which may use the same ranks, neither wait behind them nor get mixed up with them. Invariant: every open
gradient is in exactly one bucket, the bytes sent do not depend on how the buckets are cut, and the sums are, bit for
bit, those of the same buckets after backward.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from strategies.core.errors import StrategyError
from strategies.core.graph import ITEM_BYTES
from strategies.core.program import Program
from strategies.core.steps import ALL_REDUCE
from strategies.optimizer.updates import DEFAULT_BUCKETS, BucketLimits, local_elements
from strategies.runtime.communicator import Communicator
from strategies.runtime.flight_recorder import PLACE, Awaited, recorder

BUCKET_BYTES = 25 * 2**20
"""Bytes of a bucket unless configured, as DistributedDataParallel's. On ranks that share their cores every call takes
from what computes."""


@dataclass(frozen=True)
class Bucket:
    """Gradients that are added over `axes` by one all-reduce; `dtype` is that of the sum."""

    axes: tuple[str, ...]
    dtype: str
    names: tuple[str, ...]
    elements: int


def completed(program: Program) -> tuple[str, ...]:
    """The parameters whose gradients are added after backward, in the order in which backward completes them."""
    first: dict[str, int] = {}
    for position, instruction in enumerate(program.instructions):
        for ref in instruction.operands:
            first.setdefault(ref.id, position)
    place = {source.name: first.get(source.id, 0) for source in program.parameters}
    names = [name for name in reversed(program.trainable_names) if program.reductions[name]]
    return tuple(sorted(names, key=lambda name: -place[name]))


def buckets(program: Program, cut: BucketLimits = DEFAULT_BUCKETS) -> tuple[Bucket, ...]:
    """The buckets of `program` in the order in which they are complete. Raises StrategyError for a position behind the
    last gradient."""
    order = completed(program)
    if cut.at is not None and cut.at and cut.at[-1] >= len(order):
        raise StrategyError(
            "MW442",
            f"parallel.comm_fusion.all_reduce.config = {list(cut.at)} cuts behind gradient {cut.at[-1]}, but there are "
            f"{len(order)} gradients to add; choose positions below {len(order)}, or mode: auto.",
        )
    elements = {source.name: local_elements(program, source) for source in program.parameters}
    dtypes = {source.name: _summed_in(source.spec.dtype) for source in program.parameters}
    size = BUCKET_BYTES if cut.size is None else cut.size
    latest: dict[tuple[tuple[str, ...], str, int], list[str]] = {}
    found: list[tuple[tuple[str, ...], str, list[str]]] = []
    for position, name in enumerate(order):
        key = (program.reductions[name], dtypes[name], 0 if cut.at is None else bisect_right(cut.at, position))
        names = latest.get(key)
        full = names and sum(elements[other] for other in [*names, name]) * ITEM_BYTES[dtypes[name]] > size
        if names is None or (full and cut.at is None):
            names = latest[key] = []
            found.append((*key[:2], names))
        names.append(name)
    found.sort(key=lambda one: order.index(one[2][-1]))
    return tuple(
        Bucket(axes, dtype, tuple(names), sum(elements[name] for name in names)) for axes, dtype, names in found
    )


def _summed_in(dtype: str) -> str:
    return dtype if ITEM_BYTES[dtype] >= 4 else "float32"


def predicted(program: Program, *, measure: bool = True) -> dict[str, int]:
    """Bytes that one rank sends per optimizer step for gradients, by collective; `measure` adds the norm (a double)."""
    mesh, sources = program.mesh, {source.name: source for source in program.parameters}
    total = sum(
        all_reduce_elements([local_elements(program, sources[name])], mesh.product(program.reductions[name]))
        * ITEM_BYTES[_summed_in(sources[name].spec.dtype)]
        for name in completed(program)
    )
    norm = all_reduce_elements([1], mesh.size) * 8 if measure and mesh.size > 1 else 0
    return {ALL_REDUCE: total + norm} if total + norm else {}


def all_reduce_elements(elements: Iterable[int], ranks: int) -> int:
    """Elements that a rank sends in an all-reduce of tensors with `elements` elements each, however they are joined."""
    return sum(-(-2 * (ranks - 1) * count // ranks) for count in elements)


class Reduction:
    """Adds the gradients of `holders`. Constructing it with `apart` (own process groups) is collective."""

    def __init__(
        self, buckets: Sequence[Bucket], holders: Mapping[str, nn.Parameter], communicator: Communicator, *, apart: bool
    ) -> None:
        self._buckets, self._holders, self._communicator = buckets, holders, communicator
        group = communicator.own_group if apart else communicator.group
        self._groups = {axes: group(axes) for axes in dict.fromkeys(bucket.axes for bucket in buckets)}
        self._places = [recorder.place(f"the gradients of {', '.join(bucket.names)}") for bucket in buckets]
        self._number = {name: number for number, bucket in enumerate(buckets) for name in bucket.names}
        self._begin()

    def _begin(self) -> None:
        self._missing = [set(bucket.names) for bucket in self._buckets]
        self._running: list[tuple[Awaited | None, list[nn.Parameter], Tensor | None]] = []

    def ready(self, name: str) -> None:
        """The gradient of `name` is complete: launch what can be launched."""
        if name not in self._number:
            return
        self._missing[self._number[name]].remove(name)
        while len(self._running) < len(self._buckets) and not self._missing[len(self._running)]:
            self._launch()

    def finish(self) -> None:
        """Launch the rest, wait for all and hand the sums back."""
        while len(self._running) < len(self._buckets):
            self._launch()
        running = self._running
        self._begin()
        for work, holders, flat in running:
            if flat is None:
                continue
            if work is not None:  # torch types it so; a rank is always in its own groups
                work.wait()
            for holder, piece in zip(holders, torch.split(flat, [one.numel() for one in holders]), strict=True):
                holder.grad = piece.view_as(holder)

    def _launch(self) -> None:
        bucket = self._buckets[len(self._running)]
        holders = [self._holders[name] for name in bucket.names if self._holders[name].grad is not None]
        pieces = [holder.grad.contiguous().view(-1) for holder in holders if holder.grad is not None]
        if not pieces:
            self._running.append((None, [], None))
            return
        flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        for holder in holders:
            holder.grad = None  # the bucket has it now
        recorder.cells[PLACE] = self._places[len(self._running)]
        work = self._communicator.sum(flat, self._groups[bucket.axes], later=True)
        ranks = self._communicator.mesh.product(bucket.axes)
        self._communicator.count(ALL_REDUCE, all_reduce_elements([piece.numel() for piece in pieces], ranks), flat)
        self._running.append((work, holders, flat))
