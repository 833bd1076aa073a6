"""The streams of the command, prepared so that printing cannot end it."""

from __future__ import annotations

import io
import os
import sys


def prepare() -> None:
    """Give streams that are closed (`>&-`) to os.devnull, else the next files took their numbers and what is printed;
    what a terminal's encoding lacks is shown as an escape."""
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
    """Print to stderr, where there is somebody to read it."""
    try:
        print(f"run: {paragraph}", file=sys.stderr, flush=True)
    except OSError:  # the terminal has gone
        drop(2)


def drop(number: int) -> None:
    """Let what is written to the descriptor vanish; else the interpreter fails at its own end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)
