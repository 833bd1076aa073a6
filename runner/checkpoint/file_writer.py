"""A process that writes files for one that trains, with their checksums, at the lowest priority.

    python -I file_writer.py CONTROL MEMORY BYTES PARENT

It reads from the socket CONTROL which parts of the shared MEMORY make a file, and answers with every block that it has
written, as a sign of progress, and at the end with size and checksum, or with the error of the disk. A thread could do
that only at the trainer's own priority: one of a lower priority that is given the interpreter's lock, and then no core,
stops the trainer. Nothing but the standard library is imported. Invariant: it ends with its parent, and no file has its
final name before it is on the disk.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

BLOCK = 2**22
LOWEST = 19
Piece = bytes | tuple[int, int]
"""Bytes, or where they begin and end in the shared memory."""


def write(path: str, pieces: Sequence[Piece], memory: memoryview, parent: int) -> Iterator[tuple[int, str]]:
    """Write a file; yields the bytes of every block, and the checksum of all so far. Raises OSError."""
    folder, name = os.path.split(path)
    hidden, checksum = os.path.join(folder, f".{name}"), hashlib.sha256()
    with open(hidden, "wb", buffering=0) as file:
        for piece in pieces:
            content = memoryview(piece) if isinstance(piece, bytes) else memory[slice(*piece)]
            for begin in range(0, len(content), BLOCK):
                block = content[begin : begin + BLOCK]
                done = 0
                while done < len(block):
                    done += file.write(block[done:])
                checksum.update(block)
                if os.getppid() != parent:
                    raise EOFError
                yield len(block), ""
        os.fsync(file.fileno())
    if os.getppid() != parent:
        raise EOFError
    os.rename(hidden, path)
    yield 0, checksum.hexdigest()


def main(control: int, shared: int, size: int, parent: int) -> None:
    """Serve the parent until it sends None or is down."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent ends once its save is complete
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, LOWEST)
    memory = memoryview(mmap.mmap(shared, size, prot=mmap.PROT_READ))
    with Connection(control) as connection, suppress(EOFError, ConnectionError):
        while (order := connection.recv()) is not None:
            path, pieces = order
            try:
                for answer in write(path, pieces, memory, parent):
                    connection.send(answer)
            except OSError as error:
                connection.send(error)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]))
