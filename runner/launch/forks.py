"""The client of the fork server: `warm` starts it, `fork` makes it create processes.

Importing torch costs a second or more per process; the server does it once, in the background while the command reads
its config, and every fork of it is ready within moments.
"""

from __future__ import annotations

import atexit
import io
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from runner.errors import RunFailed
from runner.launch import failure
from runner.launch.liveness import Signs
from runner.launch.server import OF_THE_COMMAND, Pickler, send
from runner.packages import ROOT

PRELOAD: tuple[str, ...] = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.export._trace",
    "runner.launch.worker",
    "runner.commands.entries",
)
"""What every rank imports; the fork server imports it once for all of them."""
SERVER_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",  # else numpy starts threads at import, and threads do not survive a fork
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # a library that asks at import whether there is a GPU must not open it
}
_MAIN = """\
import os, sys
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, {killed}, 0, 0, 0)
if os.getppid() != {parent}:
    sys.exit()
sys.path.insert(0, {root!r})
import runner  # ours: it decides what the names of our packages mean, whatever the user's folders are called
sys.path[:] = {path!r}
from runner.launch.server import main
main({control}, {preload!r}, {parent})
"""
"""What the server runs. Until it has done its imports, which may take long, it is killed with its command (prctl's
PR_SET_PDEATHSIG): it has no forks to end."""
LOOK = 1.0
"""Seconds between two looks at a server that does not answer."""
END = 2.0
"""Seconds for a server to end what its forks have started."""
LOST = 255
"""The exit code of a fork of which nothing is known, because the server has ended before it."""


class ForkServer:
    """A running fork server. `pid` is its process id; `owner` is the process that has started it."""

    def __init__(self, preload: Sequence[str]) -> None:
        self.owner = os.getpid()
        self.control, far = Pipe()
        # Behind everything else, and the server is in another folder: a user's json.py is not taken for the library's.
        here = os.getcwd()
        path = [*(folder for folder in sys.path if folder not in ("", here)), here]
        code = _MAIN.format(
            root=str(ROOT),
            path=path,
            control=far.fileno(),
            preload=tuple(preload),
            parent=self.owner,
            killed=int(signal.SIGKILL),
        )
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        # Ctrl-C is for this process alone: the server has signals blocked until it ignores them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, OF_THE_COMMAND)
        try:
            self.process = subprocess.Popen(
                [sys.executable, *flags, "-c", code],
                stdin=subprocess.DEVNULL,
                env=os.environ | SERVER_ENVIRONMENT,
                cwd="/",
                pass_fds=[far.fileno()],
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            far.close()
        self.pid = self.process.pid
        self.used = False
        """Whether it has made a fork, and so is done with its imports."""

    @property
    def alive(self) -> bool:
        """Whether this process can still use it."""
        return self.owner == os.getpid() and self.process.poll() is None

    @property
    def ending(self) -> str:
        """How it has ended, such as "was killed by SIGKILL"; empty while it is alive."""
        code = self.process.poll()
        if code is None:
            return ""
        return failure.killed_by(-code) if code < 0 else f"ended with exit code {code}"

    def wake(self) -> None:
        """Resume it if it was stopped (SIGSTOP): only it knows the exit codes of its forks."""
        if self.alive:
            os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """Terminate it: at once if it may still be importing, else after it has cleaned up after its forks."""
        self.wake()
        self.control.close()
        if self.owner == os.getpid():
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(END if self.used else 0)
            self.process.kill()
            self.process.wait()


server: ForkServer | None = None
"""That of this process, since `warm` was called."""


def warm(preload: Sequence[str] = PRELOAD) -> ForkServer:
    """The fork server, which imports `preload` in the background; it is started unless it is running. Returns at once.

    Call it early. Modules that start threads or open a GPU must not be named: every rank is a fork of that process. A
    module that cannot be found is left to the rank that needs it, which then reports it.
    """
    global server
    if server is None or not server.alive:
        if server is not None:
            atexit.unregister(server.end)
            server.control.close()
        server = ForkServer(preload)
        atexit.register(server.end)
    return server


class Fork:
    """A process that `server` has made. `sentinel` becomes readable when it ends."""

    def __init__(self, pid: int, sentinel: Connection, server: ForkServer) -> None:
        self.pid, self.sentinel, self._server = pid, sentinel, server
        self._code: int | None = None

    @property
    def exitcode(self) -> int | None:
        """None while it lives; the negative number of a signal that has ended it; LOST where the server has ended."""
        self.join(0)
        return self._code

    def join(self, seconds: float | None = None) -> None:
        """Wait until it has ended, `seconds` at most."""
        if self._code is None and self.sentinel.poll(seconds):
            code = _number(self.sentinel)
            if code is None:  # the files of a process are closed before its end can be seen
                with suppress(subprocess.TimeoutExpired):
                    self._server.process.wait(END)
            self._code = LOST if code is None else code
            self.sentinel.close()


def fork(function: Callable[..., object], arguments: tuple[Any, ...], name: str, timeout: float) -> Fork:
    """A new process of the server that calls `function`; open files in `arguments` (Descriptor, Connection) go along.

    Raises RunFailed if the server has ended or been stopped for `timeout` seconds, or the system cannot start more
    processes.
    """
    content = io.BytesIO()
    pickler = Pickler(content)
    pickler.dump((function, arguments))
    call = pickle.dumps((sys.argv, sys.path, os.getcwd(), content.getvalue()))
    sentinel, status = Pipe(duplex=False)
    running, hung, pid = warm(), False, None
    with suppress(OSError):
        try:
            send(running.control, call, [status.fileno(), *pickler.descriptors])
        finally:
            status.close()
        signs = Signs(running.pid, children=False)
        while not sentinel.poll(LOOK):  # it may still import
            signs.look()
            if signs.lost(timeout):
                hung = True
                os.kill(running.pid, signal.SIGKILL)
        pid = _number(sentinel)
    if pid is not None and pid > 0:
        running.used = True
        return Fork(pid, sentinel, running)
    sentinel.close()
    if pid is not None:
        raise RunFailed(
            "MW715", f"{name} could not be started: the system makes no more processes ({os.strerror(-pid)})."
        )
    with suppress(subprocess.TimeoutExpired):
        running.process.wait(END)
    if hung:
        raise RunFailed(
            "MW715", f"the fork server hung: it was to start {name}, and showed no sign of life for {timeout:g} s."
        )
    raise RunFailed(
        "MW715",
        f"the fork server {running.ending or 'ended'} before it had started {name}, which it does after it has "
        f"imported {', '.join(PRELOAD)}. Its last words, if it had any, are above.",
    )


def server_ending() -> str:
    """How the server of this process has ended, of which all forks are then lost; nothing where it is alive."""
    return "" if server is None else server.ending


def _number(pipe: Connection) -> int | None:
    """The next number from the server, None where it has ended."""
    try:
        number: int = pipe.recv()
    except (EOFError, OSError):
        return None
    return number
