"""The memory of a program with repeated blocks (the layers of a deep model), from traces of few of them.

A truncated program runs two or three repetitions, with the same instructions in front of them and behind them.
Invariant: the omitted blocks repeat the traced ones, instruction by instruction: the same calls of tensors of the same
sizes, taken from as far behind or from in front of the repeated blocks.

The live bytes at a moment are affine in the number of repetitions, and in that of the one that runs; a peak, the
maximum over many moments, is not. So every call of two traces, one repetition apart, is compared with its counterpart:
from the front, where further repetitions are still to come, and from the back, where they are over. In either
comparison all calls must differ by the same bytes, and the two together must cover the complete longer trace; then the
maximum of the first and the last repetition is that of all between. Invariant: sums are never extrapolated, and where
the traces do not confirm this the complete program is traced.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast

from torch import Tensor

from strategies.core.graph import Ref, Source
from strategies.core.program import (
    KEY,
    Compute,
    Copy,
    Fused,
    Instruction,
    Program,
    Redistribute,
    Start,
    Wait,
    rewired,
)
from strategies.lowering.recompute import parts_of, region_of
from strategies.memory.estimate import KnownBytes
from strategies.memory.sharded import ShardedBytes
from strategies.memory.trace import Events, Trace, Traced, TracedStep, on_shapes, trace, trace_step
from strategies.memory.zero import ZeroBuffers
from strategies.optimizer.replicated import BucketedUpdates
from strategies.optimizer.settings import OptimizerSettings
from strategies.optimizer.sharded import ShardedUpdates
from strategies.optimizer.updates import BucketLimits

Step = TypeVar("Step", bound=Instruction)
MIN_REPETITIONS = 6
"""Repetitions from which on a program is truncated."""
PERIODS = 6
"""Distances between repetitions that are tried."""
TRACED = (2, 3)
"""Repetitions that are traced, and one more; where traces of the first do not agree, the second: what follows the last
repetition may begin inside it."""
RUNS = 2
"""Runs of repetitions of which few are traced: of layers that are recomputed, and of those that are not."""
SLACK = 0.005
"""Of the peak: what a bucket may be counted too much, because the moment at which it is needed is not known."""


@dataclass(frozen=True)
class RepeatedBlocks:
    """`count` repetitions of `period` instructions from `start` on."""

    start: int
    period: int
    count: int


def repeated_blocks(program: Program) -> RepeatedBlocks | None:
    """The longest stretch of instructions that repeat; None where there are too few, or where a value made inside is
    used later than in the next two repetitions."""
    return program.once("repeated blocks", partial(_repeated_blocks, program))


def _repeated_blocks(program: Program) -> RepeatedBlocks | None:
    if program.batch_splits or program.updates or any(getattr(one, "host", False) for one in program.instructions):
        return None
    signatures = _Signatures(program)
    numbers = [signatures.of(one) for one in program.instructions]
    last: dict[Hashable, int] = {}
    distances: Counter[int] = Counter()
    for place, number in enumerate(numbers):
        if number in last:
            distances[place - last[number]] += 1
        last[number] = place
    repetition = _Repetition(program, numbers)
    best: RepeatedBlocks | None = None
    for period, _ in distances.most_common(PERIODS):
        start = 0
        while start + period < len(numbers):
            length = repetition.length(start, period)
            blocks = RepeatedBlocks(start, period, length // period + 1)
            if blocks.count >= MIN_REPETITIONS and (best is None or blocks.count * period > best.count * best.period):
                best = blocks if repetition.closed(blocks) else best
            start += length + 1
    return best


def truncated(program: Program, blocks: RepeatedBlocks, count: int) -> Program:
    """`program` with `count` repetitions, at least two."""
    less = (blocks.count - count) * blocks.period
    first, last = blocks.start + blocks.period, blocks.start + blocks.period + less
    steps = program.instructions
    renamed = {one.id: steps[place - less].id for place, one in enumerate(steps[first:last], first)}
    kept = (
        *steps[:first],
        *(_renamed(one, renamed) if any(ref.id in renamed for ref in one.operands) else one for one in steps[last:]),
    )
    used, unused = ({ref.id for one in some for ref in one.operands} for some in (kept, steps[first:last]))
    dropped = unused - used
    names = {name for name, source in program.tensors.items() if source.id in dropped}
    return replace(
        program,
        sources=tuple(source for source in program.sources if source.id not in dropped),
        instructions=kept,
        outputs=tuple(Ref(renamed.get(ref.id, ref.id), ref.index) for ref in program.outputs),
        reductions={name: axes for name, axes in program.reductions.items() if name not in names},
        parameter_order=tuple(name for name in program.parameter_order if name not in names),
    )


def _renamed(step: Step, names: Mapping[str, str]) -> Step:
    """An instruction that takes other values, by their ids."""
    match step:
        case Compute() | Redistribute() | Copy():
            return cast(Step, rewired(step, lambda ref: Ref(names.get(ref.id, ref.id), ref.index)))
        case Fused():
            return replace(step, parts=tuple(_renamed(one, names) for one in step.parts))
        case Start():
            return replace(step, of=_renamed(step.of, names))
        case Wait():
            return replace(step, of=_renamed(step.of, names), start=names.get(step.start, step.start))
    raise TypeError(step)


def program_signature(program: Program, groups: Sequence[Mapping[str, Any]] = ()) -> Hashable:
    """Equal for programs that do the same with tensors of the same sizes, whatever their names, with their parameters
    in the same `groups` of the optimizer."""
    signatures, places = _Signatures(program), {source.id: -1 - i for i, source in enumerate(program.sources)}
    places |= {step.id: number for number, step in enumerate(program.instructions)}
    group = {name: number for number, one in enumerate(groups) for name in one["names"]}
    named = {name: number for number, name in enumerate(program.tensors)}

    def values(refs: Sequence[Ref]) -> Hashable:
        return tuple((places.get(ref.id, ref.id), ref.index) for ref in refs)

    return (
        program.mesh,
        tuple((signatures.source(source), group.get(source.name)) for source in program.sources),
        tuple((signatures.of(step), values(step.operands)) for step in program.instructions),
        tuple(signatures.numbers),
        values(program.outputs),
        tuple(named[name] for name in program.parameter_order if name in named),
        tuple((places[id], values([ref])) for id, ref in program.updates),
        program.random,
        program.loss_axes,
        tuple(program.batch_splits.items()),
    )


class _Signatures:
    """What an instruction does, as a number, but for the values that it takes."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.sources: dict[str, Source] = {source.id: source for source in program.sources}
        self.parts = parts_of(program)
        self.numbers: dict[Hashable, int] = {}
        self.paths: dict[int, int] = {}
        self.modules: dict[tuple[str, ...], tuple[str, bool]] = {}

    def of(self, step: Instruction) -> int:
        """The number of an instruction."""
        part = self.parts.get(step.id)
        flags = None if part is None else (part.kept, part.carries)
        values = tuple(self._value(ref) for ref in step.operands)
        return self._number((type(step).__name__, self._module(step), flags, values, self._call(step)))

    def source(self, source: Source) -> Hashable:
        """A source but for its name."""
        axes = self.program.reductions.get(source.name)
        return source.kind, source.spec, source.trainable, self.program.layouts[source.id], axes

    def _number(self, signature: Hashable) -> int:
        return self.numbers.setdefault(signature, len(self.numbers))

    def _module(self, step: Instruction) -> Hashable:
        if step.path not in self.modules:
            inside = region_of(step, self.program) is not None
            self.modules[step.path] = re.sub(r"\d+", "#", ".".join(step.path)), inside
        return self.modules[step.path]

    def _value(self, ref: Ref) -> Hashable:
        replicas = self.program.replicas.get(ref, ())
        return (self.source(self.sources[ref.id]) if ref.id in self.sources else ref.index), replicas

    def _call(self, step: Instruction) -> Hashable:
        if isinstance(step, Compute):
            return step.target, step.form, step.multiple
        if isinstance(step, Copy):
            return step.host
        parts = (step.of if isinstance(step, Start | Wait) else step).parts
        paths = tuple((self._path(one.forward), self._path(one.backward)) for one in parts)
        return paths, tuple((one.scale, one.differentiable, one.spec) for one in parts)

    def _path(self, steps: tuple[Any, ...]) -> int:
        if id(steps) not in self.paths:
            self.paths[id(steps)] = self._number(steps)
        return self.paths[id(steps)]


