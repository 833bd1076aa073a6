"""A program whose repeated part runs fewer times: the same before it, two or three repetitions, the same behind it.

Invariant: what is left out repeats, instruction by instruction, what is kept: the same calls of tensors of the same
sizes, taken from as far behind or from in front of the repeated part. So a program of n repetitions differs from one of
n + 1 by one repetition alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from strategies.core.graph import Ref, Source, rewrite
from strategies.core.program import KEY, Compute, Copy, Fused, Instruction, Ordinal, Program, Redistribute, Start, Wait
from strategies.lowering.recompute import parts_of, region_of

SHORTEST = 6
"""Repetitions for which it is worth while."""
PERIODS = 6
"""Distances that are tried."""


@dataclass(frozen=True)
class Repeated:
    """`count` repetitions of `period` instructions from `start` on."""

    start: int
    period: int
    count: int


def repeated_part(program: Program) -> Repeated | None:
    """The longest stretch of instructions that repeat; None where there are too few, or where what is made inside is
    used later than in the next two repetitions."""
    if program.batch_splits or program.updates or any(getattr(one, "host", False) for one in program.instructions):
        return None
    labels = _Labels(program)
    names = [labels.of(one) for one in program.instructions]
    seen: dict[Hashable, int] = {}
    distances: Counter[int] = Counter()
    for place, name in enumerate(names):
        if name in seen:
            distances[place - seen[name]] += 1
        seen[name] = place
    alike = _Alike(program, names)
    best: Repeated | None = None
    for period, _ in distances.most_common(PERIODS):
        start = 0
        while start + period < len(names):
            length = alike.length(start, period)
            found = Repeated(start, period, length // period + 1)
            if found.count >= SHORTEST and (best is None or found.count * period > best.count * best.period):
                best = found if alike.closed(found) else best
            start += length + 1
    return best


def shortened(program: Program, part: Repeated, count: int) -> Program:
    """`program` with `count` repetitions, at least two."""
    less = (part.count - count) * part.period
    first, last = part.start + part.period, part.start + part.period + less
    steps = program.instructions
    renamed = {one.id: steps[place - less].id for place, one in enumerate(steps[first:last], first)}
    kept = (*steps[:first], *(_renamed(one, renamed) for one in steps[last:]))
    used, left = ({ref.id for one in some for ref in one.operands} for some in (kept, steps[first:last]))
    gone = {source.id for source in program.sources if source.id in left - used}
    names = {source.name for source in program.sources if source.id in gone}
    return replace(
        program,
        sources=tuple(source for source in program.sources if source.id not in gone),
        instructions=kept,
        outputs=tuple(Ref(renamed.get(ref.id, ref.id), ref.index) for ref in program.outputs),
        reductions={name: axes for name, axes in program.reductions.items() if name not in names},
        parameter_order=tuple(name for name in program.parameter_order if name not in names),
    )


def _renamed(step: Instruction, names: Mapping[str, str]) -> Instruction:
    if not any(ref.id in names for ref in step.operands):
        return step

    def named(ref: Any) -> Any:
        return Ref(names.get(ref.id, ref.id), ref.index) if isinstance(ref, Ref) else ref

    if isinstance(step, Compute):
        return replace(step, args=rewrite(step.args, named), kwargs=tuple(rewrite(dict(step.kwargs), named).items()))
    if isinstance(step, Redistribute | Copy):
        return replace(step, value=named(step.value))
    if isinstance(step, Fused):
        return replace(step, parts=tuple(replace(one, value=named(one.value)) for one in step.parts))
    of = _renamed(step.of, names)
    assert isinstance(of, Redistribute | Fused)
    if isinstance(step, Start):
        return replace(step, of=of)
    return replace(step, of=of, start=names.get(step.start, step.start))


def form(program: Program, groups: Sequence[Mapping[str, Any]] = ()) -> Hashable:
    """Equal for programs that do the same with tensors of the same sizes, whatever their names, with their parameters
    in the same `groups` of the optimizer."""
    labels, places = _Labels(program), {source.id: -1 - number for number, source in enumerate(program.sources)}
    places |= {step.id: number for number, step in enumerate(program.instructions)}
    group = {name: number for number, one in enumerate(groups) for name in one["names"]}
    named = {source.name: number for number, source in enumerate(program.sources)}

    def values(refs: Sequence[Ref]) -> Hashable:
        return tuple((places.get(ref.id, ref.id), ref.index) for ref in refs)

    return (
        program.mesh,
        tuple((labels.source(source), group.get(source.name)) for source in program.sources),
        tuple((labels.of(step), values(step.operands)) for step in program.instructions),
        tuple(labels.numbers),
        values(program.outputs),
        tuple(named[name] for name in program.parameter_order if name in named),
        tuple((places[id], values([ref])) for id, ref in program.updates),
        program.random,
        program.loss_axes,
        tuple(program.batch_splits.items()),
    )


class _Labels:
    """What an instruction does, as a number, without saying to which values."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.sources: dict[str, Source] = {source.id: source for source in program.sources}
        self.parts = parts_of(program)
        self.numbers: dict[Hashable, int] = {}
        self.chains: dict[int, int] = {}
        self.places: dict[tuple[str, ...], tuple[str, bool]] = {}

    def of(self, step: Instruction) -> int:
        part = self.parts.get(step.id)
        flags = None if part is None else (part.kept, part.carries)
        values = tuple(self._value(ref) for ref in step.operands)
        return self._number((type(step).__name__, self._place(step), flags, values, self._call(step)))

    def _number(self, form: Hashable) -> int:
        return self.numbers.setdefault(form, len(self.numbers))

    def _place(self, step: Instruction) -> Hashable:
        if step.path not in self.places:
            inside = region_of(step, self.program) is not None
            self.places[step.path] = re.sub(r"\d+", "#", ".".join(step.path)), inside
        return self.places[step.path]

    def _value(self, ref: Ref) -> Hashable:
        held = self.program.replicas.get(ref, ())
        return (ref.index, held) if ref.id not in self.sources else (self.source(self.sources[ref.id]), held)

    def source(self, source: Source) -> Hashable:
        """What a source is, without its name."""
        open_ = self.program.reductions.get(source.name)
        return source.kind, source.spec, source.trainable, self.program.layouts[source.id], open_

    def _call(self, step: Instruction) -> Hashable:
        if isinstance(step, Compute):
            return step.target, _frozen(step.args), _frozen(dict(step.kwargs)), step.multiple
        if isinstance(step, Copy):
            return step.host
        of = step.of if isinstance(step, Start | Wait) else step
        parts = of.parts if isinstance(of, Fused) else (of,)
        chains = tuple((self._chain(one.forward), self._chain(one.backward)) for one in parts)
        return chains, tuple((one.scale, one.differentiable, one.spec) for one in parts)

    def _chain(self, steps: tuple[Any, ...]) -> int:
        if id(steps) not in self.chains:
            self.chains[id(steps)] = self._number(steps)
        return self.chains[id(steps)]


