"""Which parameters each unit of the rank's tree of modules holds, found without building the tree.

Invariant: the units are those of `strategies.runtime.module_tree`, a test compares both. A unit is a contiguous run of
instructions from one module call; a use of a parameter that another module owns is a separate unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from strategies.core.graph import Ref
from strategies.core.program import Instruction, Program


def owned(program: Program) -> dict[Ref, str]:
    """The values that are tensors of the model, by their full names."""
    return {Ref(source.id): source.name for source in program.sources if source.kind != "input"}


def unit_path(instruction: Instruction, program: Program, names: Mapping[Ref, str]) -> tuple[str, ...]:
    """The place of an instruction in the tree; `names` is `owned(program)`."""
    owner = ".".join(instruction.path)
    foreign = any(
        ref in names and names[ref] in program.parameter_order and names[ref].rpartition(".")[0] != owner
        for ref in instruction.operands
    )
    return (*instruction.path, use_of(instruction)) if foreign else instruction.path


def use_of(instruction: Instruction) -> str:
    """The name of the unit around an instruction that uses a parameter of another module."""
    return f"use_{instruction.id}"


@dataclass(frozen=True)
class ModuleUnit:
    """`parameters` are full names; `inward`: whether a gradient flows from the unit into the values that it takes."""

    parameters: tuple[str, ...]
    inward: bool


def units(program: Program) -> list[ModuleUnit]:
    """Every unit that owns parameters and runs, in the order in which units are entered."""
    names = owned(program)
    kinds = {source.name for source in program.sources if source.kind == "parameter"}
    paths = {instruction.id: unit_path(instruction, program, names) for instruction in program.instructions}
    homes: dict[tuple[str, ...], set[str]] = {}
    for name in kinds:
        homes.setdefault(tuple(name.split(".")[:-1]), set()).add(name)
    learned = _learned(program)
    seen: set[tuple[str, ...]] = set()

    def walk(run: Sequence[Instruction], depth: int) -> Iterator[ModuleUnit]:
        here = paths[run[0].id][:depth]
        own = {
            names[ref]
            for instruction in run
            if len(paths[instruction.id]) == depth
            for ref in instruction.operands
            if names.get(ref) in kinds
        }
        dotted = tuple(".".join(here).split(".")) if here else ()
        if dotted not in seen:  # the first run of a module has all that the module owns
            seen.add(dotted)
            own |= homes.get(dotted, set())
        if own:
            inside = {instruction.id for instruction in run}
            taken = {ref for instruction in run for ref in instruction.operands if ref.id not in inside}
            yield ModuleUnit(tuple(sorted(own)), any(ref.id in learned and ref not in names for ref in taken))
        for key, part in groupby(run, key=lambda one: paths[one.id][depth] if len(paths[one.id]) > depth else None):
            if key is not None:
                yield from walk(list(part), depth + 1)

    return list(walk(program.instructions, 0)) if program.instructions else []


def _learned(program: Program) -> set[str]:
    """The ids of values that may have a gradient."""
    found = {source.id for source in program.sources if source.trainable}
    for instruction in program.instructions:
        differentiable = getattr(instruction, "differentiable", True)
        if differentiable and any(ref.id in found for ref in instruction.operands):
            found.add(instruction.id)
    return found