class _Repetition:
    """Which instructions repeat others, and how far; `numbers` are their signatures."""

    def __init__(self, program: Program, numbers: list[int]) -> None:
        self.program, self.numbers = program, numbers
        self.place = {one.id: place for place, one in enumerate(program.instructions)}
        self.operands = [one.operands for one in program.instructions]

    def length(self, start: int, period: int) -> int:
        """How many instructions from `start` on are repeated `period` later."""
        place = start
        while place + period < len(self.numbers) and self._repeated(place, period):
            place += 1
        return place - start

    def _repeated(self, place: int, period: int) -> bool:
        if self.numbers[place] != self.numbers[place + period]:
            return False
        for one, other in zip(self.operands[place], self.operands[place + period], strict=True):
            if one == other:
                continue
            a, b = self.place.get(one.id), self.place.get(other.id)
            if a is None or b is None:  # both are sources, and neither is the random key
                if KEY in (one, other) or a is not b:
                    return False
            elif b - a != period:
                return False
        return True

    def closed(self, blocks: RepeatedBlocks) -> bool:
        """Whether values that are used behind the blocks are made in the last two repetitions or in front, and values
        that are used inside in the repetition before or in front."""
        end = blocks.start + blocks.count * blocks.period
        for place in range(blocks.start + blocks.period, len(self.operands)):
            least = min(place, end) - 2 * blocks.period
            for ref in self.operands[place]:
                if blocks.start <= self.place.get(ref.id, -1) < least:
                    return False
        return all(self.place.get(ref.id, end) >= end - 2 * blocks.period for ref in self.program.outputs)


