"""The memory of a program with a repeated part, from traces of two and three repetitions.

What is alive at a moment is affine in the number of repetitions, and in that of the one that runs; a peak, the most of
many moments, is not. So every call of both traces is compared with its counterpart: from the front, where further
repetitions are still to come, and from the back, where they are over. Either way all calls must differ by the same
bytes, and both ways together must reach over the whole longer trace; then the most of the first and the last
repetition is that of all between. Invariant: what can be summed is never extrapolated, and where the traces do not bear
this out the whole program is traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from strategies.core.graph import ITEM_BYTES
from strategies.core.program import Program
from strategies.memory.trace import (
    Trace,
    Traced,
    local_tensors,
    need_of,
    on_shapes,
    parameters_of,
    sharded,
    standing,
    trace,
)
from strategies.memory.truncation import Repeated, form, repeated_part, shortened
from strategies.memory.zero import Group, Sharded, groups_of
from strategies.optimizer.buckets import buckets
from strategies.optimizer.replicated import BucketedUpdates
from strategies.optimizer.settings import OptimizerSettings
from strategies.optimizer.updates import BucketLimits
from strategies.runtime.live_tensors import Live

FEW = (2, 3)
"""Repetitions that are traced, and one more; where traces of the first do not bear it out, the second: what follows the
last repetition may begin inside it."""
SLACK = 0.005
"""Of the peak: what the room of a bucket may be told too much, because nobody looks when it is needed."""


def trace_repeated(program: Program, settings: OptimizerSettings) -> Traced:
    """As `trace`, in time that does not grow with the repetitions."""
    part = repeated_part(replace(program, updates=()))
    if part is None or settings.offload.activations != "none":
        return trace(program, settings)
    whole = _Whole(program, settings)
    if max(whole.sizes, default=0) > whole.bucket:
        return trace(program, settings)
    found = on_shapes(program, settings, lambda program, _: _extrapolated(program, settings, whole, part))
    return trace(program, settings) if found is None else found


@dataclass(frozen=True)
class Traces:
    """What `trace_repeated` found of programs of one config; of those that are alike, once. Stages of ZeRO, overlap and
    whether there are several micro-batches may differ."""

    done: dict[Hashable, Traced] = field(default_factory=dict)

    def of(self, program: Program, settings: OptimizerSettings) -> Traced:
        own = settings.stage, settings.overlap, settings.accumulate > 1
        key = own, form(program, settings.groups_for(program))
        if key not in self.done:
            self.done[key] = trace_repeated(program, settings)
        return self.done[key]


@dataclass(frozen=True)
class Outline:
    """Bytes that are known without running anything: what `stands` from step to step, and beside it what there is of
    `gradients` between two micro-batches, at least, at the end of the last backward, and in the `update`."""

    stands: int
    gradients: int
    ending: int
    update: int

    def least(self, stored: int) -> int:
        """Bytes at the fullest moment, at least, where so many are stored for backward."""
        return self.stands + max(self.gradients + stored, self.ending, self.update)

    @classmethod
    def together(cls, every: Sequence[Outline]) -> Outline:
        """Of programs that one rank runs in turn."""
        ending = max(one.ending for one in every)
        stands, gradients, update = (sum(sizes) for sizes in zip(*map(cls._summed, every), strict=True))
        return cls(stands, gradients, ending, update)

    def _summed(self) -> tuple[int, int, int]:
        return self.stands, self.gradients, self.update


def outline(program: Program, settings: OptimizerSettings) -> Outline:
    """Of a program that may learn nothing."""
    whole = _Whole(program, settings)
    added = whole.gradients if settings.accumulate > 1 else 0
    return Outline(whole.standing.total, added, whole.ending, whole.update(whole.gradients))


def _extrapolated(program: Program, settings: OptimizerSettings, whole: _Whole, part: Repeated) -> Traced | None:
    """None where traces do not bear it out."""
    done: dict[int, tuple[_Recording, Traced]] = {}
    for few in FEW:
        for count in {few, few + 1} - done.keys():
            recording = _Recording(shortened(program, part, count), settings, whole)
            done[count] = recording, recording.run()
        (one, less), (other, then) = done[few], done[few + 1]
        segments = list(zip(one.segments, other.segments, strict=True))
        if all(a.phase == "update" or _Both(a.moments, b.moments).agree for a, b in segments):
            return _lengthened(whole, settings, part.count - few, less, then, segments)
    return None


def _lengthened(
    whole: _Whole,
    settings: OptimizerSettings,
    left: int,
    less: Traced,
    then: Traced,
    segments: Sequence[tuple[_Segment, ...]],
) -> Traced | None:
    """With `left` more repetitions than `less` has, of which `then` has one; None where a joined bucket is too large to
    be told."""

    def grown(a: int, b: int) -> int:
        return a + left * (b - a)

    peaks, filled = {name: 0 for name in less.peaks}, 0
    for one, other in segments:
        if one.phase == "update":  # all gradients are there all the time
            peaks["update"] = grown(*(max(now for _, now in each.moments) for each in (one, other)))
            continue
        both = _Both(one.moments, other.moments)
        peaks[one.phase] = max(peaks[one.phase], both.most(left))
        for elements, now in both.arrived(one.arrivals, other.arrivals, left):
            if filled and filled + elements > whole.bucket:
                peaks[one.phase] = max(peaks[one.phase], now + whole.copied(filled))
                filled = 0
            filled += elements
        for a, b in zip(one.flushed, other.flushed, strict=True):
            peaks[one.phase] = max(peaks[one.phase], grown(a, b) + whole.copied(filled or whole.learns))
            filled = 0
    gradients = grown(less.gradients, then.gradients)
    joined = whole.joined if settings.overlap and settings.stage == 0 else 0
    if joined > SLACK * (whole.standing.total + max(peaks.values())):
        return None
    peaks["backward"] += joined
    peaks["update"] = max(peaks["update"], gradients + whole.joined, whole.update(gradients))
    return Traced(
        grown(less.activations, then.activations),
        {kind: grown(less.sent.get(kind, 0), then.sent.get(kind, 0)) for kind in then.sent},
        whole.standing,
        grown(less.kept, then.kept),
        gradients,
        peaks,
        0,
        0 if whole.updates is None else whole.updates.host_in_update(),
    )


class _Whole:
    """What is known of the whole program without running it, from tensors that have shapes alone."""

    def __init__(self, program: Program, settings: OptimizerSettings) -> None:
        tensors, need = local_tensors(program, "meta"), need_of(program, settings)
        held, groups = parameters_of(tensors), settings.groups_for(program)
        self.updates: Sharded | None = None
        if settings.stage and program.trainable_names:
            self.updates = sharded(program, held, groups_of(program, groups, settings.stage), need, settings)
        self.standing = standing(program, tensors, need, self.updates)
        self.need, self.sizes = need, [held[name].numel() for name in program.trainable_names]
        wide = ITEM_BYTES["float32"] if settings.stage == 0 else 0  # where weights have masters
        self.added = sum(held[name].numel() * max(held[name].itemsize, wide) for name in program.trainable_names)
        sums = buckets(program, settings.cut) if settings.stage == 0 else ()
        self.joined = max((one.elements * ITEM_BYTES[one.dtype] for one in sums if len(one.names) > 1), default=0)

    @property
    def gradients(self) -> int:
        """Bytes of gradients that have been added up, at least."""
        if self.updates is None:
            return self.added
        return self.added if self.updates.stage == 1 else 0

    @property
    def ending(self) -> int:
        """Bytes at the end of backward: stage 1 of ZeRO copies all gradients at once."""
        if self.updates is None or self.updates.stage > 1:
            return 0
        return int(self.bucket) * self.updates.dtype.itemsize + self.copied(self.learns)

    def update(self, gradients: int) -> int:
        """The most while the optimizer works."""
        return gradients + self.need.during(self.sizes) if self.updates is None else self.updates.during_update()

    @property
    def bucket(self) -> float:
        """Elements of a bucket of ZeRO."""
        return math.inf if self.updates is None else self.updates.bucket

    @property
    def learns(self) -> int:
        return sum(self.sizes)

    def copied(self, elements: int) -> int:
        """Bytes of the copies of a bucket while it is added up."""
        return 0 if self.updates is None else elements * sum(one.itemsize for one in self.updates.copied)


@dataclass
class _Segment:
    """A stretch of a step with at most one run of repetitions. `arrivals` are gradients that wait in a bucket: calls
    before, elements, and what is alive; `flushed` is what is alive when the last bucket is added up."""

    phase: str
    moments: list[tuple[object, int]] = field(default_factory=list)
    arrivals: list[tuple[int, int, int]] = field(default_factory=list)
    flushed: list[int] = field(default_factory=list)


class _Recording(Trace):
    """A trace that remembers all moments, with the buffers of the whole program, and without what a joined bucket or a
    copied one needs: that depends on where its borders fall."""

    cut = BucketLimits(0)

    def __init__(self, program: Program, settings: OptimizerSettings, whole: _Whole) -> None:
        super().__init__(program, settings, whole.need)
        self.whole, self.segments = whole, list[_Segment]()

    def run(self) -> Traced:
        found = super().run()
        for one in self.segments:
            one.moments = [(call, now - self.base) for call, now in one.moments]
            one.arrivals = [(place, elements, now - self.base) for place, elements, now in one.arrivals]
            one.flushed = [now - self.base for now in one.flushed]
        return found

    @contextmanager
    def _phase(self, live: Live, name: str) -> Iterator[None]:
        self._begin(name)
        with super()._phase(live, name):
            yield
            self._end()

    def _begin(self, name: str) -> None:
        self.segments.append(_Segment(name))
        self.live.events = [(None, self.live.now)]

    def _end(self) -> None:
        assert self.live.events is not None
        self.segments[-1].moments = self.live.events

    def _next(self, then: Callable[[], None]) -> None:
        """What follows when backward is done."""
        self._end()
        self._begin(self.segments[-1].phase)
        then()

    def _updates(self) -> BucketedUpdates | Sharded | None:
        found = super()._updates()
        if isinstance(found, BucketedUpdates):
            vars(found)["collect"] = partial(self._next, found.collect)
        elif found is not None:
            vars(found)["finish"] = partial(self._next, found.finish)
        return found

    def _sharded(self, groups: Sequence[Group]) -> Sharded:
        assert self.whole.updates is not None
        own = sharded(self.program, self.held, groups, self.need, self.settings, partial(_Waiting, recording=self))
        own.bucket = self.whole.updates.bucket
        return own


class _Waiting(Sharded):
    """Buckets whose copies are left out, as large as those of the whole program."""

    def __init__(self, *args: Any, recording: _Recording, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recording = recording

    def _arrived(self, name: str, parameter: Tensor) -> None:
        if self.stage < 3 and self.buffer is None:
            self.buffer = self._empty(self.bucket, self.dtype)
        if self.stage > 1:
            live, elements = self.recording.live, self.elements[name]
            assert live.events is not None
            self.recording.segments[-1].arrivals.append((len(live.events), elements, live.now))
            parameter.grad = None
            self.filled += elements

    def _flush(self) -> None:
        if self.filled:
            self.recording.segments[-1].flushed.append(self.recording.live.now)
        self.filled = 0

    def taken(self) -> list[Tensor]:
        whole = self.recording.whole.updates
        assert whole is not None
        return whole.taken()


class _Both:
    """The same segment with few repetitions and with one more. From the front all calls up to `before` differ by
    `front` bytes, from the back all from `behind` on by `back`."""

    def __init__(self, few: Sequence[tuple[object, int]], more: Sequence[tuple[object, int]]) -> None:
        self.few, self.more, self.period = few, more, len(more) - len(few)
        self.front, self.back = more[0][1] - few[0][1], more[-1][1] - few[-1][1]
        self.before = _same(zip(few, more, strict=False), self.front)
        self.behind = len(few) - _same(zip(reversed(few), reversed(more), strict=False), self.back)

    @property
    def agree(self) -> bool:
        """Whether the longer one is, wholly, what the shorter one tells of it: both ways together reach over all calls.
        Without repetitions, whether the calls are the same."""
        if not self.period:
            return all(one[0] is other[0] for one, other in zip(self.few, self.more, strict=True))
        return self.period > 0 and self.before - self.behind >= self.period

    def most(self, left: int) -> int:
        """The peak with `left` more repetitions."""
        if not self.period:
            pairs = zip(self.few, self.more, strict=True)
            return max(one[1] + left * (other[1] - one[1]) for one, other in pairs)
        first = max(now for _, now in self.few[: self.before])
        last = max(now for _, now in self.few[self.behind :])
        return max(first + left * self.front, last + left * self.back)

    def arrived(
        self, few: Sequence[tuple[int, int, int]], more: Sequence[tuple[int, int, int]], left: int
    ) -> Iterator[tuple[int, int]]:
        """Elements and what is alive of every gradient with `left` more repetitions."""
        middle = self.behind + self.period
        for place, elements, now in few:
            if place < middle:
                yield elements, now + left * self.front
        for number in range(left):
            for place, elements, now in more:
                if middle <= place < middle + self.period:
                    yield elements, now + (left - 1) * self.front + number * (self.back - self.front)
        for place, elements, now in few:
            if place >= middle:
                yield elements, now + left * self.back


def _same(pairs: Iterable[tuple[tuple[object, int], tuple[object, int]]], difference: int) -> int:
    """How many pairs are of one call and differ by so many bytes, before the first that is not."""
    count = 0
    for (call, now), (other, then) in pairs:
        if call is not other or then - now != difference:
            break
        count += 1
    return count
