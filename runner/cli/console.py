"""The streams of the command, prepared so that printing cannot end it."""

from __future__ import annotations

import io
import os
import sys


def prepare() -> None:
    """Redirect closed streams (`>&-`) to os.devnull, or the next files opened would take their descriptors and receive
    the output; characters that the terminal cannot encode are escaped."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it has the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(paragraph: str) -> None:
    """Print to stderr, unless it is closed."""
    try:
        print(f"run: {paragraph}", file=sys.stderr, flush=True)
    except OSError:  # the terminal is closed
        drop(2)


def drop(number: int) -> None:
    """Discard writes to the descriptor, or the interpreter would fail at shutdown."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)