Recorded = tuple[list["_Segment"], Traced]
"""The moments of a step, and what else was counted; see `_recorded`."""


def trace_repeated(
    program: Program,
    settings: OptimizerSettings,
    slack: float = SLACK,
    recorded: dict[Hashable, Recorded] | None = None,
) -> Traced:
    """Trace as `trace` does, in time that does not grow with the repetitions; but for at most `slack` of the peak.
    `recorded` are the programs with few repetitions that were traced before: plans that recompute other numbers of
    layers share them."""
    uneven = settings.offload.activations != "none" or settings.complete  # some layers are complete, others not
    repeating = replace(program, updates=()) if program.updates else program
    if uneven or repeated_blocks(repeating) is None:
        return trace(program, settings)
    known = KnownBytes(repeating, settings)
    if known.joined and settings.overlap and not slack:
        return trace(program, settings)
    recording = _Recordings(settings, known, {} if recorded is None else recorded)
    traced = on_shapes(repeating, settings, lambda program, _: _extrapolated(program, recording))
    if traced is None or _written(program) > slack * max(traced.peaks.values()):
        return trace(program, settings)
    return traced


def _written(program: Program) -> int:
    """Bytes of the new values of buffers, which wait for the end of forward."""
    sources = {one.id: one.spec for one in program.sources}
    written = [(sources[id], program.layouts[id]) for id, _ in program.updates]
    return sum(one.item_bytes * layout.local_elements(one.shape, program.mesh) for one, layout in written)


