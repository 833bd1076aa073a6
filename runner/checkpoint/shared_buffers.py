"""Host memory for copies of a rank's shards, and the process that writes it into files.

On Linux the memory is shared with that process (see `file_writer`); it is made anew where the shards have other shapes.
Elsewhere, and in containers whose seccomp profile refuses such memory, files are written by the process that trains.
For shards on a GPU the memory is pinned.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

from runner.checkpoint import file_writer
from runner.checkpoint.manifest import Stamp
from strategies.runtime.flight_recorder import recorder

ALIGNED = 64


class WrittenFile(Protocol):
    """A file that is written once, from beginning to end, and has its name when it is complete."""

    @property
    def stamp(self) -> Stamp: ...

    def __enter__(self) -> WrittenFile: ...

    def write(self, content: bytes | memoryview) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


Shape = tuple[tuple[int, ...], torch.dtype]
Shapes = Mapping[str, Sequence[Shape]]


class SharedBuffers:
    """Tensors of `shapes` by key, one after the other in one piece of memory.

    Args:
        pinned: whether a GPU copies to it.
    """

    def __init__(self, shapes: Shapes, pinned: bool) -> None:
        self.shapes, self.pinned = shapes, pinned
        places: dict[str, list[tuple[int, int]]] = {}
        end = 0
        for key, several in shapes.items():
            places[key] = []
            for shape, dtype in several:
                size = torch.Size(shape).numel() * dtype.itemsize
                places[key].append((end, size))
                end += size + -size % ALIGNED
        self.bytes = sum(size for several in places.values() for _, size in several)
        self._file = _memory_file() if end else None
        if self._file is not None:
            os.truncate(self._file, end)
            self._memory = torch.frombuffer(mmap.mmap(self._file, end), dtype=torch.uint8)
            if pinned:
                cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                torch.cuda.check_error(cuda.cudaHostRegister(self._memory.data_ptr(), end, 0))
        else:
            self._memory = torch.empty(end, dtype=torch.uint8, pin_memory=pinned)
        self.tensors = {
            key: [
                self._memory[at : at + size].view(dtype).view(shape)
                for (at, size), (shape, dtype) in zip(places[key], several, strict=True)
            ]
            for key, several in shapes.items()
        }
        self._writer: _Writer | None = None
        self._finalizer = weakref.finalize(self, _release, self._file, self._memory if pinned else None)

    def opener(self) -> Callable[[Path], WrittenFile] | None:
        """What opens a file for a process of its own to write; None where there is none."""
        if self._file is None:
            return None
        if self._writer is None:
            self._writer = _Writer(self._file, len(self._memory))
        return self._opened

    def _opened(self, path: Path) -> WrittenFile:
        assert self._writer is not None
        return _Delegated(path, self._writer, self._memory)

    def close(self) -> None:
        """End the process; there is another one for the next file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _memory_file() -> int | None:
    """A file in memory; None where the system has none."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        return os.memfd_create("checkpoint")
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EACCES, errno.ENOSYS):
            raise
        return None


def _release(file: int | None, pinned: Tensor | None) -> None:
    if file is not None:
        os.close(file)
        if pinned is not None:
            torch.cuda.cudart().cudaHostUnregister(pinned.data_ptr())  # type: ignore[no-untyped-call]


class _Writer:
    """The process that writes the content of the shared memory `file`."""

    def __init__(self, file: int, size: int) -> None:
        self.connection, far = Pipe()
        words = (far.fileno(), file, size, os.getpid())
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", file_writer.__file__, *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=words[:2],
        )
        far.close()
        self._finalizer = weakref.finalize(self, _end, self.connection, self._process, os.getpid())

    def close(self) -> None:
        self._finalizer()


def _end(connection: Connection, process: subprocess.Popen[bytes], owner: int) -> None:
    """End the process. It would wait for as long as a data worker, which is forked with the socket, keeps that open."""
    if os.getpid() == owner:  # not in such a worker
        with suppress(OSError):
            connection.send(None)
        connection.close()
        process.wait()


@dataclass
class _Delegated:
    """A file that the writer's process writes when it is complete. The content of `memory` it takes from there."""

    path: Path
    writer: _Writer
    memory: Tensor

    def __enter__(self) -> _Delegated:
        self._pieces: list[file_writer.Piece] = []
        self._size = 0
        return self

    def write(self, content: bytes | memoryview) -> None:
        self._size += len(content)
        if len(content):
            place = ctypes.addressof(ctypes.c_char.from_buffer(content)) if isinstance(content, memoryview) else 0
            begin = place - self.memory.data_ptr()
            inside = 0 <= begin <= len(self.memory) - len(content)
            self._pieces.append((begin, begin + len(content)) if inside else bytes(content))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return
        connection = self.writer.connection
        try:
            connection.send((str(self.path.absolute()), self._pieces))
            self._sum = ""
            while not self._sum:
                answer = connection.recv()
                if isinstance(answer, OSError):
                    raise answer
                count, self._sum = answer
                recorder.advance(count)
        except (EOFError, ConnectionError) as error:
            raise OSError(f"the process that writes {self.path.name} is down") from error

    @property
    def stamp(self) -> Stamp:
        return Stamp(self._size, self._sum)
