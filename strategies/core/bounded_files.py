"""Reading files that anybody may have put there: regular files of a limited size, their lines, and JSON
from them.

Invariant: reading never blocks (a FIFO, a device) and never takes more memory than the limit allows.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST = 2**26
"""Bytes of a JSON file, unless the caller knows better; the plan of a large model has some million."""
LONGEST = 2**20
"""Bytes of a line."""


def read_bytes(path: Path, most: int = MOST) -> bytes:
    """The content of a regular file of at most `most` bytes.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no regular file, or larger than `most` bytes.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # before it is opened: opening a device may change it
        raise ValueError("it is not a regular file")
    if status.st_size > most:
        raise ValueError(f"it has more than {most:,} bytes")
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return content


def read_json(path: Path, most: int = MOST) -> Any:
    """The JSON value in a regular file of at most `most` bytes.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no regular file, too large, no JSON, or nested too deeply.
    """
    return parse(read_bytes(path, most))


def lines(path: Path, longest: int = LONGEST) -> Iterator[bytes]:
    """The lines of a regular file with their ends, up to the first one of more than `longest` bytes; none where it is
    no regular file. Raises OSError."""
    if path.is_file():
        with path.open("rb") as file:
            while 0 < len(line := file.readline(longest + 1)) <= longest:
                yield line


def parse(content: bytes | str) -> Any:
    """The JSON value in `content`. Raises ValueError, also where it is nested too deeply."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def is_inner_name(name: object) -> bool:
    """Whether `name` can only mean an entry of the folder it is used in: no path, no `..`."""
    return isinstance(name, str) and name == os.path.basename(name) and name not in ("", ".", "..") and "\0" not in name


def is_count(value: object, least: int = 0) -> bool:
    """Whether a JSON value is an integer from `least` to 2**63 - 1, as sizes and offsets of tensors are."""
    return type(value) is int and least <= value < 2**63
