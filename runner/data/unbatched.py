"""Batch entries without a batch dim: one tensor for all rows, such as a matrix that forward takes beside x.

Every sample has the tensor, or the user's collate adds it. Invariant: on every rank it is that of the first row of the
micro-batch, where samples have it, and a rank keeps the block of it that the plan's layout says, in all dims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import default_collate


@dataclass(frozen=True)
class Unbatched:
    """A collate that does not batch the entries `names`; `collate` makes the batch, or torch's default stacking."""

    names: frozenset[str]
    collate: Callable[[list[Any]], Any] | None

    def __call__(self, samples: list[Any]) -> Any:
        if self.collate is not None:
            return self.collate(samples)
        first = samples[0]
        keyed = isinstance(first, Mapping)
        stacked = {
            key: default_collate([sample[key] for sample in samples[: 1 if str(key) in self.names else None]])
            for key in (first if keyed else range(len(first)))
        }
        batch = {key: values[0] if str(key) in self.names else values for key, values in stacked.items()}
        return batch if keyed else tuple(batch.values())


def unbatched(collate: object) -> frozenset[str]:
    """The entries that a collate does not batch."""
    return collate.names if isinstance(collate, Unbatched) else frozenset()
