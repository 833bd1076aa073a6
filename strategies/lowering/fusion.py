"""Neighbouring redistributions joined: a pass from program to program.

Two redistributions are joined where neither needs the other's result, all their collectives have the same kind and the
same axes, forward and backward, and they belong to one module or to siblings inside one. The later ones move to the
place of the first. Those that a step may leave without a gradient stay alone: a joined one would make zeros of it, by
which momentum and weight decay move a parameter. Invariant: the values, the gradients and the bytes are those of the
program before, only the calls are fewer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from strategies.core.graph import Ref, fresh
from strategies.core.program import Compute, Copy, Fused, Instruction, Program, Redistribute, rewired
from strategies.core.steps import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER

KINDS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)
"""The collectives that can be joined."""
LARGEST = 25 * 2**20
"""Bytes of one call where no size is configured: larger calls gain nothing from others."""

Kind = tuple[object, ...]


@dataclass
class _Group:
    """Redistributions that will be one; `first` is the position of the first, `sent` are bytes by collective call."""

    first: int
    parts: list[Redistribute]
    sent: list[int]


def fuse(program: Program, sizes: Mapping[str, int]) -> Program:
    """`program` with redistributions joined, as long as no call takes more than `sizes` bytes of its kind of collective
    from a rank. Kinds that `sizes` does not name are left alone, and so is a program that recomputes modules: what runs
    again in backward would be joined with what does not."""
    if program.recompute is not None:
        return program
    groups: list[_Group] = []
    latest: dict[Kind, _Group] = {}
    placed = {source.id: -1 for source in program.sources}
    for position, instruction in enumerate(program.instructions):
        placed[instruction.id] = position
        steps = instruction.collectives if isinstance(instruction, Redistribute) else ()
        if not isinstance(instruction, Redistribute) or not steps or any(step.kind not in sizes for step in steps):
            continue
        if instruction.differentiable and instruction.id in program.optional:
            continue
        sent = [
            math.prod(step.before.local_shape(step.shape, program.mesh)) * instruction.spec.item_bytes for step in steps
        ]
        group = latest.get(kind := _kind(instruction, program))
        if group is not None and placed.get(instruction.value.id, -1) < group.first:
            together = [a + b for a, b in zip(group.sent, sent, strict=True)]
            if all(total <= sizes[step.kind] for total, step in zip(together, steps, strict=True)):
                group.parts.append(instruction)
                group.sent = together
                placed[instruction.id] = group.first
                continue
        latest[kind] = _Group(position, [instruction], sent)
        groups.append(latest[kind])
    return _rewritten(program, [group.parts for group in groups if len(group.parts) > 1])


def _kind(instruction: Redistribute, program: Program) -> Kind:
    """The key that redistributions must share to be fused."""
    path = instruction.path
    return (
        program.batch_splits.get(instruction.operator, ("", -1))[1],  # one may compute while another communicates
        path[:-1] if len(path) > 1 else path,  # siblings, but not all layers of a model
        tuple((step.kind, step.axes) for step in instruction.forward),
        tuple((step.kind, step.axes) for step in instruction.backward),
        instruction.differentiable,
        instruction.id in program.optional,  # joined with others, it would count as used by more than what decides
        instruction.spec.dtype,
    )


def _rewritten(program: Program, groups: Sequence[Sequence[Redistribute]]) -> Program:
    taken = {instruction.id for instruction in program.instructions} | {source.id for source in program.sources}
    names = [fresh(f"{parts[0].id}_and_{len(parts) - 1}_more", taken) for parts in groups]
    fused = {parts[0].id: (name, parts) for name, parts in zip(names, groups, strict=True)}
    renamed = {Ref(part.id): Ref(name, index) for name, parts in fused.values() for index, part in enumerate(parts)}

    def new(ref: Ref) -> Ref:
        return renamed.get(ref, ref)

    instructions: list[Instruction] = []
    for instruction in program.instructions:
        if instruction.id in fused:
            name, parts = fused[instruction.id]
            path = parts[0].path if len({part.path for part in parts}) == 1 else parts[0].path[:-1]
            moved = tuple(replace(part, value=new(part.value)) for part in parts)
            instructions.append(Fused(name, moved, path))
        elif Ref(instruction.id) not in renamed:
            assert isinstance(instruction, Compute | Redistribute | Copy), "nothing overlaps yet"
            instructions.append(rewired(instruction, new))
    return program.with_instructions(instructions, new)
