"""All ranks of a program in one process, in lockstep: no threads, no process groups, deterministic.

Every value is a list with one tensor per rank; one instruction runs for all ranks before the next. A redistribution is
one autograd function over the ranks' tensors that carries out the same steps as the real engine, so parity here is
parity there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from strategies.core.graph import Ref, rewrite
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.program import KEY, Compute, Copy, Fused, Program, RankValue, Redistribute, Start, Wait
from strategies.core.steps import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    EXCHANGE,
    LOCAL,
    PAD,
    REDUCE_SCATTER,
    SLICE,
    ReshardingPath,
    Step,
    receives,
    size_of,
)
from strategies.rules.registry import resolve
from strategies.runtime import coalesced
from strategies.runtime.buffers import store
from strategies.runtime.slices import cut, padded, resized


def shard(tensor: Tensor, layout: Layout, mesh: Mesh) -> list[Tensor]:
    """The slices of a global tensor, one per rank (copies)."""
    return [cut(tensor, layout, mesh, rank) for rank in range(mesh.size)]


def assemble(slices: Sequence[Tensor], layout: Layout, shape: Sequence[int], mesh: Mesh) -> Tensor:
    """The global tensor from the ranks' slices; partial sums are added. Replicas are taken from the lowest rank."""
    whole = torch.zeros(tuple(shape), dtype=slices[0].dtype)
    replicas = layout.replica_axes(mesh)
    silent = [axis for axis in replicas if axis not in layout.partial]
    for rank, piece in enumerate(slices):
        if mesh.index(rank, silent) == 0:
            block = layout.block(shape, mesh, rank)
            inside = piece[tuple(slice(stop - start) for start, stop in block)]
            whole[tuple(slice(*bounds) for bounds in block)] += inside
    return whole


def carry_out(step: Step, tensors: Sequence[Tensor], mesh: Mesh) -> list[Tensor]:
    """One redistribution step on all ranks."""
    n, length = mesh.product(step.axes), step.cut_length(mesh)
    if step.kind == SLICE:
        return [
            resized(t, step.dim, length).chunk(n, step.dim)[mesh.index(rank, step.axes)]
            for rank, t in enumerate(tensors)
        ]
    joined_dim = step.source if step.kind == ALL_TO_ALL else step.dim
    end = step.joined_length(mesh, joined_dim)
    if step.kind == PAD:
        return [
            resized(padded(t, step.dim, n, mesh.index(rank, step.axes)), step.dim, end)
            for rank, t in enumerate(tensors)
        ]
    if step.kind == EXCHANGE:
        return [_exchanged(step, tensors, mesh, rank) for rank in range(mesh.size)]
    results: list[Tensor] = [tensors[0]] * mesh.size
    for group in mesh.groups(step.axes):
        parts = [tensors[rank] for rank in group]
        if step.kind == ALL_GATHER:
            joined = [resized(torch.cat(parts, step.dim), step.dim, end)] * n
        elif step.kind == ALL_REDUCE:
            joined = [_sum(parts)] * n
        elif step.kind == REDUCE_SCATTER:
            joined = list(resized(_sum(parts), step.dim, length).chunk(n, step.dim))
        elif step.kind == ALL_TO_ALL:
            pieces = [resized(part, step.dim, length).chunk(n, step.dim) for part in parts]
            joined = [
                resized(torch.cat([piece[i] for piece in pieces], step.source), step.source, end) for i in range(n)
            ]
        else:
            raise ValueError(step.kind)
        for rank, result in zip(group, joined, strict=True):
            results[rank] = result
    return results


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _exchanged(step: Step, tensors: Sequence[Tensor], mesh: Mesh, rank: int) -> Tensor:
    wanted = step.after.block(step.shape, mesh, rank)
    result = tensors[rank].new_zeros(step.after.local_shape(step.shape, mesh))
    for peer, block in receives(step, mesh, rank):
        local_block = step.before.block(step.shape, mesh, peer)
        source = tuple(slice(s - base, e - base) for (s, e), (base, _) in zip(block, local_block, strict=True))
        target = tuple(slice(s - base, e - base) for (s, e), (base, _) in zip(block, wanted, strict=True))
        if size_of(block):
            result[target] = tensors[peer][source]
    return result


def carry(steps: ReshardingPath, tensors: Sequence[Tensor], mesh: Mesh) -> list[Tensor]:
    """A resharding path on all ranks; no result shares memory with another or with an input."""
    now = list(tensors)
    for step in steps:
        now = carry_out(step, now, mesh)
    return [tensor.clone() for tensor in now]


def carry_all(chains: Sequence[ReshardingPath], tensors: Sequence[Sequence[Tensor]], mesh: Mesh) -> list[list[Tensor]]:
    """One value along each chain, on all ranks, with one collective for all: `tensors` and the result are by chain and
    rank."""
    now = [list(one) for one in tensors]
    for steps in zip(*chains, strict=True):
        if steps[0].kind in LOCAL:
            now = [carry_out(step, one, mesh) for step, one in zip(steps, now, strict=True)]
        else:
            now = _together(steps, now, mesh)
    return [[tensor.clone() for tensor in one] for one in now]


def _together(steps: Sequence[Step], tensors: Sequence[Sequence[Tensor]], mesh: Mesh) -> list[list[Tensor]]:
    results: list[list[Tensor]] = [list(one) for one in tensors]
    for group in mesh.groups(steps[0].axes):
        ranks = sorted(group)
        flat = [coalesced.packed(steps, [one[rank] for one in tensors], mesh, rank) for rank in ranks]
        if steps[0].kind == ALL_GATHER:
            received = [torch.cat(flat)] * len(ranks)
        elif steps[0].kind == ALL_REDUCE:
            received = [_sum(flat)] * len(ranks)
        else:
            received = list(_sum(flat).chunk(len(ranks)))
        for rank, buffer in zip(ranks, received, strict=True):
            shapes = [one[rank].shape for one in tensors]
            for number, found in enumerate(coalesced.unpacked(steps, buffer, shapes, mesh, rank)):
                results[number][rank] = found
    return results


