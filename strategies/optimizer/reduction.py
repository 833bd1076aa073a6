"""The gradients of one step added over the ranks, bucket by bucket, while backward still computes others.

A bucket leaves as soon as its last gradient is there and all buckets before it have left, so all ranks call in one
order whatever happens between. Overlapped calls have process groups of their own: calls of the program, which may use
the same ranks, neither wait behind them nor get mixed up with them. Invariant: the sums are, bit for bit, those of the
same buckets after backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from strategies.core.steps import ALL_REDUCE
from strategies.optimizer.buckets import Bucket, all_reduce_elements
from strategies.runtime.communicator import Communicator
from strategies.runtime.flight_recorder import PLACE, Awaited, recorder


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
        pieces = [holder.grad for holder in holders if holder.grad is not None]
        if not pieces:
            self._running.append((None, [], None))
            return
        alone = len(pieces) == 1
        flat = pieces[0].contiguous().view(-1) if alone else torch.cat([piece.reshape(-1) for piece in pieces])
        for holder in holders:
            holder.grad = None  # the bucket has it now
        recorder.cells[PLACE] = self._places[len(self._running)]
        work = self._communicator.sum(flat, self._groups[bucket.axes], later=True)
        elements = all_reduce_elements(
            [piece.numel() for piece in pieces], self._communicator.mesh.product(bucket.axes)
        )
        self._communicator.count(ALL_REDUCE, elements, flat)
        self._running.append((work, holders, flat))
