"""Output of a rank: all of it goes to its log file, rank 0's stdout also to the console.

The log is attached to the file descriptors 1 and 2, so that output of libraries and of crash handlers arrives too. The
console is a second stream beside it: progress bars use it alone (`console()`), and a closed console (a closed terminal,
`run | head`) ends neither the log nor the run.
"""

from __future__ import annotations

import io
import locale
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO, cast


class Echo(io.TextIOBase):
    """A text stream that writes to a log and to a console."""

    def __init__(self, log: TextIO, console: TextIO) -> None:
        self.log = log
        self.console: TextIO | None = console

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.log.write(text)
        self._show(lambda console: console.write(text))
        return len(text)

    def flush(self) -> None:
        self.log.flush()
        self._show(lambda console: console.flush())

    def close(self) -> None:
        self.flush()

    def isatty(self) -> bool:
        return self.console is not None and self.console.isatty()

    def fileno(self) -> int:
        """The descriptor of the log: child processes of a rank write there."""
        return self.log.fileno()

    def _show(self, action: Callable[[TextIO], object]) -> None:
        if self.console is not None:
            try:
                action(self.console)
            except OSError as error:  # it is closed, but the result of the run may still be wanted
                self.console = None
                self.log.write(f"The console is closed ({error.strerror}); output goes on in this log only.\n")


class Droppable(io.TextIOBase):
    """A console that may be closed: output is dropped from then on, with the process's file descriptor of it."""

    def __init__(self, console: TextIO) -> None:
        self.console = console

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._do(lambda: self.console.write(text))
        return len(text)

    def flush(self) -> None:
        self._do(self.console.flush)

    def close(self) -> None:
        self.flush()

    def isatty(self) -> bool:
        return self.console.isatty()

    def fileno(self) -> int:
        return self.console.fileno()

    def _do(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.console.fileno())


@contextmanager
def console_may_close() -> Iterator[None]:
    """Inside of the block a closed console (a closed terminal, `run | head`) ends nothing."""
    console = sys.stdout
    sys.stdout = cast(TextIO, Droppable(console))
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout = console


def keep_open(*streams: TextIO) -> None:
    """Let `close` flush alone: a user's module that closes stdout or stderr would take them from all others."""
    for stream in streams:
        stream.close = stream.flush  # type: ignore[method-assign]


def attach(log: Path, console: int | None) -> None:
    """Send everything this process prints to the end of `log`, and with a `console` descriptor stdout there as well."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout, sys.stderr = (
        open(number, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False) for number in (1, 2)
    )
    keep_open(sys.stdout, sys.stderr)
    if console is not None:
        encoding = locale.getpreferredencoding(False)
        screen = open(console, "w", buffering=1, encoding=encoding, errors="replace")
        sys.stdout = cast(TextIO, Echo(sys.stdout, screen))


def console() -> TextIO:
    """The stream that reaches the terminal but not the log; stdout if there is none."""
    stdout: object = sys.stdout
    if isinstance(stdout, Echo) and stdout.console is not None:
        return stdout.console
    return sys.stdout


def note(line: str) -> None:
    """Write a line to the log of this rank alone."""
    stdout: object = sys.stdout
    print(line, file=stdout.log if isinstance(stdout, Echo) else sys.stdout, flush=True)


def read_since(log: Path, offset: int) -> str:
    """The text of `log` after `offset` bytes, at most the last 64 KiB of it; empty where there is no log."""
    try:
        with log.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(offset, end - 65536))
            return file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