class _Redistributions(torch.autograd.Function):
    """All parts of a `Fused`; tensors by part, then by rank."""

    @staticmethod
    def forward(ctx: Any, parts: Sequence[Redistribute], mesh: Mesh, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.parts, ctx.mesh = parts, mesh
        found = carry_all([part.forward for part in parts], _by_part(tensors, mesh), mesh)
        return tuple(tensor for one in found for tensor in one)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        scaled = [
            [gradient if part.scale == 1 else gradient * part.scale for gradient in one]
            for part, one in zip(ctx.parts, _by_part(gradients, ctx.mesh), strict=True)
        ]
        found = carry_all([part.backward for part in ctx.parts], scaled, ctx.mesh)
        return (None, None, *(tensor for one in found for tensor in one))


def _by_part(tensors: Sequence[Tensor], mesh: Mesh) -> list[Sequence[Tensor]]:
    return [tensors[start : start + mesh.size] for start in range(0, len(tensors), mesh.size)]


class _Redistribution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, instruction: Redistribute, mesh: Mesh, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.instruction, ctx.mesh = instruction, mesh
        return tuple(carry(instruction.forward, tensors, mesh))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        scale = ctx.instruction.scale
        scaled = [gradient if scale == 1 else gradient * scale for gradient in gradients]
        return (None, None, *carry(ctx.instruction.backward, scaled, ctx.mesh))


def redistribute(instruction: Redistribute, mesh: Mesh, tensors: Sequence[Tensor]) -> list[Tensor]:
    """One differentiable redistribution on all ranks."""
    return list(_Redistribution.apply(instruction, mesh, *tensors))  # type: ignore[no-untyped-call]


class Simulation:
    """Runs a program on simulated ranks.

    After `backward`, `gradients` returns every trainable parameter's global gradient. `run` writes the buffers that the
    model writes; `buffers` returns them.

    Args:
        program: what `lower` made.
        values: the global tensor of every source (batch entries, parameters, buffers, constants), by name.
    """

    def __init__(self, program: Program, values: Mapping[str, Tensor]) -> None:
        self.program, self.mesh = program, program.mesh
        self.slices: dict[Ref, list[Any]] = {}
        for source in program.sources:
            pieces = shard(values[source.name], program.layouts[source.id], self.mesh)
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
        for instruction in self.program.instructions:
            if isinstance(instruction, Start):
                started[Ref(instruction.id)] = {ref: values[ref] for ref in instruction.operands}
            elif isinstance(instruction, Wait):
                values.update(self._carried(instruction.of, started.pop(Ref(instruction.start))))
            elif isinstance(instruction, Redistribute | Fused):
                values.update(self._carried(instruction, values))
            elif isinstance(instruction, Copy):
                values[Ref(instruction.id)] = [tensor.clone() for tensor in values[instruction.value]]
            else:
                self._compute(instruction, values)
        assert not started, "every start has its wait"
        for rank in range(self.mesh.size):
            written = [(self.slices[Ref(buffer)][rank], values[ref][rank]) for buffer, ref in self.program.updates]
            store([buffer for buffer, _ in written], [value for _, value in written])
        return [values[ref] for ref in self.program.outputs]

    def _carried(self, one: Redistribute | Fused, values: Mapping[Ref, list[Any]]) -> dict[Ref, list[Any]]:
        """What a redistribution, or several that are joined, make of `values`."""
        if isinstance(one, Redistribute):
            if one.differentiable:
                return {Ref(one.id): redistribute(one, self.mesh, values[one.value])}
            return {Ref(one.id): carry(one.forward, values[one.value], self.mesh)}
        given = [values[part.value] for part in one.parts]
        if one.differentiable:
            flat = [tensor for part in given for tensor in part]
            results = _by_part(_Redistributions.apply(one.parts, self.mesh, *flat), self.mesh)  # type: ignore[no-untyped-call]
        else:
            results = list(carry_all([part.forward for part in one.parts], given, self.mesh))
        return {Ref(one.id, number): list(part) for number, part in enumerate(results)}

    def _compute(self, instruction: Compute, values: dict[Ref, list[Any]]) -> None:
        function = resolve(instruction.target)
        results = []
        for rank in range(self.mesh.size):

            def local(leaf: Any, rank: int = rank) -> Any:
                if isinstance(leaf, Ref):
                    return values[leaf][rank]
                return leaf.of(self.mesh, rank) if isinstance(leaf, RankValue) else leaf

            args, kwargs = rewrite(instruction.args, local), rewrite(dict(instruction.kwargs), local)
            results.append(function(*args, **kwargs))
        if instruction.multiple:
            for index in range(len(results[0])):
                values[Ref(instruction.id, index)] = [result[index] for result in results]
        else:
            values[Ref(instruction.id)] = results

    def backward(self, losses: Sequence[Tensor]) -> None:
        torch.autograd.backward(list(losses), [torch.ones_like(loss) for loss in losses])

    def buffers(self) -> dict[str, Tensor]:
        """Every global buffer, by name."""
        return {
            source.name: assemble(
                self.slices[Ref(source.id)], self.program.layouts[source.id], source.spec.shape, self.mesh
            )
            for source in self.program.sources
            if source.kind == "buffer"
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
            partial = Layout(layout.dims, frozenset(self.program.reductions[source.name]))
            found[source.name] = assemble(grads, partial, source.spec.shape, self.mesh)
        return found
