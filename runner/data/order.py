"""The rows that a step reads.

The invariant: the rows of a step are a pure function of (length, batch size, seed, step). There is no position to
save or restore: a resumed run computes the rows of the step at which it continues.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from runner.errors import ConfigError

Shuffled = Callable[[torch.Generator], Tensor]
"""An order of the rows of a dataset in which it reads fast: int64 [length], a permutation."""


def epoch_order(length: int, seed: int, epoch: int, shuffle: bool, shuffled: Shuffled | None = None) -> Tensor:
    """The order of the rows in one epoch: int64 [length], a permutation, the same everywhere for equal arguments."""
    if not shuffle:
        return torch.arange(length)
    # Hashed, so that neighbouring seeds do not share the permutations of neighbouring epochs.
    key = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key, "big"))
    if shuffled is not None:
        return shuffled(generator)
    try:
        return torch.randperm(length, generator=generator)
    except RuntimeError as error:  # there is no memory for it
        raise ConfigError(
            "MW310",
            f"data.shuffle = true: an order of {length} rows takes {8 * length} bytes, which cannot be had; take "
            "data.shuffle=false, or a dataset that is iterated and shuffles itself.",
        ) from error


# A step needs one epoch, or two at an epoch boundary: two cached permutations suffice.
_cached_order = lru_cache(maxsize=2)(epoch_order)


@dataclass(frozen=True)
class Order:
    """The batches of training, over as many epochs as there are steps.

    `batch_size` is the global batch of one optimizer step; a last batch of an epoch that is short is left out with
    `drop_last`; `shuffled` is the dataset's own way to shuffle. Raises ConfigError: fewer rows than one batch.
    """

    length: int
    batch_size: int
    seed: int
    shuffle: bool = True
    drop_last: bool = True
    shuffled: Shuffled | None = None

    def __post_init__(self) -> None:
        if self.length < self.batch_size:
            raise ConfigError(
                "MW310",
                f"data.batch_size = {self.batch_size} is more than the {self.length} rows of the dataset; "
                f"at most {self.length} would be right, or a larger dataset.",
            )

    @property
    def steps_per_epoch(self) -> int:
        return self.length // self.batch_size + (self.short > 0)

    @property
    def dropped(self) -> int:
        """How many rows each epoch leaves out (with `shuffle`, others each time)."""
        return self.length % self.batch_size if self.drop_last else 0

    @property
    def short(self) -> int:
        """The rows of the last batch of an epoch, where that is a short one; else 0."""
        return 0 if self.drop_last else self.length % self.batch_size

    def epoch(self, step: int) -> int:
        """The epoch, from 0, to which the optimizer step `step`, from 0, belongs."""
        return step // self.steps_per_epoch

    def rows(self, step: int) -> list[int]:
        """The row numbers of the optimizer step `step`, counted from 0 across epochs."""
        first = step % self.steps_per_epoch * self.batch_size
        if not self.shuffle:
            return [*range(first, min(first + self.batch_size, self.length))]
        order = _cached_order(self.length, self.seed, self.epoch(step), self.shuffle, self.shuffled)
        rows: list[int] = order[first : first + self.batch_size].tolist()
        return rows


def spread(count: int, most: int = 8) -> list[int]:
    """At most `most` of the numbers 1, ..., count - 1, at equal distances."""
    return sorted({round(number * (count - 1) / most) for number in range(1, most + 1)} - {0})


def eval_rows(length: int, batch_size: int) -> list[list[int]]:
    """The batches of an evaluation: every row exactly once, in order; the last batch may be short."""
    return [list(range(first, min(first + batch_size, length))) for first in range(0, length, batch_size)]


def padded(rows: Sequence[int], batch_size: int) -> tuple[list[int], int]:
    """`rows` filled up to `batch_size` by repeating the last one, and how many of them count."""
    return [*rows, *[rows[-1]] * (batch_size - len(rows))], len(rows)
