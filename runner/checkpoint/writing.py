"""Stream tensors to a safetensors file and compute its checksum on the way.

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
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from runner.checkpoint.index import place
from runner.checkpoint.manifest import BLOCK, Stamp
from strategies.core.layout import Block
from strategies.runtime.flight_recorder import recorder
from strategies.runtime.shards import Shards
from strategies.runtime.tensor_files import DTYPES, Part, StoredTensor

NAMES = {name: short for short, name in DTYPES.items()}
"""What safetensors calls torch's dtypes."""


@dataclass(frozen=True)
class Unwritten:
    """A block to be written under `name`, of the tensor `key`, which has `shape` and torch's `dtype`. `chunks()` yields
    the elements of the block row by row, in one tensor or several."""

    name: str
    key: str
    shape: tuple[int, ...]
    dtype: str
    block: Block
    chunks: Callable[[], Iterable[Tensor]]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.block)

    @property
    def itemsize(self) -> int:
        size: int = getattr(torch, self.dtype).itemsize
        return size


def write(path: Path, blocks: Sequence[Unwritten]) -> tuple[Stamp, dict[str, StoredTensor]]:
    """Write a safetensors file.

    Args:
        path: the file.
        blocks: the content, each block under a unique name.

    Returns:
        Size and checksum of the file, and the tensors of `blocks` with the parts that it holds.

    Raises:
        OSError: the disk is full.
    """
    header, position = {"__metadata__": {"format": "pt"}}, 0
    offsets: dict[str, int] = {}
    ordered = sorted(blocks, key=lambda one: -one.itemsize)  # wide numbers first: each is aligned as its dtype wants it
    for one in ordered:
        end = position + one.itemsize * math.prod(one.sizes)
        entry = {"dtype": NAMES[one.dtype], "shape": one.sizes, "data_offsets": (position, end)}
        header[one.name], offsets[one.name] = entry, position  # type: ignore[assignment]
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with Stamped(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for one in ordered:
            for chunk in one.chunks():
                file.write(memoryview(raw(chunk)))
    index: dict[str, StoredTensor] = {}
    for one in blocks:
        part = Part(path.name, 8 + len(text) + offsets[one.name], one.block)
        before = index[one.key].parts if one.key in index else ()
        index[one.key] = StoredTensor(one.shape, one.dtype, (*before, part))
    return file.stamp, index


def of_shards(shards: Shards) -> list[Unwritten]:
    """The pieces of a rank, each block once."""
    found: dict[str, Unwritten] = {}
    for key, several in shards.items():
        for piece in several:
            name, dtype = place(key, piece.block), str(piece.view.dtype).removeprefix("torch.")
            found[name] = Unwritten(name, key, tuple(piece.shape), dtype, piece.block, partial(_alone, piece.view))
    return list(found.values())


def _alone(tensor: Tensor) -> list[Tensor]:
    return [tensor]


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
    """A file that is written once, flushed to the disk, and checksummed while it is written. It gets its final name
    when it is complete."""

    def __init__(self, path: Path) -> None:
        self._path, self._sum, self._size = path, hashlib.sha256(), 0
        self._hidden = path.with_name(f".{path.name}")

    def __enter__(self) -> Stamped:
        self._file = self._hidden.open("wb")
        return self

    def write(self, content: bytes | memoryview) -> None:
        for begin in range(0, len(content), BLOCK):  # on a slow disk every block is a sign of progress
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
