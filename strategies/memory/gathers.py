"""The gathers of a traced step at stage 3, counted when the step is over.

A trace gathers every bucket where it is needed. In training the next one is gathered ahead, in the order of the
micro-batch before, and buckets that stay complete are not gathered at all. Nothing else of a step depends on either.
Invariant: what `added` adds to the bytes of every event makes them those of such a step.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from strategies.core.steps import ALL_GATHER
from strategies.runtime.gathering import GatheredParameters, Gathering
from strategies.runtime.live_tensors import Live


@dataclass
class Gather:
    """One gather. Moments are numbers of events.

    Attributes:
        bucket: its number.
        size: bytes of the complete parameters.
        sent: bytes that the rank sends.
        allocated: the event that takes the memory.
        ended: the first event with complete parameters.
        freed: the first event without the memory.
        complete: the buckets that are complete at `ended`.
    """

    bucket: int
    size: int
    sent: int
    allocated: int
    ended: int = 0
    freed: int = sys.maxsize
    complete: frozenset[int] = frozenset()


class CountedGathering(Gathering):
    """Gathers nothing ahead, and records `gathers` by the events of `live`."""

    def __init__(self, live: Live, buckets: Iterable[GatheredParameters]) -> None:
        super().__init__(buckets, ahead=False)
        self.live, self.gathers = live, list[Gather]()
        self._number = {id(bucket): number for number, bucket in enumerate(self._buckets)}
        self._watched: list[weakref.ref[torch.UntypedStorage]] = []

    def _need(self, bucket: GatheredParameters) -> None:
        if bucket.flat is not None:
            return
        one = Gather(self._number[id(bucket)], bucket.bytes, bucket.bytes - bucket.part.nbytes, self.live.position)
        super()._need(bucket)
        assert bucket.flat is not None
        self._watched.append(weakref.ref(bucket.flat.untyped_storage(), lambda _: self._freed(one)))
        one.ended = self.live.position
        one.complete = frozenset(self._number[id(other)] for other in self._complete())
        self.live.note()
        self.gathers.append(one)

    def _freed(self, one: Gather) -> None:
        one.freed = self.live.position


def added(gathers: Sequence[Gather], events: int, staying: Collection[int] = ()) -> list[int]:
    """The bytes to add to each of the `events` of a step whose buckets `staying` stay complete, and the others are
    gathered ahead."""
    changes, last = [0] * (events + 1), None
    for one in gathers:
        if one.bucket in staying:
            changes[one.allocated] -= one.size
            changes[min(one.freed, events)] += one.size
            continue
        if last is not None and one.bucket not in last.complete:
            changes[last.ended] += one.size
            changes[one.allocated] -= one.size
        last = one
    return list(accumulate(changes))


def sent(gathers: Sequence[Gather], staying: Collection[int]) -> dict[str, int]:
    """Bytes that a rank sends for the gathers of a step whose buckets `staying` stay complete."""
    left = [one.sent for one in gathers if one.bucket not in staying]
    return {ALL_GATHER: sum(left)} if left else {}
