"""Neighbouring redistributions joined: a pass from program to program.

Two redistributions are joined where neither needs the other's result, all their collectives have the same kind and the
same axes, forward and backward, and they belong to one module or to siblings inside one. The later ones move to the
place of the first. Invariant: the values and the bytes are those of the program before, only the calls are fewer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from strategies.core.graph import Ref, fresh, with_leaves
from strategies.core.mesh import Mesh
from strategies.core.program import Compute, Copy, Fused, Instruction, Program, Redistribute
from strategies.core.steps import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER

KINDS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)
"""The collectives that can be joined."""
LARGEST = 25 * 2**20
"""Bytes of one call where no size is configured: larger calls gain nothing from others."""

Kind = tuple[object, ...]


@dataclass
class _Group:
    """Redistributions that will be one, by the position of the first; `carried` are their bytes by collective call."""

    first: int
    parts: list[Redistribute]
    carried: list[int]


def fuse(program: Program, sizes: Mapping[str, int]) -> Program:
    """`program` with redistributions joined, as long as no call takes more than `sizes` bytes of its kind of collective
    from a rank. Kinds that `sizes` does not name are left alone, and so is a program that recomputes modules: what runs
    again in backward would be joined with what does not."""
    if program.recompute is not None:
        return program
    groups: list[_Group] = []
    open_: dict[Kind, _Group] = {}
    placed = {source.id: -1 for source in program.sources}
    for position, instruction in enumerate(program.instructions):
        placed[instruction.id] = position
        if not isinstance(instruction, Redistribute) or not _can_be_joined(instruction, sizes):
            continue
        copy = program.batch_splits.get(instruction.operator, ("", -1))[1]  # one may compute while another communicates
        group = open_.get(kind := (copy, *_kind(instruction)))
        carried = _carried(instruction, program.mesh)
        if group is not None and placed.get(instruction.value.id, -1) < group.first:
            together = [a + b for a, b in zip(group.carried, carried, strict=True)]
            limits = [sizes[step.kind] for step in instruction.collectives]
            if all(total <= limit for total, limit in zip(together, limits, strict=True)):
                group.parts.append(instruction)
                group.carried = together
                placed[instruction.id] = group.first
                continue
        open_[kind] = _Group(position, [instruction], carried)
        groups.append(open_[kind])
    return _rewritten(program, [group for group in groups if len(group.parts) > 1])


def _can_be_joined(instruction: Redistribute, sizes: Mapping[str, int]) -> bool:
    steps = instruction.collectives
    return bool(steps) and all(step.kind in sizes for step in steps)


def _kind(instruction: Redistribute) -> Kind:
    """The key that redistributions must share to be fused."""
    path = instruction.path
    return (
        path[:-1] if len(path) > 1 else path,  # siblings, but not all layers of a model
        tuple((step.kind, step.axes) for step in instruction.forward),
        tuple((step.kind, step.axes) for step in instruction.backward),
        instruction.differentiable,
        instruction.spec.dtype,
    )


def _carried(instruction: Redistribute, mesh: Mesh) -> list[int]:
    """Bytes that a rank puts into each collective."""
    return [
        math.prod(step.before.local_shape(step.shape, mesh)) * instruction.spec.item_bytes
        for step in instruction.collectives
    ]


def _rewritten(program: Program, groups: list[_Group]) -> Program:
    begins = {group.parts[0].id: group for group in groups}
    renamed: dict[Ref, Ref] = {}
    taken = {instruction.id for instruction in program.instructions} | {source.id for source in program.sources}
    for group in groups:
        name = fresh(f"{group.parts[0].id}_and_{len(group.parts) - 1}_more", taken)
        taken.add(name)
        renamed |= {Ref(part.id): Ref(name, index) for index, part in enumerate(group.parts)}

    def new(leaf: object) -> object:
        return renamed.get(leaf, leaf) if isinstance(leaf, Ref) else leaf

    def ref(old: Ref) -> Ref:
        return renamed.get(old, old)

    instructions: list[Instruction] = []
    for instruction in program.instructions:
        if isinstance(instruction, Compute):
            instructions.append(with_leaves(instruction, new))
        elif instruction.id in begins:
            parts = begins[instruction.id].parts
            same = len({part.path for part in parts}) == 1
            path = parts[0].path if same else parts[0].path[:-1]
            moved = tuple(replace(part, value=ref(part.value)) for part in parts)
            instructions.append(Fused(renamed[Ref(instruction.id)].id, moved, path))
        elif Ref(instruction.id) not in renamed and isinstance(instruction, Redistribute | Copy):
            instructions.append(replace(instruction, value=ref(instruction.value)))
    return replace(
        program,
        instructions=tuple(instructions),
        outputs=tuple(map(ref, program.outputs)),
        updates=tuple((buffer, ref(value)) for buffer, value in program.updates),
    )
