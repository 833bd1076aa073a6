"""All ranks of a program in one process, in lockstep: no threads, no process groups, deterministic.

Every value is a list with one tensor per rank; one instruction runs for all ranks before the next. A redistribution is
one autograd function over the ranks' tensors that carries out the same steps as the real engine, so parity here is
parity there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from strategies.core.graph import Ref, rewrite
from strategies.core.layout import Layout, indices
from strategies.core.mesh import Mesh
from strategies.core.program import KEY, Compute, Cooperate, Copy, Fused, Program, RankValue, Redistribute, Start, Wait
from strategies.core.steps import ALL_GATHER, ALL_REDUCE, LOCAL, REDUCE_SCATTER, ReshardingPath, Step
from strategies.rules.registry import Landing, Link, resolve
from strategies.runtime.communicator import Carrier
from strategies.runtime.cooperation import steps_of
from strategies.runtime.module_tree import store
from strategies.runtime.redistributions import Redistribution
from strategies.runtime.transfer import Transfer, cut, local


def shard(tensor: Tensor, layout: Layout, mesh: Mesh) -> list[Tensor]:
    """The slices of a global tensor, one per rank (copies)."""
    return [cut(tensor, layout, mesh, rank) for rank in range(mesh.size)]


def assemble(slices: Sequence[Tensor], layout: Layout, shape: Sequence[int], mesh: Mesh) -> Tensor:
    """The global tensor from the ranks' slices; partial sums are added. Replicas are taken from the lowest rank."""
    result = torch.zeros(tuple(shape), dtype=slices[0].dtype)
    silent = [axis for axis in layout.replica_axes(mesh) if axis not in layout.partial]
    for rank, piece in enumerate(slices):
        if mesh.index(rank, silent) == 0:
            for block, place in layout.blocks(shape, mesh, rank):
                values = piece[indices(place)]
                result[indices(block)] = result[indices(block)] + values if layout.partial else values
    return result


def carry(
    paths: Sequence[ReshardingPath], tensors: Sequence[Sequence[Tensor]], mesh: Mesh, by_rank: Sequence[Mesh] = ()
) -> list[list[Tensor]]:
    """One value along each path, on all ranks, with one collective for all.

    Args:
        paths: with the same collectives over the same axes.
        tensors: by path and rank.
        mesh: that of all ranks.
        by_rank: the mesh as each rank sees it, where it has shares.

    Returns:
        The results by path and rank; none shares memory with another or with an input.
    """
    now, meshes = [list(value) for value in tensors], by_rank or (mesh,) * mesh.size
    for steps in zip(*paths, strict=True):
        if steps[0].kind in LOCAL:
            now = [
                [local(step, meshes[rank], rank)(tensor) for rank, tensor in enumerate(value)]
                for step, value in zip(steps, now, strict=True)
            ]
        else:
            _communicate(steps, now, meshes)
    return [[tensor.clone() for tensor in value] for value in now]


def _communicate(steps: Sequence[Step], values: list[list[Tensor]], meshes: Sequence[Mesh]) -> None:
    """The one collective that stands for `steps`, in place of `values`."""
    for group in map(sorted, meshes[0].groups(steps[0].axes)):
        transfers = [Transfer(steps, meshes[rank], rank) for rank in group]
        pairs = [
            transfer.pack([value[rank] for value in values]) for rank, transfer in zip(group, transfers, strict=True)
        ]
        packed, kind = [given for given, _ in pairs], steps[0].kind
        if kind == ALL_GATHER:
            received: Sequence[Tensor] = [torch.cat(packed)] * len(group)
        elif kind in (ALL_REDUCE, REDUCE_SCATTER):
            total = sum(packed[1:], packed[0])
            received = [total] * len(group) if kind == ALL_REDUCE else total.chunk(len(group))
        else:
            parts = [
                given.chunk(len(group)) if transfer.give is None else torch.split(given, transfer.give)
                for given, transfer in zip(packed, transfers, strict=True)
            ]
            received = [torch.cat(mine) for mine in zip(*parts, strict=True)]
        for rank, buffer, (_, unpack) in zip(group, received, pairs, strict=True):
            for value, result in zip(values, unpack(buffer), strict=True):
                value[rank] = result


def redistribute(
    instruction: Redistribute | Fused, mesh: Mesh, tensors: Sequence[Sequence[Tensor]], by_rank: Sequence[Mesh] = ()
) -> list[list[Tensor]]:
    """A redistribution, or several that are joined, on all ranks: `tensors` and the results by part and rank."""
    parts = instruction.parts

    def by_part(flat: Sequence[Tensor]) -> list[list[Tensor]]:
        return [list(flat[start : start + mesh.size]) for start in range(0, len(flat), mesh.size)]

    def carrier(paths: Sequence[ReshardingPath]) -> Carrier:
        return lambda flat: list(chain(*carry(paths, by_part(flat), mesh, by_rank)))

    if not instruction.differentiable:
        values = [[tensor.detach() for tensor in some] for some in tensors]
        return carry([part.forward for part in parts], values, mesh, by_rank)
    forward, backward = carrier([part.forward for part in parts]), carrier([part.backward for part in parts])
    scales = tuple(part.scale for part in parts for _ in range(mesh.size))
    return by_part(Redistribution.apply(forward, backward, scales, False, *chain(*tensors)))  # type: ignore[no-untyped-call]


