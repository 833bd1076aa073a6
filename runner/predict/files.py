"""Writing predictions batch by batch, in the order of the rows.

A JSONL file has an object per row: its number as `row`, and the model's outputs by name. A safetensors file has one
tensor [rows, ...] per name. Invariant: a file with its final name is complete, and no more than a batch is in memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from runner.build.outputs import by_row, row_names
from strategies.runtime.tensor_files import DTYPES

NAME = "predictions"
SAFETENSORS = {dtype: short for short, dtype in DTYPES.items()}


class Predictions:
    """The file `predictions.FORMAT` in `folder`, for `rows` rows, as a context manager.

    Args:
        names: of the tensors that have a value for each row; None: those that have one for each row of the first batch.
    """

    def __init__(self, folder: Path, form: str, rows: int, names: Collection[str] | None = None) -> None:
        self._names = names
        self.path = folder / f"{NAME}.{form}"
        self._partial = self.path.with_suffix(f"{self.path.suffix}.partial")
        self._rows, self._lines = rows, form == "jsonl"
        self._places: dict[str, int] = {}

    def __enter__(self) -> Predictions:
        self._file: BinaryIO = self._partial.open("wb")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        if kind is None:
            os.replace(self._partial, self.path)
        else:
            self._partial.unlink()

    def add(self, rows: Sequence[int], output: Any) -> None:
        """Write what the model returned for consecutive `rows`. Raises ConfigError as `by_row`."""
        if self._names is None:
            self._names = row_names(output, len(rows))
        found = by_row(output, len(rows), self._names)
        if self._lines:
            values = {name: _plain(tensor) for name, tensor in found.items()}
            for position, row in enumerate(rows):
                line = {"row": row} | {name: value[position] for name, value in values.items()}
                self._file.write(json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n")
            return
        if not self._places:
            self._begin(found)
        for name, tensor in found.items():
            stride = tensor[0].numel() * tensor.element_size()
            self._file.seek(self._places[name] + rows[0] * stride)
            self._file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def _begin(self, found: Mapping[str, Tensor]) -> None:
        header, end = {}, 0
        for name, tensor in sorted(found.items(), key=lambda one: -one[1].element_size()):  # wide numbers stay aligned
            shape, start = (self._rows, *tensor.shape[1:]), end
            end += math.prod(shape) * tensor.element_size()
            dtype = SAFETENSORS[str(tensor.dtype).removeprefix("torch.")]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
            self._places[name] = start
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._places = {name: 8 + len(text) + place for name, place in self._places.items()}


def _plain(tensor: Tensor) -> list[Any]:
    """The rows as JSON values; non-finite numbers become null, and complex ones their real and imaginary part."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    rows: list[Any] = tensor.tolist()
    if tensor.dtype.is_floating_point and not bool(tensor.isfinite().all()):
        values = tensor.double().numpy().astype(object)
        values[~tensor.isfinite().numpy()] = None
        rows = values.tolist()
    return rows
