"""What a forward reads of the system it runs on: clocks, random bytes, the process and host, and files. A graph would
have what its capture read in every step and on every rank.

Most are read to measure or to report, which is no part of a graph. So what reads one is called with clocks that stand
still and with others, as another process on another host, and with files as the call before has left them, and only
results that differ matter.
"""

from __future__ import annotations

import builtins
import datetime
import io
import math
import os
import platform
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import count
from types import ModuleType
from typing import Any

from strategies.capture.nodes import in_library, replaced
from strategies.capture.python_state import users_files

CLOCKS = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
"""In Python's module `time`, each also in nanoseconds."""
BYTES = ((os, "urandom"), (random, "_urandom"))
"""Where random bytes of the operating system come from, as for `secrets`, `uuid` and `random.SystemRandom`."""
WHERE = (
    (os, "getpid"),
    (os, "getppid"),
    (threading, "get_ident"),
    (threading, "get_native_id"),
    (socket, "gethostname"),
    (platform, "node"),
)
"""Which process, thread or host it is."""
FILES = ((builtins, "open"), (io, "open"))
THROUGH = {"urandom": ("secrets.py", "uuid.py", "random.py"), "open": ("pathlib.py", "pathlib/__init__.py")}
"""Files of Python by which these are called for others."""
SOURCES = {
    "urandom": "random bytes of the system (os.urandom)",
    "open": "a file that changes (open)",
    **{name: f"the process or host that it runs in ({module.__name__}.{name})" for module, name in WHERE},
}
"""What functions read, by name, but for clocks."""
AHEAD = 1_000_000 * math.pi
"""By how much clocks are ahead [s]: no multiple of an hour, a day or what else one counts modulo."""


Date = datetime.datetime
localtime, gmtime, strftime, ctime, asctime = time.localtime, time.gmtime, time.strftime, time.ctime, time.asctime


class _OfTime(type(Date)):  # type: ignore[misc]
    """The metaclass of a stand-in for `datetime.datetime`."""

    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, Date)

    def __subclasscheck__(cls, one: type) -> bool:
        return issubclass(one, Date)

    def __call__(cls, *args: Any, **kwargs: Any) -> datetime.datetime:
        return Date(*args, **kwargs)


class _Date(Date, metaclass=_OfTime):
    """`datetime.datetime`, which reads `time.time`."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
        return Date.fromtimestamp(time.time(), tz)

    @classmethod
    def utcnow(cls) -> datetime.datetime:  # type: ignore[override]
        return Date.fromtimestamp(time.time(), datetime.UTC).replace(tzinfo=None)


def _now(seconds: float | None) -> float:
    return time.time() if seconds is None else seconds


CALENDAR: tuple[tuple[ModuleType, str, Any], ...] = (
    (time, "localtime", lambda seconds=None: localtime(_now(seconds))),
    (time, "gmtime", lambda seconds=None: gmtime(_now(seconds))),
    (time, "ctime", lambda seconds=None: ctime(_now(seconds))),
    (time, "asctime", lambda moment=None: asctime(moment or localtime(time.time()))),
    (time, "strftime", lambda form, moment=None: strftime(form, moment or localtime(time.time()))),
    (datetime, "datetime", _Date),
)
"""Functions that read a clock in C, and the same ones that read `time.time`."""


class SystemReads:
    """What files of the user's read of the system while they are `watched`, within the forward, by name: the exporter
    itself reads some of it."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.in_forward = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note reads by `time.time()` and by a name that one of the user's files has imported."""
        with _replaced(self._noted, self._noted, self._noted, self._noted):
            yield

    @property
    def what(self) -> str:
        """The noted reads."""
        clock = "the time of day or a duration (time.{})"
        return " or ".join(dict.fromkeys(SOURCES.get(name, clock.format(name)) for name in self.read))

    def _noted(self, function: Callable[..., Any], _: float = 1.0) -> Callable[..., Any]:
        name = function.__name__
        through = THROUGH.get(name, ())

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_code.co_filename.endswith((*through, __file__)):
                frame = frame.f_back
            if self.in_forward and not in_library(frame.f_code.co_filename):
                self.read.append(name)
            return function(*args, **kwargs)

        return call


@contextmanager
def controlled(seconds: float) -> Iterator[None]:
    """Clocks stand still but for `seconds` by which each goes on when it is read, and random bytes follow from
    `seconds`. If these are not 0 it is another process, for all but Python and torch."""

    def made(function: Callable[[], Any], unit: float) -> Callable[[], Any]:
        begin, step = function(), type(function())(seconds * unit)
        return (begin + number * step for number in count(1)).__next__

    def elsewhere(function: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            here = function()
            if not seconds or in_library(sys._getframe(1).f_code.co_filename):
                return here
            return f"not-{here}" if isinstance(here, str) else here + 1_000_003

        return call

    generator = random.Random(seconds)
    with _replaced(made, lambda _: generator.randbytes, elsewhere, lambda function: function):
        yield


@contextmanager
def _replaced(
    clock: Callable[[Callable[[], Any], float], Callable[[], Any]],
    bytes_: Callable[[Callable[[int], bytes]], Callable[[int], bytes]],
    where: Callable[[Callable[[], Any]], Callable[[], Any]],
    opens: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Iterator[None]:
    files = [sys.modules[file] for file in users_files([*sys.modules])]
    named = [(file, key, value) for file in files for key, value in list(vars(file).items())]
    others: list[tuple[ModuleType, str, Any]] = [*CALENDAR]
    for name in CLOCKS:
        for function, unit in ((getattr(time, name), 1.0), (getattr(time, f"{name}_ns"), 1e9)):
            others.append((time, function.__name__, clock(function, unit)))
    others += [(module, name, bytes_(os.urandom)) for module, name in BYTES]
    others += [(module, name, where(getattr(module, name))) for module, name in WHERE]
    others += [(module, name, opens(open)) for module, name in FILES]
    with ExitStack() as stack:
        for module, name, other in others:
            function = getattr(module, name)
            stack.enter_context(replaced(module, name, other))
            for file, key, value in named:
                if value is function:
                    stack.enter_context(replaced(file, key, other))
        yield
