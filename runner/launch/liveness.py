"""Whether a process makes progress, according to the operating system. The process is not involved, so a stopped one is
detected too.

Signs of life are CPU time, bytes read and written, and waiting for a disk. Without /proc every process counts as alive.
Time is that in which the process that looks runs: a job that is suspended and continued has lost none.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

QUIET = 30.0
"""Seconds beyond the timeout that a process may show no sign of life: a device or a server may keep it waiting."""
BUSY, FLOW = 0.02, 16384
"""The share of a processor that counts as computing, and bytes per second that count as reading or writing; threads
that only look at something now and then, and answer each other, need less."""

LOOK = 3.0
"""Seconds that the time between two looks counts at most: beyond, the one who looks was suspended, too."""


class RunningTime:
    """Seconds in which this process was running, by how often it looks."""

    def __init__(self) -> None:
        self._at = self.now = time.monotonic()

    def look(self) -> float:
        """The seconds until now, since any time; called every second or so."""
        at = time.monotonic()
        self.now += min(at - self._at, LOOK)
        self._at = at
        return self.now


class Signs:
    """The signs of life of process `pid` and, with `children`, of those that it started. `computing` says whether CPU
    time counts: on a GPU a rank may spin while it waits."""

    def __init__(self, pid: int, *, children: bool = True, computing: bool = True) -> None:
        self.pid, self._children, self._computing = pid, children, computing
        self._clock = RunningTime()
        self._at = self.since = self._clock.now
        self._seconds, self._bytes, _ = self._read()
        self.stopped: float | None = None
        """Since when the process is stopped (SIGSTOP, a debugger); None where it is not."""

    def look(self) -> None:
        """Record activity since the last call; `since` is the running time of the last sign of life."""
        now = self._clock.look()
        seconds, bytes_, states = self._read()
        computed = self._computing and seconds - self._seconds > BUSY * (now - self._at)
        if computed or bytes_ - self._bytes > FLOW * (now - self._at) or "D" in states or not states:
            self.since = now
        self._at, self._seconds, self._bytes = now, seconds, bytes_
        if states[:1] not in ("T", "t"):
            self.stopped = None
        elif self.stopped is None:
            self.stopped = now

    def halted(self, timeout: float) -> bool:
        """Whether the process has been stopped for more than `timeout` seconds."""
        return self.stopped is not None and self._clock.now - self.stopped > timeout

    def lost(self, timeout: float) -> bool:
        """Whether it has been stopped for so long, or silent for much longer."""
        return self.halted(timeout) or self._clock.now - self.since > timeout + QUIET

    def _read(self) -> tuple[float, int, str]:
        """CPU seconds, bytes read and written, and the states of the threads, the main thread's first."""
        seconds, bytes_, states = 0.0, 0, ""
        for pid in _family(self.pid) if self._children else (self.pid,):
            process = Path(f"/proc/{pid}")
            try:
                fields = _fields(process)
                states += fields[0] + "".join(_fields(thread)[0] for thread in (process / "task").iterdir())
                seconds += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # also of children that have ended
                io = dict(line.split(": ") for line in (process / "io").read_text(encoding="utf-8").splitlines())
                bytes_ += int(io["rchar"]) + int(io["wchar"])
            except OSError:
                continue  # it has ended, or there is no such file
        return seconds, bytes_, states


def forks_of(pid: int) -> list[int]:
    """The children of a process that run its own program, such as data workers: they have its signal handlers."""

    def program(one: int) -> bytes:
        try:
            return Path(f"/proc/{one}/cmdline").read_bytes()
        except OSError:  # it has ended
            return b""

    own = program(pid)
    return [child for child in _children(pid) if own and program(child) == own]


def _family(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    yield pid
    for child in _children(pid):
        yield from _family(child)


def _children(pid: int) -> Iterator[int]:
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return  # it has ended
    for thread in threads:
        with suppress(OSError):
            yield from map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text(encoding="utf-8").split())


def _fields(process: Path) -> list[str]:
    """The entries of its `stat` from the state on; the name before may hold anything."""
    return (process / "stat").read_text(encoding="latin-1").rpartition(")")[2].split()
