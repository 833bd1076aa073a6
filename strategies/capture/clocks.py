"""Clocks that a forward reads: a graph would have the time of its capture in every step.

Most are read to measure or to report, which is no part of a graph. So what reads one is called with clocks that stand
still and with others, and only results that differ matter.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import count
from typing import Any

from strategies.capture.nodes import in_library, replaced
from strategies.capture.python_state import users_files

CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
"""In Python's module `time`, each also in nanoseconds."""
AHEAD = 1_000_000 * math.pi
"""By how much clocks are ahead [s]: no multiple of an hour, a day or what else one counts modulo."""


class Clocks:
    """Clocks that files of the user's read while they are `watched`, by name."""

    def __init__(self) -> None:
        self.read: list[str] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note what is read, by `time.time()` and by a name that one of the user's files has imported."""
        with _replaced(self._noted):
            yield

    def _noted(self, function: Callable[[], Any], _: float) -> Callable[[], Any]:
        @wraps(function)
        def call() -> Any:
            if not in_library(sys._getframe(1).f_code.co_filename):
                self.read.append(function.__name__)
            return function()

        return call


@contextmanager
def advancing(seconds: float) -> Iterator[None]:
    """Clocks stand still but for `seconds` by which each goes on when it is read."""

    def made(function: Callable[[], Any], unit: float) -> Callable[[], Any]:
        begin, step = function(), type(function())(seconds * unit)
        return (begin + number * step for number in count(1)).__next__

    with _replaced(made):
        yield


@contextmanager
def _replaced(made: Callable[[Callable[[], Any], float], Callable[[], Any]]) -> Iterator[None]:
    files = [sys.modules[file] for file in users_files([*sys.modules])]
    named = [(file, key, value) for file in files for key, value in list(vars(file).items())]
    with ExitStack() as stack:
        for name in CLOCKS:
            for function, unit in ((getattr(time, name), 1.0), (getattr(time, f"{name}_ns"), 1e9)):
                other = made(function, unit)
                stack.enter_context(replaced(time, function.__name__, other))
                for file, key, value in named:
                    if value is function:
                        stack.enter_context(replaced(file, key, other))
        yield