@dataclass(frozen=True)
class Traces:
    """Results of `trace_repeated` by program, one for programs with the same signature. ZeRO's stage, overlap, what
    stays complete, whether there are several micro-batches and whether backward is split may differ from call to call;
    all other settings may not."""

    done: dict[Hashable, Traced] = field(default_factory=dict)
    recorded: dict[Hashable, Recorded] = field(default_factory=dict)

    steps: dict[Hashable, TracedStep] = field(default_factory=dict)

    def of(self, program: Program, settings: OptimizerSettings) -> Traced:
        """The trace of a program."""
        signature = program_signature(program, settings.groups_for(program))
        key = _varying(settings), signature
        if key not in self.done:
            if settings.native and settings.complete and settings.offload.activations == "none":
                self.done[key] = self._step(program, settings, signature).with_complete(settings)
            else:
                self.done[key] = trace_repeated(program, settings, recorded=self.recorded)
        return self.done[key]

    def _step(self, program: Program, settings: OptimizerSettings, signature: Hashable) -> TracedStep:
        key = _varying(replace(settings, complete=0)), signature
        if key not in self.steps:
            self.steps[key] = trace_step(program, settings)
        return self.steps[key]


def _varying(settings: OptimizerSettings) -> Hashable:
    """What may differ between the settings of `Traces`."""
    several = settings.accumulate > 1
    return settings.stage, settings.engine, settings.overlap, settings.complete, several, settings.split


@dataclass(frozen=True)
class _Recordings:
    """The recordings of programs that have few repetitions of one complete program, of which something is `known`."""

    settings: OptimizerSettings
    known: KnownBytes
    done: dict[Hashable, Recorded]

    def of(self, program: Program) -> Recorded:
        """Those of DeepSpeed have buffers of the complete program, so no other may share them."""
        zero, settings = self.known.zero, self.settings
        if isinstance(zero, ZeroBuffers):
            return self._made(program)
        limit = None if zero is None else zero.limit
        key = _varying(settings), limit, program_signature(program, settings.groups_for(program))
        if key not in self.done:
            self.done[key] = self._made(program)
        return self.done[key]

    def _made(self, program: Program) -> Recorded:
        recording = _Recording(program, self.settings, self.known)
        traced = recording.run()
        return recording.segments, traced


def _extrapolated(program: Program, recordings: _Recordings) -> Traced | None:
    """None where traces of few repetitions do not agree, or where a joined bucket is too large to be counted without a
    moment."""
    recorded = _recorded(program, recordings, RUNS)
    return None if recorded is None else _peaks(recordings.known, recordings.settings, *recorded)


def _recorded(program: Program, recordings: _Recordings, runs: int) -> Recorded | None:
    """The moments of a step, at most `runs` runs of repetitions from traces of few; None where these do not agree in
    the longest run."""
    blocks = repeated_blocks(program) if runs else None
    if blocks is None:
        return recordings.of(program)
    done: dict[int, Recorded] = {}
    for few in TRACED:
        for count in {few, few + 1} - done.keys():
            recorded = _recorded(truncated(program, blocks, count), recordings, runs - 1)
            assert recorded is not None
            done[count] = recorded
        (one, less), (other, more) = done[few], done[few + 1]
        pairs = [_Pair(a, b) for a, b in zip(one, other, strict=True)]
        if all(pair.few.phase == "update" or pair.agree for pair in pairs):
            left = blocks.count - few
            return [pair.lengthened(left) for pair in pairs], _grown(less, more, left)
    return None if runs == RUNS else _recorded(program, recordings, 0)


