"""The ranks that one rank of a pipeline talks to beyond its own group.

Invariant: after `add_shared`, ranks that hold one slice of a parameter in several groups have added its gradient to the
same bits; after `share_weights`, its value is the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from torch import Tensor

from strategies.core.steps import ALL_REDUCE
from strategies.lowering.pipeline import Stage
from strategies.lowering.pipeline_schedule import stages_of
from strategies.runtime.communicator import Communicator, new_group
from strategies.runtime.flight_recorder import RECEIVE as RECEIVING
from strategies.runtime.flight_recorder import SEND as SENDING
from strategies.runtime.flight_recorder import recorder

SEND, BROADCAST = "send", "broadcast"


class Peers:
    """The peers of a rank of a pipeline, whose `stages` are run by `owners`. Collective: every rank makes one.

    `copies` gives the number of groups that have a parameter, where several have it; `leads` are those of which this is
    the first.
    """

    def __init__(self, communicator: Communicator, stages: Sequence[Stage], owners: Sequence[int]) -> None:
        self._communicator, self.owners = communicator, owners
        self.number, self.count = communicator.stage, communicator.stages
        ahead = [pair for pair in pairwise(owners) if pair[0] != pair[1]]
        directed = {(*pair, True) for pair in ahead} | {(*pair[::-1], False) for pair in ahead}
        self._links = {one: self._link(*one[:2]) for one in sorted(directed)}
        self._shared = self._holding([stages[number] for number in stages_of(self.number, owners)])
        self._groups = {groups: self._group(groups) for groups in sorted(set(self._holding(stages).values()))}
        self.copies = {name: len(groups) for name, groups in self._shared.items()}
        self.leads = frozenset(name for name, groups in self._shared.items() if groups[0] == self.number)
        self._sending: list[tuple[int, float, Any, Tensor]] = []
        """The group, the number of its pass that takes the value, the call, and the value."""

    def _holding(self, stages: Sequence[Stage]) -> dict[str, tuple[int, ...]]:
        """The groups that have a parameter, where several have it; in the order of names, because stages are in another
        order on every group, and all groups must call the collectives of what they share in the same one."""
        holding = {
            name: tuple(sorted({self.owners[number] for number in numbers}))
            for stage in stages
            for name, numbers in stage.holders.items()
        }
        return {name: groups for name, groups in sorted(holding.items()) if len(groups) > 1}

    def _group(self, groups: Sequence[int]) -> dist.ProcessGroup:
        """A process group of the peers in `groups`. torch names it by how many the rank has made before, which must be
        equally many on all of them: so a rank that is in none of `groups` makes one of its own."""
        ranks = [self._rank(group) for group in (groups if self.number in groups else [self.number])]
        return new_group(ranks, True)

    def _rank(self, group: int) -> int:
        return group * self._communicator.mesh.size + self._communicator.rank

    def _link(self, source: int, target: int) -> dist.ProcessGroup:
        """A process group for values or gradients from one group to another."""
        groups = sorted((source, target))
        link = self._group(groups)
        if self.number in groups:
            recorder.know(link, map(self._rank, groups), f"groups {groups[0]} and {groups[1]} of the pipeline")
        return link

    def send(self, value: Tensor, target: int, ahead: bool, taken: float = math.inf) -> None:
        """Start sending a value of a stage or, unless `ahead`, a gradient to the group `target`, whose pass of the
        number `taken` receives it."""
        group = self._links[self.number, target, ahead]
        value = value.detach().contiguous()
        work = recorder.call(group, SENDING, dist.isend, value, self._rank(target), group=group)
        self._communicator.count(SEND, value.numel(), value)
        self._sending.append((target, taken, work, value))

    def receive(self, like: Tensor, source: int, ahead: bool) -> Tensor:
        """What the group `source` sends, written into `like`."""
        group = self._links[source, self.number, ahead]
        recorder.call(group, RECEIVING, dist.recv, like, self._rank(source), group=group)
        return like

    def release(self, target: int, passed: float) -> None:
        """Release what the group `target` has received, which has run its passes up to the number `passed`: gloo does
        not report that a value has been sent, and waiting for one that has takes no time."""
        left = []
        for sent in self._sending:
            if sent[0] == target and sent[1] <= passed:
                sent[2].wait()
            else:
                left.append(sent)
        self._sending = left

    def finish(self) -> None:
        """Wait until everything has been sent."""
        for _, _, work, _ in self._sending:
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
        self.share(total, self.owners[-1])

    def to_first(self, values: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """Bring what the first rank of the last stage has `into` tensors of rank 0."""
        source, rank = self.owners[-1] * self._communicator.mesh.size, self._communicator.world_rank
        if rank == source == 0:
            for value, empty in zip(values, into, strict=True):
                empty.copy_(value)
        elif rank == source:
            for value in values:
                dist.send(value.contiguous(), 0)
                self._communicator.count(SEND, value.numel(), value)
        elif rank == 0:
            for empty in into:
                dist.recv(empty, source)
