"""The fork server: a process that imports torch once and of which every rank is a fork.

It receives commands through a socket pair, which has no name: no other process can reach the server, and no file is
left, however both end. Invariants, on Linux also for processes that are stopped (SIGSTOP):

* the server ends with its command, and a fork of it with the server;
* what a fork has started, in whatever session, ends with the last fork: orphans become children of the server.

Only if command and server are killed at the same moment can processes started by a rank survive. Before the
modules to preload, this imports nothing but small parts of the standard library.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import io
import os
import pickle
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any, NoReturn

GRACE = 0.3
"""Seconds for what a rank has started to end by itself, such as a process that removes semaphores."""
OF_THE_COMMAND = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP)
"""Signals that a terminal or a scheduler sends to a command and all around it, and that are for the command."""
_CHILD_SUBREAPER, _PARENT_DEATH = 36, 1  # of prctl, on Linux


class Descriptor:
    """A file descriptor that is sent along with a call and reaches the fork as the same open file."""

    def __init__(self, number: int) -> None:
        self.number = number

    def fileno(self) -> int:
        return self.number


KINDS: dict[str, Callable[[int], Any]] = {"Descriptor": Descriptor, "Connection": Connection}


class Pickler(pickle.Pickler):
    """Leaves open files out of the pickle; `descriptors` are theirs, in order."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.descriptors: list[int] = []

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Descriptor | Connection):
            self.descriptors.append(value.fileno())
            return type(value).__name__, len(self.descriptors) - 1
        return None


class Unpickler(pickle.Unpickler):
    """Puts the open files back."""

    def __init__(self, file: Any, descriptors: Sequence[int]) -> None:
        super().__init__(file)
        self._descriptors = descriptors

    def persistent_load(self, name: Any) -> Any:
        kind, place = name
        return KINDS[kind](self._descriptors[place])


def main(control: int, preload: Sequence[str], parent: int) -> NoReturn:
    """Serve the command, the process `parent` at the other end of the socket `control`, until that is closed."""
    if os.getpgrp() != os.getpid():
        os.setpgrp()
    for number in OF_THE_COMMAND:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, OF_THE_COMMAND)  # the command had blocked them for the time before this
    _prctl(_CHILD_SUBREAPER, 1)
    gc.disable()  # imports make a million objects that stay, and the collector would go through them again and again
    for name in preload:
        with suppress(ImportError):  # left to the rank that needs it, which then reports it
            importlib.import_module(name)
    gc.freeze()  # nor does a fork go through them, whose memory would no longer be that of the server then
    gc.enable()
    # From here on it has forks to end: one that is stopped goes on when its command has ended, and then reads so.
    tie_to_parent(signal.SIGCONT, parent)
    LaunchServer(Connection(control), parent).serve()


def tie_to_parent(number: signal.Signals, parent: int) -> None:
    """Send this process `number` when the thread that has made it ends. Ends the process if that is no longer `parent`
    already. Nothing but Linux can do it."""
    _prctl(_PARENT_DEATH, number)
    if os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class LaunchServer:
    """Forks on demand; reports to the command, through a pipe for each fork, its process id and later its exit code."""

    def __init__(self, control: Connection, parent: int) -> None:
        self._control, self._parent = control, parent
        self._forks: dict[int, Connection] = {}
        self._woken, self._wakes = socket.socketpair()
        for end in (self._woken, self._wakes):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakes.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGCONT):
            signal.signal(number, lambda number, frame: None)

    def serve(self) -> NoReturn:
        sources: list[Any] = [self._control, self._woken]
        while os.getppid() == self._parent:
            self._reap()
            ready, _, _ = select.select(sources, [], [])
            if self._woken in ready:
                with suppress(BlockingIOError):
                    self._woken.recv(4096)
            if self._control in ready:
                try:
                    call = receive(self._control)
                except (OSError, EOFError):  # the command has ended, whoever else holds its end
                    break
                self._fork(*call)
        for pid in self._forks:
            os.kill(pid, signal.SIGKILL)
        _end_descendants()
        os._exit(0)

    def _fork(self, content: bytes, descriptors: list[int]) -> None:
        """The first of the descriptors is the pipe to the command."""
        status, others = Connection(descriptors[0], readable=False), descriptors[1:]
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            pid = -(error.errno or 1)
        if pid == 0:
            tie_to_parent(signal.SIGKILL, server)
            self._become(content, status, others)
        _report(status, pid)
        for number in others:
            os.close(number)
        if pid > 0:
            self._forks[pid] = status
        else:
            status.close()

    def _become(self, content: bytes, status: Connection, descriptors: list[int]) -> NoReturn:
        """Run the fork in this process, to its end."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (*OF_THE_COMMAND, signal.SIGCHLD, signal.SIGCONT):
                signal.signal(number, signal.SIG_DFL)
            ends: list[Any] = [self._control, self._woken, self._wakes, status, *self._forks.values()]
            for end in ends:
                end.close()
            sys.argv, sys.path[:], folder, inner = pickle.loads(content)
            os.chdir(folder)
            function, arguments = Unpickler(io.BytesIO(inner), descriptors).load()
            function(*arguments)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # Without the usual exit handlers: those of libraries could wait for ranks that do not answer.
            os._exit(code)

    def _reap(self) -> None:
        """Reap children that have ended. Orphans are ended before the end of the last fork is reported."""
        for pid, status in _ended():
            if pid in self._forks:
                pipe = self._forks.pop(pid)
                if not self._forks:
                    _end_descendants()
                _report(pipe, os.waitstatus_to_exitcode(status))
                pipe.close()


def receive(control: Connection) -> tuple[bytes, list[int]]:
    """One call with its open files. Raises EOFError when the other end is closed."""
    content: tuple[bytes, int] = pickle.loads(control.recv_bytes())
    descriptors = [recv_handle(control) for _ in range(content[1])]
    for number in descriptors:
        os.set_inheritable(number, False)
    return content[0], descriptors


def send(control: Connection, call: bytes, descriptors: Sequence[int]) -> None:
    """The other side of `receive`. Raises OSError when the other end is closed."""
    control.send_bytes(pickle.dumps((call, len(descriptors))))
    for number in descriptors:
        send_handle(control, number, None)


def _report(pipe: Connection, number: int) -> None:
    with suppress(OSError):  # the receiver has ended
        pipe.send(number)


def _ended() -> Iterator[tuple[int, int]]:
    """Every child that has ended since, with its status."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended


def _end_descendants() -> None:
    """End everything that this process's forks have started: SIGTERM first, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline, signalled = time.monotonic() + GRACE, set[int]()
        while time.monotonic() < deadline:
            for _ in _ended():
                continue
            left = _descendants()
            if not left:
                return
            for pid in left - signalled:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            signalled |= left
            time.sleep(0.005)


def _descendants() -> set[int]:
    """The processes below this one; none where the system does not list them."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            _, parent, *_ = path.read_text(errors="replace", encoding="utf-8").rpartition(")")[2].split()
            children.setdefault(int(parent), []).append(int(path.parent.name))
    below: set[int] = set()
    level = [os.getpid()]
    while level:
        level = [child for pid in level for child in children.get(pid, ())]
        below.update(level)
    return below