def _grown(less: Traced, more: Traced, left: int) -> Traced:
    """`less` with `left` more repetitions, of which `more` has one; without peaks."""

    def grown(a: int, b: int) -> int:
        return a + left * (b - a)

    def sums(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
        return {kind: grown(a.get(kind, 0), b[kind]) for kind in b}

    return replace(
        less,
        activations=grown(less.activations, more.activations),
        sent=sums(less.sent, more.sent),
        zero=sums(less.zero, more.zero),
        kept=grown(less.kept, more.kept),
        gradients=grown(less.gradients, more.gradients),
        between=grown(less.between, more.between),
    )


def _peaks(
    known: KnownBytes, settings: OptimizerSettings, segments: Sequence[_Segment], traced: Traced
) -> Traced | None:
    """The peaks with all `segments`; None where a joined bucket is too large to be counted without a moment."""
    peaks, filled = {name: 0 for name in traced.peaks}, 0
    first = known.kept if settings.accumulate == 1 else 0  # later micro-batches find what the first has left
    kept = 0
    for segment in segments:
        phase = segment.phase
        for _, elements, now in segment.arrivals:
            if filled and filled + elements > known.bucket:
                kept = first
                peaks[phase] = max(peaks[phase], now + known.copied(filled) + kept)
                filled = 0
            filled += elements
        peaks[phase] = max(peaks[phase], *(now + (0 if segment.flushed else kept) for _, now in segment.moments))
        for now in segment.flushed:
            peaks[phase] = max(peaks[phase], now + known.copied(filled or known.trainable))
            filled = 0
    joined = known.joined if settings.overlap and settings.stage == 0 else 0
    if joined > SLACK * (known.persistent.total + max(peaks.values())):
        return None
    peaks["backward"] += joined
    gradients = traced.gradients
    peaks["update"] = max(peaks["update"], gradients + known.joined, known.update(gradients))
    in_update = 0 if known.zero is None else known.zero.host_in_update()
    return replace(traced, persistent=known.persistent, peaks=peaks, offloaded=0, host_in_update=in_update)


@dataclass
class _Segment:
    """A stretch of a step with at most one run of repetitions.

    Attributes:
        phase: Of the step.
        moments: Every call, with the bytes alive after it.
        arrivals: Gradients that wait in a bucket: calls before, elements, and bytes alive.
        flushed: Bytes alive when the last bucket is added up.
    """

    phase: str
    moments: Events = field(default_factory=list)
    arrivals: list[tuple[int, int, int]] = field(default_factory=list)
    flushed: list[int] = field(default_factory=list)


class _Recording(Trace):
    """A trace that records all moments, with the buffers of the complete program, and without what a joined bucket or a
    copied one needs: that depends on where its borders fall."""

    cut = BucketLimits(0)

    def __init__(self, program: Program, settings: OptimizerSettings, known: KnownBytes) -> None:
        super().__init__(program, settings, known.need)
        self.limit = known.zero.limit if isinstance(known.zero, ShardedBytes) else None
        self.known, self.segments = known, list[_Segment]()

    def run(self) -> Traced:
        traced = super().run()
        for one in self.segments:
            one.moments = self.with_ahead(one.moments)
            one.arrivals = [(place, elements, now - self.base) for place, elements, now in one.arrivals]
            one.flushed = [now - self.base for now in one.flushed]
        return traced

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._open(name)
        with super()._phase(name):
            yield
            self._close()

    def _open(self, phase: str) -> None:
        self.segments.append(_Segment(phase))
        self.live.record()

    def _close(self) -> None:
        assert self.live.events is not None
        self.segments[-1].moments = self.live.events

    def _after_backward(self, then: Callable[[], None]) -> None:
        self._close()
        self._open(self.segments[-1].phase)
        then()

    def _updates(self) -> BucketedUpdates | ShardedUpdates | ZeroBuffers | None:
        updates = super()._updates()
        if updates is not None:
            end = "collect" if isinstance(updates, BucketedUpdates) else "finish"
            vars(updates)[end] = partial(self._after_backward, getattr(updates, end))
        return updates

    def _zero(self) -> ZeroBuffers:
        return _RecordingBuffers(self)


class _RecordingBuffers(ZeroBuffers):
    """Buckets as large as those of the complete program, whose copies are left out."""

    def __init__(self, recording: _Recording) -> None:
        super().__init__(recording.program, recording.parameters, recording.need, recording.settings)
        assert isinstance(recording.known.zero, ZeroBuffers)
        self.complete, self.recording = recording.known.zero, recording
        self.bucket = self.complete.bucket

    def _fill(self, name: str, parameter: Tensor) -> None:
        live, elements = self.recording.live, self.elements[name]
        assert live.events is not None
        self.recording.segments[-1].arrivals.append((len(live.events), elements, live.now))
        if self.filled:  # one that is larger than a bucket waits for the next if it comes first
            for other in self.names:
                self.parameters[other].grad = None
        elif elements <= self.bucket:
            parameter.grad = None
        self.filled += elements

    def _flush(self) -> None:
        if self.filled and self.compact and not self.pieces:
            self.pieces = self.taken()
        if self.filled:
            self.recording.segments[-1].flushed.append(self.recording.live.now)
        self.filled = 0

    def taken(self) -> list[Tensor]:
        return self.complete.taken()


class _Pair:
    """The same segment with few repetitions and with one more. From the front all calls up to `before` differ by
    `front` bytes, from the back all from `behind` on by `back`."""

    def __init__(self, few: _Segment, more: _Segment) -> None:
        self.few, self.more = few, more
        a, b = few.moments, more.moments
        self.period = len(b) - len(a)
        self.front, self.back = b[0][1] - a[0][1], b[-1][1] - a[-1][1]
        self.before = _equal(zip(a, b, strict=False), self.front)
        self.behind = len(a) - _equal(zip(reversed(a), reversed(b), strict=False), self.back)

    @property
    def agree(self) -> bool:
        """Whether the shorter trace predicts the longer one: the comparisons from the front and from the back cover
        all calls. Without repetitions, whether the calls are the same."""
        if not self.period:
            return all(a[0] is b[0] for a, b in zip(self.few.moments, self.more.moments, strict=True))
        return self.period > 0 and self.before - self.behind >= self.period

    def lengthened(self, left: int) -> _Segment:
        """The segment with `left` more repetitions."""
        few, more, middle = self.few, self.more, self.behind + self.period
        flushed = [a + left * (b - a) for a, b in zip(few.flushed, more.flushed, strict=True)]
        if few.phase == "update":  # all gradients are there all the time
            most, other = (max(now for _, now in one.moments) for one in (few, more))
            return _Segment(few.phase, [(None, most + left * (other - most))], [], flushed)
        arrivals = [
            (place, elements, now + left * self.front) for place, elements, now in few.arrivals if place < middle
        ]
        if not self.period:
            moments = [(call, a + left * (b - a)) for (call, a), (_, b) in zip(few.moments, more.moments, strict=True)]
        else:
            moments = [(call, now + left * self.front) for call, now in few.moments[:middle]]
        for number in range(left if self.period else 0):
            place_by, bytes_by = number * self.period, (left - 1) * self.front + number * (self.back - self.front)
            moments += [(call, now + bytes_by) for call, now in more.moments[middle : middle + self.period]]
            arrivals += [
                (place + place_by, elements, now + bytes_by)
                for place, elements, now in more.arrivals
                if middle <= place < middle + self.period
            ]
        if self.period:
            moments += [(call, now + left * self.back) for call, now in few.moments[middle:]]
        by = left * self.period
        arrivals += [
            (place + by, elements, now + left * self.back) for place, elements, now in few.arrivals if place >= middle
        ]
        return _Segment(few.phase, moments, arrivals, flushed)


def _equal(pairs: Iterable[tuple[tuple[object, int], tuple[object, int]]], difference: int) -> int:
    """The number of leading pairs that are of one call and differ by `difference` bytes."""
    count = 0
    for (call, now), (other, later) in pairs:
        if call is not other or later - now != difference:
            break
        count += 1
    return count
