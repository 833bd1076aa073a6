"""One rank's part of a pipeline: it runs its stage as the schedule says, and talks to its peers in the other stages.

Peers are the ranks of the same number in each stage's mesh; they hold the same slices. Values go to the next stage and
gradients come back in the order of the micro-batches, each way over a process group of its own, so that neither can
block the other. Invariant: after `add_shared`, ranks that hold one slice of a parameter in several stages hold the same
bits of its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.engine.communicator import Communicator
from strategies.engine.program import Program
from strategies.graph import Source
from strategies.pipeline.cutting import Stage
from strategies.pipeline.schedule import FORWARD, Action
from strategies.redistribution import ALL_REDUCE

SEND, BROADCAST = "send", "broadcast"


class Gradients(Protocol):
    """What the optimizer parallel offers to a stage."""

    def backward(self, loss: Tensor) -> None: ...

    def backward_from(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None: ...


Forward = Callable[[int, Sequence[Tensor]], Any]
"""Number of the micro-batch, values of earlier stages -> what the stage's program returns."""


class Peers:
    """The ranks that this one talks to beyond its stage. Collective: every rank of every stage makes one.

    `copies` gives in how many stages each shared parameter is held.
    """

    def __init__(self, stage: Stage, communicator: Communicator) -> None:
        self.stage, self._communicator = stage, communicator
        self.number, self.count = communicator.stage, communicator.stages
        self._forward_from, self._backward_to = self._link(self.number - 1)
        self._forward_to, self._backward_from = self._link(self.number)
        self._groups = {held: self._group(held) for held in sorted(set(stage.holders.values()))}
        self.copies = {name: len(held) for name, held in stage.holders.items()}
        self._sending: list[tuple[Any, Tensor]] = []

    def _group(self, stages: Sequence[int]) -> dist.ProcessGroup:
        ranks = [self._rank(stage) for stage in stages]
        group: dist.ProcessGroup = dist.new_group(ranks, use_local_synchronization=True)
        return group

    def _rank(self, stage: int) -> int:
        return stage * self._communicator.mesh.size + self._communicator.rank

    def _link(self, first: int) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """The groups for both ways between the stages `first` and `first + 1`."""
        if not 0 <= first < self.count - 1:
            return None, None
        return self._group((first, first + 1)), self._group((first, first + 1))

    def send(self, value: Tensor, ahead: bool) -> None:
        """Start sending to the next stage, or to the one before."""
        group = self._forward_to if ahead else self._backward_to
        value = value.detach().contiguous()
        work = dist.isend(value, self._rank(self.number + (1 if ahead else -1)), group=group)
        self._communicator.count(SEND, value.numel(), value)
        self._sending = [(one, held) for one, held in self._sending if not one.is_completed()] + [(work, value)]

    def receive(self, like: Tensor, ahead: bool) -> Tensor:
        """A value of the stage before, or a gradient of the next one, written into `like`."""
        group = self._forward_from if ahead else self._backward_from
        dist.recv(like, self._rank(self.number - (1 if ahead else -1)), group=group)
        return like

    def finish(self) -> None:
        """Wait until everything has been sent."""
        for work, _ in self._sending:
            work.wait()
        self._sending = []

    def add_shared(self, gradients: Mapping[str, Tensor]) -> None:
        """Add the gradients of shared parameters over the stages that hold them, in place."""
        for name, held in self.stage.holders.items():
            dist.all_reduce(gradients[name], group=self._groups[held])
            sent = -(-2 * (len(held) - 1) * gradients[name].numel() // len(held))
            self._communicator.count(ALL_REDUCE, sent, gradients[name])

    def add_over_all(self, total: Tensor) -> None:
        """Add a number over all ranks of all stages, in place."""
        dist.all_reduce(total)
        world = self._communicator.world
        self._communicator.count(ALL_REDUCE, -(-2 * (world - 1) // world), total)

    def share_loss(self, total: Tensor) -> None:
        """Give every rank the loss of the last stage, in place."""
        source = (self.count - 1) * self._communicator.mesh.size
        dist.broadcast(total, src=source)
        if self._communicator.world_rank == source:
            self._communicator.count(BROADCAST, 1, total)


class StageRunner:
    """Runs `actions` of one stage on real ranks."""

    def __init__(self, peers: Peers, program: Program, actions: Sequence[Action], device: torch.device | str) -> None:
        self.peers, self.actions, self.device = peers, actions, device
        by_id = {source.id: source for source in program.sources}
        self._received = [(by_id[id], self._local_shape(by_id[id], program)) for id in peers.stage.receives]

    @staticmethod
    def _local_shape(source: Source, program: Program) -> tuple[int, ...]:
        return program.layouts[source.id].local_shape(source.spec.shape, program.mesh)

    @property
    def last(self) -> bool:
        return self.peers.number == self.peers.count - 1

    def step(self, forward: Forward, updates: Gradients) -> Tensor:
        """All micro-batches both ways. Returns the sum of this rank's losses in double, zero before the last stage."""
        received: dict[int, list[Tensor]] = {}
        made: dict[int, list[Tensor]] = {}
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for action in self.actions:
            number = action.micro_batch
            if action.way == FORWARD:
                received[number] = self._values()
                found = forward(number, received[number])
                made[number] = list(found) if isinstance(found, (tuple, list)) else [found]
                if self.last:
                    total += made[number][0].detach().double()
                else:
                    for value in made[number]:
                        self.peers.send(value, ahead=True)
            else:
                self._backward(made.pop(number), updates)
                for value in received.pop(number):
                    if value.requires_grad:
                        gradient = torch.zeros_like(value) if value.grad is None else value.grad
                        self.peers.send(gradient, ahead=False)
        self.peers.finish()
        return total

    def _values(self) -> list[Tensor]:
        found = []
        for source, shape in self._received:
            empty = torch.empty(shape, dtype=getattr(torch, source.spec.dtype), device=self.device)
            found.append(self.peers.receive(empty, ahead=True).requires_grad_(source.trainable))
        return found

    def _backward(self, outputs: Sequence[Tensor], updates: Gradients) -> None:
        if self.last:
            updates.backward(outputs[0])
            return
        learning = [output for output in outputs if output.requires_grad]
        gradients = [self.peers.receive(torch.empty_like(output), ahead=False) for output in learning]
        updates.backward_from(learning, gradients)
