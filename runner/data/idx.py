"""The IDX files of MNIST, read with numpy alone.

An IDX file of bytes is the magic number (two zero bytes, 8 for unsigned bytes, the number of dims), each dim as a
big-endian 32-bit count, and then the elements in row-major order. The invariant: an array that this file returns
has exactly the shape that its header states, and a file that is damaged in any way is rejected with one paragraph that
names it. Plain files are memory-mapped: only the rows that are looked at are read.
"""

from __future__ import annotations

import gzip
import io
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from runner.errors import ConfigError

Bytes = NDArray[np.uint8]


def read(path: Path, *, dims: int) -> Bytes:
    """The array in the file `path`, which must hold bytes in `dims` dims (3 for images, 1 for labels).

    The array is read-only: memory-mapped for a plain file, in memory for one whose name ends in `.gz`.
    Raises ConfigError: the file cannot be opened, is not an IDX file, has another type or number of dims, is
    shorter or longer than its header states, or is damaged as a gzip file.
    """
    packed = path.suffix == ".gz"
    try:
        with gzip.open(path) if packed else path.open("rb") as file:
            shape = _shape(file, path, dims)
            content = file.read() if packed else b""
            actual = len(content) if packed else path.stat().st_size - file.tell()
    except (OSError, EOFError, zlib.error) as error:
        # gzip raises these three for a file that is not gzip, truncated, or corrupt.
        reason = getattr(error, "strerror", None) or error
        raise ConfigError("MW314", f"{path}: cannot be read: {reason}. Give a readable, complete IDX file.") from error
    expected = math.prod(shape)
    if actual != expected:
        kind = "is cut off" if actual < expected else "has bytes left over"
        raise ConfigError(
            "MW314",
            f"{path}: {kind}: its header states {'x'.join(map(str, shape))} = {expected} bytes, and {actual} follow. "
            "Fetch or make the file again.",
        )
    if packed or expected == 0:  # an empty file cannot be mapped
        return np.frombuffer(content, np.uint8).reshape(shape)
    return np.memmap(path, np.uint8, mode="r", offset=4 + 4 * dims, shape=shape)


def encode(array: Bytes) -> bytes:
    """The content of a plain IDX file that holds `array`: the inverse of `read`."""
    return struct.pack(f">HBB{array.ndim}I", 0, _UNSIGNED_BYTE, array.ndim, *array.shape) + array.tobytes()


def find(folder: Path, name: str) -> Path:
    """The file `name` of the MNIST folder `folder`: plain if it is there, else with `.gz`.

    Raises ConfigError: no such folder, or neither file in it.
    """
    if not folder.is_dir():
        raise ConfigError(
            "MW314", f"{folder}: there is no such folder; a folder with the IDX files of MNIST is needed."
        )
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    inside = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
    raise ConfigError("MW314", f"{folder}: holds neither {name} nor {name}.gz; it holds {inside}.")


_UNSIGNED_BYTE = 8


def _shape(file: io.BufferedIOBase, path: Path, dims: int) -> tuple[int, ...]:
    """Read the header; the file position is then behind it."""
    expected = struct.pack(">HBB", 0, _UNSIGNED_BYTE, dims)
    magic = file.read(4)
    if magic != expected:
        start = f"starts with the bytes {magic.hex(' ')}" if magic else "is empty"
        raise ConfigError(
            "MW314",
            f"{path}: {start}, where an IDX file of bytes in {dims} dims starts with {expected.hex(' ')} "
            f"(magic number {int.from_bytes(expected, 'big')}). Give the right file, or fetch it again.",
        )
    counts = file.read(4 * dims)
    if len(counts) < 4 * dims:
        raise ConfigError(
            "MW314", f"{path}: is cut off inside its header of {4 + 4 * dims} bytes. Fetch or make it again."
        )
    return struct.unpack(f">{dims}I", counts)
