"""What a fault does to a process, its files or its host. Nothing here looks like a simulation to the rest of the run:
signals, errors and writes that fail come from the operating system.
"""

from __future__ import annotations

import builtins
import fcntl
import io
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1  # linux/sockios.h, linux/if.h
FULL = "/dev/full"
"""Takes nothing: every write that reaches it fails as on a full disk."""


class Injected(RuntimeError):
    """The error that a fault of kind `raise` raises."""


def kill() -> NoReturn:
    """End this process as the kernel does when memory is short."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("nothing runs after SIGKILL")


def hang() -> NoReturn:
    """Never come back."""
    while True:
        time.sleep(3600)


def damage(path: Path, *, cut: bool) -> Path:
    """Flip every bit of one byte in the middle of the largest file of the checkpoint `path`, or cut the file there.
    Returns the file."""
    largest = max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    middle = largest.stat().st_size // 2
    if cut:
        os.truncate(largest, middle)
        return largest
    with largest.open("r+b") as file:
        file.seek(middle)
        byte = file.read(1)
        file.seek(middle)
        file.write(bytes([byte[0] ^ 0xFF]))
    return largest


def fill_disk(folder: Path) -> Callable[[], None]:
    """From now on, whatever this process opens below `folder` for writing has no room. Returns what undoes it."""
    plain, inside = io.open, str(folder.absolute()) + os.sep

    def opened(file: Any, mode: str = "r", *args: Any, **named: Any) -> Any:
        if isinstance(file, (str, os.PathLike)) and set(mode) & set("wax+") and _below(file, inside):
            return plain(FULL, mode.replace("x", "w"), *args, **named)
        return plain(file, mode, *args, **named)

    io.open = builtins.open = opened

    def undo() -> None:
        io.open = builtins.open = plain

    return undo


def _below(file: str | os.PathLike[Any], inside: str) -> bool:
    return os.path.abspath(os.fsdecode(file)).startswith(inside)


def take_down(interface: str) -> None:
    """Take a network interface of this host down, as `ip link set INTERFACE down` does. Raises OSError where there is
    no such interface, or no right to do it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        name = interface.encode()
        answer = fcntl.ioctl(any_socket, _GET_FLAGS, struct.pack("16sh14x", name, 0))
        flags = struct.unpack("16sh14x", answer)[1]
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", name, flags & ~_UP))
