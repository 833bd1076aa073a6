"""The generated modules of all ranks in one process: a thread per rank, with collectives in shared memory.

One thread runs at a time, until it waits for others, so a run is deterministic; generators of torch are never shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from threading import Condition
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack

from strategies.core.mesh import Mesh
from strategies.core.program import Program
from strategies.runtime.communicator import Communicator
from strategies.runtime.module_tree import build
from strategies.runtime.simulate import assemble
from strategies.runtime.slices import entries_of, slices_of

PATIENCE = 60.0
"""Timeout in seconds of a rank that waits for the others."""


class Meeting:
    """Where ranks exchange tensors."""

    def __init__(self) -> None:
        self.turn = Condition()
        self._given: dict[tuple[int, ...], dict[int, list[Tensor]]] = {}

    def share(self, group: tuple[int, ...], rank: int, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """The contributions of all ranks of a group, in group order. The caller holds `turn`."""
        given = self._given.setdefault(group, {})
        given[rank] = [tensor.detach().clone() for tensor in tensors]
        if len(given) == len(group):
            del self._given[group]
            self.turn.notify_all()
        assert self.turn.wait_for(lambda: len(given) == len(group), PATIENCE), f"rank {rank} waits for {group}"
        return [given[peer] for peer in group]


class InMemory(Communicator):
    """The collectives of one rank, among threads."""

    def __init__(self, mesh: Mesh, rank: int, meeting: Meeting) -> None:
        super().__init__(mesh, rank)
        self.meeting = meeting

    def group(self, axes: Iterable[str]) -> Any:
        return tuple(sorted(self.mesh.group(self.rank, self.mesh.sorted(axes))))

    own_group = group

    def _shared(self, group: Any, *tensors: Tensor) -> list[list[Tensor]]:
        return self.meeting.share(group, self.rank, tensors)

    def sum(self, tensor: Tensor, group: Any, later: bool = False) -> None:
        tensor.copy_(sum((given for (given,) in self._shared(group, tensor)), torch.zeros_like(tensor)))

    def gather(self, into: Tensor, tensor: Tensor, group: Any, later: bool = False) -> None:
        into.copy_(torch.cat([given for (given,) in self._shared(group, tensor)]).view(into.shape))

    def scatter(self, into: Tensor, tensor: Tensor, group: Any, later: bool = False) -> None:
        total = torch.zeros_like(tensor)
        for (given,) in self._shared(group, tensor):
            total += given
        into.copy_(total.chunk(len(group))[group.index(self.rank)])

    def exchange(self, into: Tensor, tensor: Tensor, get: Any, give: Any, group: Any, later: bool = False) -> None:
        parts = tensor.chunk(len(group)) if give is None else tensor.split(give)
        place = group.index(self.rank)
        into.copy_(torch.cat([given[place] for given in self._shared(group, *parts)]))


class Trees:
    """Runs the generated modules of all ranks, with the interface of `Simulation`."""

    def __init__(self, program: Program, values: Mapping[str, Tensor]) -> None:
        self.program, self.mesh = program, program.mesh
        self.meeting = Meeting()
        ranks, batch = range(self.mesh.size), [values[source.name] for source in program.inputs]
        self.slices = [slices_of(values, program, rank) for rank in ranks]
        self.inputs = [entries_of(batch, program, rank) for rank in ranks]
        self.modules = [
            build(program, self.slices[rank], InMemory(self.mesh, rank, self.meeting), "cpu") for rank in ranks
        ]

    def _all(self, work: Callable[[int], Any]) -> list[Any]:
        modes = _get_current_function_mode_stack()  # each thread has its own

        def turn(rank: int) -> Any:
            with self.meeting.turn, ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode)
                return work(rank)

        with ThreadPoolExecutor(self.mesh.size) as pool:
            return list(pool.map(turn, range(self.mesh.size)))

    def run(self, key: int = 0) -> list[list[Tensor]]:
        """The loss of every rank."""
        keys = (key,) * self.program.random
        return [self._all(lambda rank: self.modules[rank](*self.inputs[rank], *keys))]

    def backward(self, losses: Sequence[Tensor]) -> None:
        self._all(lambda rank: losses[rank].backward())

    def buffers(self) -> dict[str, Tensor]:
        return {
            source.name: assemble(
                [slices[source.name] for slices in self.slices],
                self.program.layouts[source.id],
                source.spec.shape,
                self.mesh,
            )
            for source in self.program.sources
            if source.kind == "buffer"
        }

    def gradients(self) -> dict[str, Tensor]:
        found = {}
        for source in self.program.sources:
            if source.trainable and source.kind != "input":
                leaves = [slices[source.name] for slices in self.slices]
                gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in leaves]
                left = replace(self.program.layouts[source.id], partial=frozenset(self.program.reductions[source.name]))
                found[source.name] = assemble(gradients, left, source.spec.shape, self.mesh)
        return found
