"""The ranks that one rank of a pipeline talks to beyond its own group.

Invariant: after `add_shared`, ranks that hold one slice of a parameter in several groups have added its gradient to the
same bits; after `share_weights`, its value is the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from strategies.core.steps import ALL_REDUCE
from strategies.lowering.pipeline import Stage
from strategies.runtime.communicator import Communicator
from strategies.runtime.flight_recorder import RECEIVE as RECEIVING
from strategies.runtime.flight_recorder import SEND as SENDING
from strategies.runtime.flight_recorder import recorder

SEND, BROADCAST = "send", "broadcast"


class Peers:
    """The peers of a rank that runs `stages` of those of a pipeline, `every`. Collective: every rank makes one.

    Group g sends values to group g + 1 and gradients back; with `circle`, the last one does so to the first. `copies`
    gives the number of groups that have a parameter, where several have it; `leads` are those of which this is the
    first.
    """

    def __init__(
        self, stages: Sequence[Stage], communicator: Communicator, every: Sequence[Stage], *, circle: bool = False
    ) -> None:
        self._communicator = communicator
        self.number, self.count = communicator.stage, communicator.stages
        links = self.count if circle else self.count - 1
        made = {first: (self._link(first), self._link(first)) for first in range(links)}
        none: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None] = (None, None)
        self._forward_to, self._backward_from = made.get(self.number, none)
        self._forward_from, self._backward_to = made.get((self.number - 1) % self.count, none)
        self._shared = self._holding(stages)
        self._groups = {groups: self._group(groups) for groups in sorted(set(self._holding(every).values()))}
        self.copies = {name: len(groups) for name, groups in self._shared.items()}
        self.leads = frozenset(name for name, groups in self._shared.items() if groups[0] == self.number)
        self._sending: list[tuple[Any, Tensor]] = []

    def _holding(self, stages: Sequence[Stage]) -> dict[str, tuple[int, ...]]:
        """The groups that have a parameter, where several have it."""
        holding = {
            name: tuple(sorted({number % self.count for number in numbers}))
            for stage in stages
            for name, numbers in stage.holders.items()
        }
        return {name: groups for name, groups in holding.items() if len(groups) > 1}

    def _group(self, groups: Sequence[int]) -> dist.ProcessGroup:
        """A process group of the peers in `groups`. torch names it by how many the rank has made before, which must be
        equally many on all of them: so a rank that is in none of `groups` makes one of its own."""
        ranks = [self._rank(group) for group in (groups if self.number in groups else [self.number])]
        group: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
        return group

    def _rank(self, group: int) -> int:
        return group % self.count * self._communicator.mesh.size + self._communicator.rank

    def _link(self, first: int) -> dist.ProcessGroup:
        """A process group for one way between the groups `first` and `first + 1`."""
        groups = sorted((first, (first + 1) % self.count))
        link = self._group(groups)
        if self.number in groups:
            recorder.know(link, map(self._rank, groups), f"groups {groups[0]} and {groups[1]} of the pipeline")
        return link

    def send(self, value: Tensor, ahead: bool) -> None:
        """Start sending to the next group, or to the one before."""
        group = self._forward_to if ahead else self._backward_to
        value = value.detach().contiguous()
        peer = self._rank(self.number + (1 if ahead else -1))
        work = recorder.call(group, SENDING, dist.isend, value, peer, group=group)
        self._communicator.count(SEND, value.numel(), value)
        self._sending = [(call, buffer) for call, buffer in self._sending if not call.is_completed()] + [(work, value)]

    def receive(self, like: Tensor, ahead: bool) -> Tensor:
        """A value of the group before, or a gradient of the next one, written into `like`."""
        group = self._forward_from if ahead else self._backward_from
        recorder.call(group, RECEIVING, dist.recv, like, self._rank(self.number - (1 if ahead else -1)), group=group)
        return like

    def finish(self) -> None:
        """Wait until everything has been sent."""
        for work, _ in self._sending:
            work.wait()
        self._sending = []

    def add_shared(self, gradients: Mapping[str, Tensor]) -> None:
        """Add the gradients of `copies` over the groups that hold them, in place."""
        for name, groups in self._shared.items():
            dist.all_reduce(gradients[name], group=self._groups[groups])
            sent = -(-2 * (len(groups) - 1) * gradients[name].numel() // len(groups))
            self._communicator.count(ALL_REDUCE, sent, gradients[name])

    def share_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite what several groups hold by what the first of them holds."""
        for name, groups in self._shared.items():
            dist.broadcast(weights[name], src=self._rank(groups[0]), group=self._groups[groups])
            if name in self.leads:
                self._communicator.count(BROADCAST, weights[name].numel(), weights[name])

    def add_over_all(self, total: Tensor) -> None:
        """Add a number over all ranks of all groups, in place."""
        dist.all_reduce(total)
        world = self._communicator.world
        self._communicator.count(ALL_REDUCE, -(-2 * (world - 1) // world), total)

    def share(self, tensor: Tensor, group: int) -> None:
        """Give every rank what the first rank of `group` has, in place."""
        source = group * self._communicator.mesh.size
        dist.broadcast(tensor, src=source)
        if self._communicator.world_rank == source:
            self._communicator.count(BROADCAST, tensor.numel(), tensor)

    def share_loss(self, total: Tensor) -> None:
        """Give every rank the loss of the last stage, in place."""
        self.share(total, self.count - 1)

    def to_first(self, values: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """Bring what the first rank of the last group has `into` tensors of rank 0."""
        source, rank = (self.count - 1) * self._communicator.mesh.size, self._communicator.world_rank
        if rank == source:
            for value in values:
                dist.send(value.contiguous(), 0)
                self._communicator.count(SEND, value.numel(), value)
        elif rank == 0:
            for empty in into:
                dist.recv(empty, source)