def _frozen(value: Any) -> Hashable:
    if isinstance(value, (tuple, list)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((key, _frozen(item)) for key, item in value.items())
    if isinstance(value, (Ref, Ordinal)):
        return type(value).__name__
    return value if isinstance(value, (str, torch.dtype)) else (type(value).__name__, repr(value))


class _Alike:
    """Which instructions repeat others, and how far."""

    def __init__(self, program: Program, names: list[int]) -> None:
        self.program, self.steps, self.names = program, program.instructions, names
        self.place = {one.id: place for place, one in enumerate(self.steps)}
        self.operands = [one.operands for one in self.steps]

    def length(self, start: int, period: int) -> int:
        """How many instructions from `start` on have one like them `period` later."""
        place = start
        while place + period < len(self.names) and self._pair(place, period):
            place += 1
        return place - start

    def _pair(self, place: int, period: int) -> bool:
        if self.names[place] != self.names[place + period]:
            return False
        for one, other in zip(self.operands[place], self.operands[place + period], strict=True):
            a, b = self.place.get(one.id), self.place.get(other.id)
            if one != other and (a is None or b is None):
                if one == KEY or other == KEY or a is not b:
                    return False
            elif one != other and b - a != period:  # type: ignore[operator]
                return False
        return True

    def closed(self, part: Repeated) -> bool:
        """Whether what is used behind the repeated part is made in its last two repetitions or in front of it, and
        what is used inside is made in the repetition before or in front of it."""
        end = part.start + part.count * part.period
        for place in range(part.start + part.period, len(self.steps)):
            least = end - 2 * part.period if place >= end else place - 2 * part.period
            for ref in self.operands[place]:
                if part.start <= self.place.get(ref.id, -1) < least:
                    return False
        return all(self.place.get(ref.id, end) >= end - 2 * part.period for ref in self.program.outputs)
