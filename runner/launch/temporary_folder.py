"""The folders that a run needs only while it lasts: on the disk to which it offloads, and for the sockets of a rank's
data workers. Does not import torch: the parent makes most of them.

Invariant: they are removed after the run, however the ranks end; if the parent itself was killed, the next run there
removes them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.config.schema import Config
from runner.errors import ConfigError

SOCKETS = "s"
LONGEST = 43
"""Bytes of a folder of temporary files in which a worker's socket, 2 folders deeper, has a name that Unix takes (103
bytes)."""


@contextmanager
def offload_folder(config: Config, run_dir: Path) -> Iterator[Path | None]:
    """A fresh folder in `parallel.offload.folder`, or else in the run folder; None where no disk is used."""
    wanted = config.parallel.offload
    if not wanted.on_disk:
        yield None
        return
    parent = run_dir if wanted.folder is None else Path(wanted.folder)
    if not parent.is_dir():
        raise ConfigError(
            "MW505", f"parallel.offload.folder = {wanted.folder!r}: there is no such folder; make it first."
        )
    with own_folder(parent, "offload") as folder:
        yield folder


@contextmanager
def own_folder(parent: Path, what: str) -> Iterator[Path]:
    """A fresh folder in `parent`, for `what`. Folders of processes that no longer exist are removed."""
    _remove_left(parent, what)
    prefix = f".{what}-{os.getpid()}-{_machine()}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder).absolute()


@contextmanager
def socket_folder() -> Iterator[Path]:
    """A fresh folder for the sockets of this rank's data workers, which do not remove theirs when they are killed."""
    with own_folder(_temporary(), SOCKETS) as folder:
        yield folder


def remove_sockets() -> None:
    """Remove the folders of sockets that killed ranks have left."""
    _remove_left(_temporary(), SOCKETS)


def _temporary() -> Path:
    folder = tempfile.gettempdir()
    return Path(folder if len(os.fsencode(folder)) <= LONGEST else "/tmp")


def _remove_left(parent: Path, what: str) -> None:
    for left in parent.glob(f".{what}-*-*"):
        owner, *rest = left.name.split("-")[1:]
        if owner.isdigit() and rest[0] == _machine() and not _alive(int(owner)):
            shutil.rmtree(left, ignore_errors=True)


def _machine() -> str:
    """A short name of this machine, or container: others may share the folder, and number their processes anew."""
    numbering = Path("/proc/self/ns/pid")
    name = socket.gethostname() + (os.readlink(numbering) if numbering.is_symlink() else "")
    return hashlib.sha256(name.encode()).hexdigest()[:6]


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)  # it may be another user's
    return True