def _link(channel: Fused, mesh: Mesh) -> Link:
    paths = steps_of(channel)

    def link(tensors: Sequence[Sequence[Tensor]]) -> Landing:
        results = carry(paths, list(zip(*tensors, strict=True)), mesh)
        return lambda: [list(one) for one in zip(*results, strict=True)]

    return link


class Simulation:
    """Runs a program on simulated ranks.

    After `backward`, `gradients` returns every trainable parameter's global gradient. `run` writes the buffers that the
    model writes; `buffers` returns them.

    Args:
        program: what `lower` made.
        values: the global tensor of every source (batch entries, parameters, buffers, constants), by name; a batch
            entry with the name of a tensor of the model as `input.NAME`.
        by_rank: the program of each rank where their meshes have shares: the same instructions for other shapes.
    """

    def __init__(self, program: Program, values: Mapping[str, Tensor], by_rank: Sequence[Program] = ()) -> None:
        self.program, self.mesh = program, program.mesh
        self.by_rank = tuple(by_rank) or (program,) * self.mesh.size
        self.meshes = tuple(own.mesh for own in self.by_rank)
        self.slices: dict[Ref, list[Any]] = {}
        for source in program.sources:
            shared = source.kind == "input" and source.name in program.tensors
            layout, value = program.layouts[source.id], values[f"input.{source.name}" if shared else source.name]
            pieces = [cut(value, layout, own.mesh, rank) for rank, own in enumerate(self.by_rank)]
            self.slices[Ref(source.id)] = [piece.requires_grad_(source.trainable) for piece in pieces]

    def run(self, key: int = 0) -> list[list[Any]]:
        """Run forward.

        Args:
            key: the random key of the step.

        Returns:
            The outputs, each as a list with one local tensor per rank.
        """
        values: dict[Ref, list[Any]] = {**self.slices, KEY: [key] * self.mesh.size}
        started: dict[Ref, dict[Ref, list[Any]]] = {}
        for number, instruction in enumerate(self.program.instructions):
            if isinstance(instruction, Start):
                started[Ref(instruction.id)] = {ref: values[ref] for ref in instruction.operands}
            elif isinstance(instruction, Wait):
                values.update(self._carried(instruction.of, started.pop(Ref(instruction.start))))
            elif isinstance(instruction, Redistribute | Fused):
                values.update(self._carried(instruction, values))
            elif isinstance(instruction, Copy):
                values[Ref(instruction.id)] = [tensor.clone() for tensor in values[instruction.value]]
            else:
                self._compute(number, instruction, values)
        assert not started, "every start has its wait"
        for rank in range(self.mesh.size):
            written = [(self.slices[Ref(buffer)][rank], values[ref][rank]) for buffer, ref in self.program.updates]
            store([buffer for buffer, _ in written], [value for _, value in written])
        return [values[ref] for ref in self.program.outputs]

    def _carried(self, of: Redistribute | Fused, values: Mapping[Ref, list[Any]]) -> dict[Ref, list[Any]]:
        results = redistribute(of, self.mesh, [values[part.value] for part in of.parts], self.meshes)
        return {Ref(of.id, number): value for number, value in enumerate(results)}

    def _compute(self, number: int, instruction: Compute, values: dict[Ref, list[Any]]) -> None:
        calls: list[tuple[Any, Any]] = []
        for rank, program in enumerate(self.by_rank):
            own = program.instructions[number]
            assert isinstance(own, Compute) and own.id == instruction.id

            def local(leaf: Any, rank: int = rank, mesh: Mesh = program.mesh) -> Any:
                if isinstance(leaf, Ref):
                    return values[leaf][rank]
                return leaf.of(mesh, rank) if isinstance(leaf, RankValue) else leaf

            args, kwargs = rewrite(own.args, local), rewrite(dict(own.kwargs), local)
            calls.append((args, kwargs))
        function: Callable[..., Any] = resolve(instruction.target)
        if isinstance(instruction, Cooperate):
            links = [_link(channel, self.mesh) for channel in instruction.channels]
            results = function(links, lambda run: run, [args for args, _ in calls])
        else:
            results = [function(*args, **kwargs) for args, kwargs in calls]
        if instruction.multiple:
            for index in range(len(results[0])):
                values[Ref(instruction.id, index)] = [result[index] for result in results]
        else:
            values[Ref(instruction.id)] = results

    def backward(self, losses: Sequence[Tensor]) -> None:
        torch.autograd.backward(list(losses), [torch.ones_like(loss) for loss in losses])

    def buffers(self) -> dict[str, Tensor]:
        """Every global buffer, and parameter that forward writes, by name."""
        written = {id for id, _ in self.program.updates}
        return {
            source.name: assemble(
                self.slices[Ref(source.id)], self.program.layouts[source.id], source.spec.shape, self.mesh
            )
            for source in self.program.sources
            if source.kind == "buffer" or source.id in written
        }

    def gradients(self) -> dict[str, Tensor]:
        """Unsharded gradients: the ranks', reduced over the axes that lowering left to the optimizer parallel."""
        found = {}
        for source in self.program.sources:
            if not source.trainable or source.kind == "input":
                continue
            layout = self.program.layouts[source.id]
            pieces = self.slices[Ref(source.id)]
            grads = [torch.zeros_like(piece) if piece.grad is None else piece.grad for piece in pieces]
            partial = replace(layout, partial=frozenset(self.program.reductions[source.name]))
            found[source.name] = assemble(grads, partial, source.spec.shape, self.mesh)
        return found
