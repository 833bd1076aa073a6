"""The bytes of ZeRO without DeepSpeed: what a rank keeps from step to step, and what an update needs.

What comes and goes between is traced with the real `strategies.optimizer.sharded`. Invariant: these are the bytes of
rank 0, whose parts have no more padding than any other's.
"""

from __future__ import annotations

import torch

from strategies.core.graph import ITEM_BYTES
from strategies.core.program import Program
from strategies.memory.zero import PersistentBytes
from strategies.optimizer.bytes_per_element import Need
from strategies.optimizer.settings import OptimizerSettings
from strategies.optimizer.sharding import FROZEN, bucket_limit, gradient_dtype, sharded_buckets


class ShardedBytes:
    """Bytes of one program's sharded parameters, gradients and states; `need` is what the optimizer needs."""

    def __init__(self, program: Program, need: Need, settings: OptimizerSettings) -> None:
        groups = [group["names"] for group in settings.groups_for(program)]
        self.stage, self.accumulate, self.device = settings.stage, settings.accumulate, settings.device
        self.limit = settings.limit or bucket_limit(program, self.stage)
        """Bytes of a bucket at most."""
        self.buckets = sharded_buckets(program, groups, self.limit, self.stage, settings.complete)
        self.need = need
        self.updated = [
            need.elements(sum(one.count for one in ranges), getattr(torch, bucket.dtype))
            for bucket in self.buckets
            for (group, _), ranges in bucket.of_units(0).items()
            if group != FROZEN
        ]

    @property
    def persistent(self) -> PersistentBytes:
        """Bytes between steps."""
        weights = sum(
            (bucket.elements if bucket.stay else bucket.part) * ITEM_BYTES[bucket.dtype] for bucket in self.buckets
        )
        masters = sum(
            bucket.part * ITEM_BYTES[wide]
            for bucket in self.buckets
            if (wide := gradient_dtype(bucket)) != bucket.dtype
        )
        return PersistentBytes(weights, 0, masters + int(sum(self.updated) * self.need.kept), 0)

    @property
    def waiting(self) -> int:
        """Bytes of the gradients that wait for those of the next micro-batch."""
        if self.accumulate == 1:
            return 0
        trained = (bucket for bucket in self.buckets if bucket.trained)
        return sum((one.elements if self.stage == 1 else one.part) * ITEM_BYTES[gradient_dtype(one)] for one in trained)

    @property
    def moving(self) -> list[tuple[float, int]]:
        """The share of backward that is left when each bucket is complete, about, and the bytes of the gradients then:
        those of it and of the one before, as they came and as they are received, which on a CPU is all of them."""
        trained = [bucket for bucket in reversed(self.buckets) if bucket.trained]
        total, done, before, found = sum(bucket.elements for bucket in trained), 0, 0, []
        for bucket in trained:
            size = bucket.elements * ITEM_BYTES[gradient_dtype(bucket)] * (2 if self.device == "cpu" else 1)
            done += bucket.elements
            found.append((1 - done / total, before + size))
            before = size
        return found

    @property
    def gathered(self) -> int:
        """Bytes of the parameters that are complete at one moment of stage 3, about: a bucket and the one ahead."""
        sizes = [one.elements * ITEM_BYTES[one.dtype] for one in self.buckets if one.ranks > 1 and not one.stay]
        return sum(sorted(sizes)[-2:]) if self.stage == 3 else 0

    def during_update(self) -> int:
        """Bytes beside the persistent ones during an update, at most."""
        trained = (bucket for bucket in self.buckets if bucket.trained)
        gradients = sum(bucket.part * ITEM_BYTES[gradient_dtype(bucket)] for bucket in trained)
        return gradients + self.need.during(self.updated)

    def host_in_update(self) -> int:
        """Bytes of the host during an update."""
        return 0
