"""The bytes of stage 3 without DeepSpeed: what a rank keeps from step to step, and what an update needs.

What comes and goes between is traced with the real `strategies.optimizer.sharded`. Invariant: these are the bytes of
rank 0, whose parts have no more padding than any other's.
"""

from __future__ import annotations

from strategies.core.graph import ITEM_BYTES
from strategies.core.program import Program
from strategies.memory.zero import PersistentBytes
from strategies.optimizer.bytes_per_element import Need
from strategies.optimizer.settings import OptimizerSettings
from strategies.optimizer.sharding import FROZEN, bucket_limit, gradient_dtype, sharded_buckets


class ShardedBytes:
    """Of one program; `need` is what the optimizer needs."""

    def __init__(self, program: Program, need: Need, settings: OptimizerSettings) -> None:
        groups = [group["names"] for group in settings.groups_for(program)]
        self.limit = settings.limit or bucket_limit(program)
        """Bytes of a bucket at most."""
        self.buckets, self.need = sharded_buckets(program, groups, self.limit), need
        self.updated = [
            sum(one.count for one in ranges)
            for bucket in self.buckets
            for group, ranges in bucket.of_groups(0)
            if group != FROZEN
        ]

    @property
    def persistent(self) -> PersistentBytes:
        """Bytes between steps."""
        weights = sum(bucket.part * ITEM_BYTES[bucket.dtype] for bucket in self.buckets)
        masters = sum(
            bucket.part * ITEM_BYTES[wide]
            for bucket in self.buckets
            if (wide := gradient_dtype(bucket)) != bucket.dtype
        )
        return PersistentBytes(weights, 0, masters + int(sum(self.updated) * self.need.kept), 0)

    def during_update(self) -> int:
        """Bytes beside the persistent ones during an update, at most."""
        trained = (bucket for bucket in self.buckets if bucket.trained)
        gradients = sum(bucket.part * ITEM_BYTES[gradient_dtype(bucket)] for bucket in trained)
        return gradients + self.need.during(self.updated)

    def host_in_update(self) -> int:
        """Bytes of the host during an update."""
        return 0
