"""Tensors on a disk, in one file per process that has no name.

The file is opened without a name (or loses it at once), so its space is given back when the process ends, however it
ends. Invariant: bytes that were put are what `get` returns, also while the writing thread has not got to them; space
that is let go is used again by what has the same size.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(eq=False)
class Extent:
    """A part of the file, and the write that fills it, while it is on its way."""

    offset: int
    size: int
    writing: Future[None] | None = None


class Disk:
    """Written in the background by one thread; read by the caller. Tensors are on the CPU and contiguous."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = tempfile.TemporaryFile(dir=folder, buffering=0)
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self._writer = ThreadPoolExecutor(1, "disk")

    def put(self, tensor: Tensor, after: Callable[[], object] | None = None) -> Extent:
        """Begin to write `tensor`, which must not change before `wait`, once `after` has returned."""
        size = tensor.nbytes
        extent = Extent(self._free[size].pop() if self._free.get(size) else self._end, size)
        self._end = max(self._end, extent.offset + size)
        self.put_again(extent, tensor, after)
        return extent

    def put_again(self, extent: Extent, tensor: Tensor, after: Callable[[], object] | None = None) -> None:
        """Start to overwrite the extent with `tensor`, which has the same size."""
        self.wait(extent)
        extent.writing = self._writer.submit(_write, self.file.fileno(), [_bytes(tensor)], extent.offset, after)

    def get(self, extent: Extent, into: Tensor) -> None:
        """Fill `into` with the first of the bytes that were put."""
        self.wait(extent)
        content, done = _bytes(into), 0
        while done < len(content):
            count = os.preadv(self.file.fileno(), [content[done:]], extent.offset + done)
            if not count:
                raise OSError(f"The file of offloaded tensors ends at {extent.offset + done}.")
            done += count

    def wait(self, extent: Extent) -> None:
        """Wait until the extent is written. Raises OSError where it cannot be (the disk is full)."""
        if extent.writing is not None:
            extent.writing.result()
            extent.writing = None

    def free(self, extent: Extent) -> None:
        """Release the space, which may be reused at once."""
        self._free.setdefault(extent.size, []).append(extent.offset)

    def close(self) -> None:
        self._writer.shutdown()
        self.file.close()


def _bytes(tensor: Tensor) -> memoryview:
    flat = torch.empty(0, dtype=torch.uint8).set_(
        tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size(), (tensor.nbytes,), (1,)
    )
    return memoryview(flat.numpy().data)


def _write(file: int, entry: list[memoryview], offset: int, after: Callable[[], object] | None) -> None:
    """Write the one item of `entry` and release it before the write is reported as done."""
    content = entry.pop()
    if after is not None:
        after()
    done = 0
    while done < len(content):
        done += os.pwrite(file, content[done:], offset + done)
