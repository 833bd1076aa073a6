"""Units of a program with the same code: repeated layers share one class, one graph and one code object.

The form of a unit is all that decides its code: what each instruction calls, with values numbered from the unit's
inputs, parameters named as inside of the unit, and the numbers of its rank. What differs between repeated layers
(numbers of random operators, parts of a recomputed region, the tensors themselves) becomes attributes of the unit.
Invariant: units of equal form have equal code, so an instance of the first one's class computes what a unit built for
itself would.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from strategies.core.graph import Ref, leaves
from strategies.core.program import (
    CARRYING,
    Compute,
    Copy,
    Fused,
    Instruction,
    Ordinal,
    Program,
    RankValue,
    Redistribute,
    Start,
    Wait,
)
from strategies.core.steps import ReshardingPath
from strategies.lowering.recompute import RegionPart
from strategies.runtime.flight_recorder import recorder
from strategies.runtime.naming import attach, register
from strategies.runtime.units import use_of


class CodeForms:
    """The forms of the units of `program` on `rank`. `paths` are the places of the instructions in the tree, `parts`
    what they are of recomputed regions, `taken` which of several results are used, `owned` the names of sources."""

    def __init__(
        self,
        program: Program,
        rank: int,
        paths: Mapping[str, tuple[str, ...]],
        parts: Mapping[str, RegionPart],
        taken: Mapping[str, Sequence[int]],
        owned: Mapping[Ref, str],
    ) -> None:
        self._program, self._rank, self._paths, self._owned = program, rank, paths, owned
        self._scalars = scalars(program)
        self._numbers: dict[Hashable, int] = {}
        self._chains: dict[int, int] = {}  # by id: the program holds them
        self._calls = {
            step.id: self._number((self._call(step), self._flags(parts.get(step.id)), tuple(taken.get(step.id, ()))))
            for step in program.instructions
        }

    def _number(self, form: Hashable) -> int:
        return self._numbers.setdefault(form, len(self._numbers))

    @staticmethod
    def _flags(part: RegionPart | None) -> Hashable:
        return None if part is None else (part.kept, part.carries)

    def _call(self, step: Instruction) -> Hashable:
        if isinstance(step, Compute):
            return step.target, self._frozen(step.args), self._frozen(dict(step.kwargs)), step.multiple, step.host
        if isinstance(step, Copy):
            return ("copy", step.host)
        of = step.of if isinstance(step, Start | Wait) else step
        carried = tuple((self._chain(one.forward), self._chain(one.backward), one.scale) for one in of.parts)
        return type(step).__name__, type(of).__name__, carried, of.differentiable

    def _chain(self, steps: ReshardingPath) -> int:
        if id(steps) not in self._chains:
            self._chains[id(steps)] = self._number(steps)
        return self._chains[id(steps)]

    def _frozen(self, value: Any) -> Hashable:
        """Arguments without their values; 1, 1.0 and True are different ones."""
        if isinstance(value, (tuple, list)):
            return type(value).__name__, tuple(map(self._frozen, value))
        if isinstance(value, dict):
            return "dict", tuple((key, self._frozen(item)) for key, item in value.items())
        if isinstance(value, (Ref, Ordinal)):
            return type(value).__name__
        if isinstance(value, RankValue):
            value = value.of(self._program.mesh, self._rank)
        return type(value).__name__, repr(value)

    def of(
        self, part: Sequence[Instruction], depth: int, inputs: Sequence[Ref], outputs: Sequence[Ref], path: str
    ) -> Hashable:
        """The form of the unit at `path` that holds `part`, whose place in the tree begins with `depth` names."""
        values: dict[Ref, Hashable] = {ref: number for number, ref in enumerate(inputs)}
        position = {step.id: number for number, step in enumerate(part)}

        def value(ref: Ref) -> Hashable:
            if ref not in values:
                if ref in self._owned:
                    name = self._owned[ref]
                    inside = not path or name.startswith(f"{path}.")
                    word = name.removeprefix(f"{path}.") if inside else ("foreign", len(values))
                    values[ref] = ("scalar", word) if name in self._scalars else word
                else:
                    values[ref] = position[ref.id], ref.index
            return values[ref]

        rows = []
        for number, step in enumerate(part):
            place = tuple(("use", number) if name == use_of(step) else name for name in self._paths[step.id][depth:])
            rows.append((place, self._calls[step.id], tuple(map(value, step.operands))))
        return tuple(rows), len(inputs), tuple(map(value, outputs))


def scalars(program: Program) -> frozenset[str]:
    """The parameters of shape (). DeepSpeed holds them with shape (1,), so code views them as what they are."""
    return frozenset(one.name for one in program.sources if one.kind == "parameter" and not one.spec.shape)


def function_of(of: Redistribute | Fused) -> Hashable:
    """All that decides the function of a redistribution."""
    return type(of), tuple((one.forward, one.backward, one.scale) for one in of.parts), of.differentiable


def several(step: Instruction) -> bool:
    """Whether an instruction returns several values."""
    of = step.of if isinstance(step, Wait) else step
    return isinstance(of, Fused) or (isinstance(of, Compute) and of.multiple)


def constants_of(step: Instruction, parts: Mapping[str, RegionPart], placing: bool) -> list[RegionPart | int]:
    """What an instruction takes that differs between repeated layers, in the order of its arguments; `placing`:
    what communicates receives the place of its operator."""
    found: list[RegionPart | int] = [parts[step.id]] if step.id in parts else []
    if placing and isinstance(step, CARRYING):
        found.append(recorder.place(step.operator))
    if isinstance(step, Compute):
        found += [leaf for leaf in leaves((step.args, step.kwargs)) if isinstance(leaf, Ordinal)]
    return found


def tensors_of(steps: Sequence[Instruction], outputs: Sequence[Ref], owned: Mapping[Ref, str]) -> tuple[Ref, ...]:
    """The parameters, buffers and constants that a unit itself uses, in the order of their first use."""
    used = [ref for step in steps for ref in step.operands]
    return tuple(dict.fromkeys(ref for ref in (*used, *outputs) if ref in owned))


@dataclass(frozen=True)
class Template:
    """The first unit of a form, and the names that its code uses: of its tensors, constants, units inside (each in the
    order in which they are first used), and of the values that its own instructions return."""

    kind: type[fx.GraphModule]
    shared: Mapping[str, Any]
    tensors: tuple[str, ...]
    constants: tuple[str, ...]
    children: tuple[str, ...]
    values: tuple[str, ...]

    @staticmethod
    def made_from(
        unit: fx.GraphModule,
        tensors: Sequence[str],
        constants: Sequence[str],
        children: Sequence[str],
        values: Sequence[str],
    ) -> Template:
        """The template that `unit`, which nothing has changed yet, is."""
        plain = {*vars(nn.Module()), "meta"}
        shared = {name: value for name, value in vars(unit).items() if name not in plain}
        return Template(type(unit), shared, tuple(tensors), tuple(constants), tuple(children), tuple(values))

    def unit(self, tensors: Sequence[Tensor], children: Sequence[nn.Module]) -> fx.GraphModule:
        """One more unit of this form. `GraphModule` makes a class per instance; this is an instance of a class that
        exists."""
        unit: fx.GraphModule = object.__new__(self.kind)
        nn.Module.__init__(unit)
        vars(unit).update(self.shared, meta={})
        self.fill(unit, tensors, children)
        return unit

    def fill(self, unit: nn.Module, tensors: Sequence[Tensor], children: Sequence[nn.Module]) -> None:
        """Give a unit of this form what its code reaches."""
        for name, tensor in zip(self.tensors, tensors, strict=True):
            register(unit, name, tensor)
        for name, child in zip(self.children, children, strict=True):
            attach(unit, name, child)
