"""A short description of a dataset that ranks can compare: a rank with different data would otherwise train on
silently.

The invariant: equal data has equal descriptions in every process, and a description costs one sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.build import targets
from runner.data.loader import Collate, MapDataset, fields, reader
from runner.data.row_seeds import row_seeds
from runner.errors import ConfigError

CORNER = 8
"""Entries per dim of a sample whose dataset can read slices."""


@dataclass(frozen=True)
class Description:
    """The numbers of rows (`evaluation` is None without evaluation), and a hash of the training row `row`, None where
    it is another sample each time it is read."""

    training: int
    evaluation: int | None
    row: int
    sample: str | None

    @property
    def facts(self) -> dict[str, str]:
        """The values that ranks compare, by name."""
        values = {
            "the number of training rows": self.training,
            "the number of evaluation rows": self.evaluation,
            f"training row {self.row} (hash)": self.sample,
        }
        return {name: str(value) for name, value in values.items() if value is not None}


UNSEEN = Description(0, None, 0, None)


def described(
    training: MapDataset,
    evaluating: MapDataset | None,
    collate: Collate | None,
    *,
    row: int,
    shapes: Sequence[Sequence[int]],
    seed: int,
) -> Description:
    """The description of data whose batches have `shapes`, as seen in the first epoch. For a row that can be read in
    slices, only a corner is read."""
    read = None if collate else reader(training)
    rows = len(training), None if evaluating is None else len(evaluating)
    if row >= rows[0]:
        return Description(*rows, row, "there is none")
    with row_seeds(seed, 0) as begin:
        begin(row)
        if read is None:
            sample = training[row]
        else:
            corner = tuple(tuple(slice(0, min(size, CORNER)) for size in shape[1:]) for shape in shapes)
            sample = read(row, corner)
    return Description(*rows, row, _hash(sample))


def check_read(dataset: MapDataset, row: int, shapes: Sequence[Sequence[int]], seed: int) -> None:
    """Raise ConfigError unless `read(row, slices)` with full slices equals `dataset[row]`."""
    read = reader(dataset)
    if read is None:
        return
    everything = tuple(tuple(slice(0, size) for size in shape[1:]) for shape in shapes)
    with row_seeds(seed, 0) as begin:
        begin(row)
        sample = dataset[row]
        begin(row)
        try:
            differs, reason = _hash(read(row, everything)) != _hash(sample), ""
        except Exception as error:
            differs, reason = True, f": {targets.describe(error)}"
    if differs:
        raise ConfigError(
            "MW312",
            f"data: {type(dataset).__name__}.read takes two arguments, so slices of a row are requested, but "
            f"read({row}, slices) of the entire row does not return what dataset[{row}] does{reason}. Return the "
            "slices that are requested, or give a method with another purpose another name.",
        )


def _hash(sample: Any) -> str:
    """A hash of names, dtypes, shapes and values; for anything but tensors, arrays, numbers and strings, of the type
    alone."""
    digest = hashlib.sha256()
    for name, value in sorted(zip(*fields(sample), strict=True), key=lambda field: str(field[0])):
        content: Any = type(value).__name__
        if isinstance(value, (Tensor, np.ndarray, np.generic, int, float)):
            tensor = torch.as_tensor(value)
            values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            content = (str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(values).digest())
        elif isinstance(value, str):
            content = value
        digest.update(repr((name, content)).encode())
    return digest.hexdigest()[:12]
