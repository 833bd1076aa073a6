"""Writing predictions batch by batch, in the order of the rows.

A JSONL file has an object per row: its number as `row`, and the model's outputs by name. A safetensors file has one
tensor [rows, ...] per name. Invariant: a file with its final name is complete, and no more than a batch is in memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch
from torch import Tensor

from runner.errors import ConfigError
from strategies.runtime.tensor_files import DTYPES

NAME = "predictions"
OUTPUT = "output"
"""What a model returns that returns one tensor."""
SAFETENSORS = {dtype: short for short, dtype in DTYPES.items()}


class Predictions:
    """The file `predictions.FORMAT` in `folder`, for `rows` rows, as a context manager."""

    def __init__(self, folder: Path, form: str, rows: int) -> None:
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
        """Write what the model returned for consecutive `rows`. Raises ConfigError if no tensor has a value per row."""
        found = by_row(output, len(rows))
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


def by_row(output: Any, rows: int) -> dict[str, Tensor]:
    """The tensors in what a model returned that have a value per row, on the CPU, by their place in it: `output` if
    that is all, `logits`, `0`, `heads.1`.

    Raises ConfigError where there is none.
    """
    named = ((name or OUTPUT, tensor) for name, tensor in _named(output, ()))
    found = {name: tensor.detach().cpu() for name, tensor in named if tensor.dim() and tensor.shape[0] == rows}
    if not found:
        raise ConfigError(
            "MW317",
            "predict: the model returns nothing that has a value for each row of a batch, so there is nothing to "
            "write.",
        )
    return found


def _named(output: Any, where: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(output, Tensor):
        yield ".".join(where), output
        return
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(output, Mapping):
        children = output.items()
    elif is_dataclass(output) and not isinstance(output, type):
        children = ((field.name, getattr(output, field.name)) for field in fields(output))
    elif isinstance(output, (tuple, list)):
        children = enumerate(output)
    for name, child in children:
        yield from _named(child, (*where, str(name)))


def _plain(tensor: Tensor) -> list[Any]:
    """The rows as JSON values; non-finite numbers become null, and complex ones their real and imaginary part."""
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    rows: list[Any] = tensor.tolist()
    if tensor.dtype.is_floating_point and not bool(tensor.isfinite().all()):
        values = tensor.double().numpy().astype(object)
        values[~tensor.isfinite().numpy()] = None
        rows = values.tolist()
    return rows
