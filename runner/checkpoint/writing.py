"""Writing tensors to a file, one after the other: a safetensors file whose checksum is known when it is closed.

A safetensors file is 8 bytes with the length of a JSON header, the header {name: {dtype, shape, data_offsets}}, and the
tensors, each row by row. Invariant: the file is on the disk when a function returns, and at no time is more of it in
memory than one chunk.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from runner.checkpoint.manifest import BLOCK, Stamp
from strategies.runtime.flight_recorder import recorder
from strategies.runtime.tensor_files import DTYPES

NAMES = {name: short for short, name in DTYPES.items()}
"""What safetensors calls torch's dtypes."""


@dataclass(frozen=True)
class Tensors:
    """A tensor to be written under `name`: `chunks()` gives its elements, row by row, in one piece or several."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunks: Callable[[], Iterable[Tensor]]

    @property
    def bytes(self) -> int:
        size: int = getattr(torch, self.dtype).itemsize
        return size * math.prod(self.shape)


def write(path: Path, tensors: Sequence[Tensors]) -> tuple[Stamp, dict[str, int]]:
    """Write `path`; returns its stamp and the first byte of every tensor by name. Raises OSError (a full disk)."""
    # wide numbers first: everything is then aligned as its dtype wants it
    ordered = sorted(tensors, key=lambda one: -getattr(torch, one.dtype).itemsize)
    header, position = {"__metadata__": {"format": "pt"}}, 0
    offsets: dict[str, int] = {}
    for one in ordered:
        entry = {"dtype": NAMES[one.dtype], "shape": one.shape, "data_offsets": (position, position + one.bytes)}
        header[one.name], offsets[one.name] = entry, position  # type: ignore[assignment]
        position += one.bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with Stamped(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for one in ordered:
            for chunk in one.chunks():
                file.write(memoryview(raw(chunk)))
    return file.stamp, {name: 8 + len(text) + offset for name, offset in offsets.items()}


def write_bytes(path: Path, content: bytes) -> Stamp:
    """Write a small file."""
    with Stamped(path) as file:
        file.write(content)
    return file.stamp


def copy(source: Path, path: Path) -> Stamp:
    """Write `path` like the file `source`."""
    with source.open("rb") as content, Stamped(path) as file:
        while block := content.read(BLOCK):
            file.write(block)
    return file.stamp


class Stamped:
    """A file that is written once, flushed to the disk, and stamped while that happens. It has its name when it is
    whole."""

    def __init__(self, path: Path) -> None:
        self._path, self._sum, self._size = path, hashlib.sha256(), 0
        self._hidden = path.with_name(f".{path.name}")

    def __enter__(self) -> Stamped:
        self._file = self._hidden.open("wb")
        return self

    def write(self, content: bytes | memoryview) -> None:
        for begin in range(0, len(content), BLOCK):  # on a slow disk a rank shows with every block that it goes on
            block = content[begin : begin + BLOCK]
            self._file.write(block)
            self._sum.update(block)
            recorder.advance(len(block))
        self._size += len(content)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._hidden.rename(self._path)
                recorder.advance()

    @property
    def stamp(self) -> Stamp:
        return Stamp(self._size, self._sum.hexdigest())


def raw(tensor: Tensor) -> bytes | memoryview:
    """The bytes of a tensor on any device, row by row."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""
