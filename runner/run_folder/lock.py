"""One process at a time in a run folder or a sweep folder.

The file `.lock` in the folder is locked with flock and says who uses it. The kernel releases the lock when the process
ends, however it ends, so no stale lock remains. The command keeps it for the entire run, restarts included; its ranks
never have it: the descriptor is closed on exec, and in forks. On a network file system the lock works between hosts
where that supports flock (NFS on Linux since 2.6.12 with a lock manager, Lustre with `-o flock`); where it works on one
host only (`local_lock=flock`, Lustre's `localflock`), two hosts do not see each other, and where there are no locks at
all, a warning says so.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from runner.errors import ConfigError

FILE = ".lock"
RUN, SWEEP = "hydra.run.dir", "hydra.sweep.dir"
"""The keys that choose a folder."""
PATIENCE = 1.0
"""Seconds in which whoever has just locked a folder says who it is."""


@dataclass(frozen=True)
class Occupant:
    """The process that uses a folder: the id of its run, the verb, the recipe if any, the process id, its host, and the
    start time."""

    run: str
    verb: str
    recipe: str | None
    pid: int
    host: str
    started: str

    @classmethod
    def now(cls, verb: str, recipe: str | None, run: str | None = None) -> Occupant:
        """This process, with a new id for its run unless one is given."""
        started = f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S%z}"
        return cls(run or secrets.token_hex(8), verb, recipe, os.getpid(), socket.gethostname(), started)

    def __str__(self) -> str:
        """The id and the known properties of the run, for messages."""
        return f"{self.run} ({'' if self.recipe is None else f'recipe {self.recipe}, '}started {self.started})"


_locked: dict[Path, tuple[int, Occupant]] = {}
"""Descriptor of the lock and occupant, by folder, in this process."""


def occupant_of(folder: Path) -> Occupant | None:
    """The occupant as which this process has locked `folder`; None if it has not."""
    entry = _locked.get(folder.resolve())
    return entry and entry[1]


@contextmanager
def occupied(folder: Path, occupant: Occupant, *, key: str = RUN) -> Iterator[None]:
    """Lock `folder`, which `key` chooses, while the block runs. Raises as `occupy`."""
    occupy(folder, occupant, key=key)
    try:
        yield
    finally:
        leave(folder)


def occupy(folder: Path, occupant: Occupant, *, key: str) -> None:
    """Lock `folder` until `leave`, or until this process ends.

    Raises ConfigError where another process has locked it, naming that one, and where the folder cannot be written.
    """
    file = folder / FILE
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(file, flags, 0o644)
        except OSError as error:
            raise ConfigError(
                "MW603", f"{folder} cannot be written ({error.strerror}); give another folder with {key}=DIR."
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = _occupant(descriptor)
            os.close(descriptor)
            raise ConfigError("MW602", _refusal(folder, other, key)) from None
        except OSError as error:
            print(
                f"warning: {folder} cannot be locked ({error.strerror}), so nothing keeps a second run out of it",
                flush=True,
            )
            os.close(descriptor)
            return
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), file.stat()):
                break
        os.close(descriptor)  # its owner has just removed it
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(asdict(occupant)).encode() + b"\n", 0)
    _locked[folder.resolve()] = descriptor, occupant


def leave(folder: Path) -> None:
    """Release `folder`, if this process has locked it."""
    entry = _locked.pop(folder.resolve(), None)
    if entry is not None:
        with suppress(OSError):
            (folder / FILE).unlink()  # before the lock is released: a later file belongs to another process
        os.close(entry[0])


def _occupant(descriptor: int) -> Occupant | None:
    """Who has locked a file, if readable."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            content: dict[str, Any] = json.loads(os.pread(descriptor, 2**16, 0))
            return Occupant(**content)
        except (OSError, ValueError, TypeError, RecursionError):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)


def _refusal(folder: Path, other: Occupant | None, key: str) -> str:
    who = "another process"
    if other is not None:
        what = "the sweep" if other.verb == "sweep" else f"`run {other.verb}`, run"
        who = f"{what} {other}, pid {other.pid} on {other.host}, still running"
    after = (
        "the same command then runs the missing jobs."
        if key == SWEEP
        else "train.resume=auto then goes on with it, and run.overwrite=true begins anew."
    )
    return f"{folder} is in use by {who}. Give another folder with {key}=DIR, or wait for its end, or stop it; {after}"


def _let_go() -> None:
    """Close the descriptors in a fork, which would otherwise keep the locks of this process."""
    for descriptor, _ in _locked.values():
        with suppress(OSError):
            os.close(descriptor)
    _locked.clear()


os.register_at_fork(after_in_child=_let_go)
