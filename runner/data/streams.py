"""Streams: datasets that are iterated, as an IterableDataset of torch or of Hugging Face is.

The invariant: sample n is the n-th that the dataset yields, in every process, whatever was read before. So the place in
a stream is the number of samples that training has consumed, on any number of ranks and workers, and a stream is read
like any other dataset. Samples before n are passed over; only the last ones stay in memory.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy, deepcopy
from typing import Any

import numpy
from torch.utils.data._utils import worker

from runner.checkpoint.continuation import ENDLESS
from runner.data.row_seeds import row_seeds
from runner.errors import ConfigError

EVERY = 10.0
"""Seconds between lines of progress while samples are counted."""


def own(sample: Any) -> Any:
    """A sample to whose entries a collate may assign: others read the same one again."""
    return copy(sample) if isinstance(sample, dict | list) else sample


class Stream:
    """Sample n of `dataset`, which can be iterated again and again and yields the same samples each time, or others
    for another epoch where it has a method set_epoch(epoch).

    Args:
        dataset: the iterable.
        name: of its target, for messages.
        seed: from which the random numbers of a sample follow, with its number.
        length: the samples of one pass; then n counts those of the epoch given to `set_epoch`. None: n counts over all
            passes.
        window: how many of the samples that were read last can be read again without another pass.
        convert: makes what training needs of a sample that is not passed over.
    """

    def __init__(
        self,
        dataset: Any,
        name: str,
        *,
        seed: int = 0,
        length: int | None = None,
        window: int = 1024,
        convert: Callable[[Any], Any] | None = None,
    ) -> None:
        self._dataset, self._name, self._seed, self._length, self._window = dataset, name, seed, length, window
        self._convert = convert
        self._random = numpy.random.MT19937()
        self._recent: OrderedDict[int, Any] = OrderedDict()
        self._begin(0)

    def __len__(self) -> int:
        return ENDLESS if self._length is None else self._length

    def counted(self, length: int | None = None, most: int | None = None) -> Stream:
        """This stream with a length of at most `most`, for which it is iterated once unless it is given. Prints how far
        that is every few seconds, as a stream may have no end."""
        if length is None:
            reported = time.monotonic()
            while self._next != most and self._advance() is not _END:
                if time.monotonic() - reported > EVERY:
                    reported = time.monotonic()
                    print(
                        f"data: counting the samples of {self._name}: {self._next} so far (one without an end cannot "
                        "be trained in epochs, evaluated, or predicted without predict.rows)",
                        flush=True,
                    )
            length = self._next
            self._begin(0)
        self._length = length
        return self

    def set_epoch(self, epoch: int) -> None:
        """Read samples of another epoch from now on."""
        if self._length is not None and epoch != self._epoch:
            self._begin(epoch)

    def __getitem__(self, index: int) -> Any:
        """Sample `index`; the next one is had at once, an earlier one than those in memory after another pass.

        Raises ConfigError: the stream ends too early, or yields nothing. Exceptions of the dataset are passed on.
        """
        if index in self._recent:
            return own(self._recent[index])
        if index < self._next:
            self._begin(0 if self._length is None else self._epoch)
        while True:
            sample, number = self._advance(), self._next - 1
            if sample is _END:
                self._end(index)
            elif number == index:
                with numbered(index):
                    sample = self._recent[index] = sample if self._convert is None else self._convert(sample)
                if len(self._recent) > self._window:
                    self._recent.popitem(last=False)
                return own(sample)

    def _begin(self, epoch: int, first: int = 0) -> None:
        """A new pass, whose first sample has the number `first`."""
        if first == 0:
            self._recent.clear()
        self._epoch, self._first, self._next = epoch, first, first
        self._iterator: Iterator[Any] | None = None

    def _fresh(self) -> Any:
        """The dataset for another pass: one of Hugging Face keeps its place in itself, so every pass has a copy."""
        return deepcopy(self._dataset) if type(self._dataset).__module__.startswith("datasets.") else self._dataset

    def _advance(self) -> Any:
        """The next sample, _END after the last one of a pass."""
        with _alone(), row_seeds(self._seed, self._epoch, self._random) as begin:
            begin(self._next)
            if self._iterator is None:
                dataset = self._fresh()
                if hasattr(dataset, "set_epoch"):
                    dataset.set_epoch(self._epoch)
                self._iterator = iter(dataset)
            with numbered(self._next):
                sample = next(self._iterator, _END)
        self._next += sample is not _END
        return sample

    def _end(self, index: int) -> None:
        if self._length is not None:
            raise ConfigError(
                "MW822",
                f"data: {self._name} ends after {self._next} samples of epoch {self._epoch + 1}, of which it had "
                f"{self._length} when they were counted; a stream must have equally many every time it is iterated.",
            )
        if self._next == self._first:
            raise ConfigError(
                "MW822",
                f"data: {self._name} yields no samples in pass {self._epoch + 1}, so sample {index} cannot be read; a "
                "stream must begin again each time it is iterated.",
            )
        self._begin(self._epoch + 1, self._next)


_END = object()


@contextmanager
def numbered(row: int) -> Iterator[None]:
    """Give an exception the row that raised it, as its attribute `data_row`."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if not hasattr(error, "data_row"):
            with suppress(AttributeError):  # a class with slots
                error.data_row = row  # type: ignore[union-attr]
        raise


@contextmanager
def _alone() -> Iterator[None]:
    """Let a dataset that divides its samples among the workers of a DataLoader see none: each reads all of them."""
    info, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = info
