"""SIGINT (Ctrl-C), SIGTERM and SIGHUP: they end the work at once, but never interrupt the clean-up. Ranks that can stop
between two steps are requested to at the first signal.

Invariant: afterwards the handlers are those of before, and a signal that arrived during the clean-up still ends the
program, unless an error already does. Outside the main thread, where handlers cannot be set, nothing changes.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, ClassVar

from runner.errors import Terminated

SAME = 1.0
"""Seconds within which several signals are one, as where a key is pressed twice or a wrapper passes it on, too."""
STOPPING = b"run: stopping after the step at hand, which is saved; Ctrl-C again ends at once.\n"


class Interrupts:
    """SIGINT raises KeyboardInterrupt inside the block, SIGTERM and SIGHUP Terminated, unless it is the first signal
    and `stop`, called with its number, returns True; from `hold` on, they wait for the end of the block.

    Signals that were ignored before (background jobs of a script, nohup) stay ignored.
    """

    requested: ClassVar[int | None] = None
    """The signal at which ranks were last requested to stop; None where a signal reached a rank alone."""
    _raised: ClassVar[tuple[int, float] | None] = None
    """The last signal that has raised, and when."""
    _once_more: ClassVar[threading.Timer | None] = None
    """Python drops an exception that is raised where it removes an object, or within an import: so it is raised once
    more, unless it has arrived by then."""
    _blocks: ClassVar[int] = 0

    def __init__(self, stop: Callable[[int], bool] | None = None) -> None:
        self._stop = stop
        self.stopping = False
        self._stopped_at = 0.0
        self._before: dict[signal.Signals, Any] = {}
        self._holding = False
        self._pending: int | None = None

    def __enter__(self) -> Interrupts:
        if not Interrupts._blocks:
            Interrupts._raised, Interrupts.requested = None, None
        Interrupts._blocks += 1
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._arrived)
        return self

    def hold(self) -> None:
        """Remember signals from here on instead of raising."""
        self._holding = True

    @staticmethod
    def again() -> None:
        """Raise the signal's exception again, in case a library has converted it."""
        if Interrupts._raised is not None:
            raise error_of(Interrupts._raised[0])

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._holding:
            self._pending = number
        elif self._raised is not None and now < self._raised[1] + SAME:
            return  # the exception is on its way
        elif self._stop is not None and not self.stopping and self._stop(number):
            self.stopping, self._stopped_at, Interrupts.requested = True, now, number
            if number == signal.SIGINT:
                with suppress(OSError):
                    os.write(2, STOPPING)  # print is not reentrant
        elif self.stopping and (number == signal.SIGHUP or now < self._stopped_at + SAME):
            return  # the ranks stop already
        else:
            Interrupts._raised = number, now
            Interrupts._once_more = threading.Timer(1.1 * SAME, _raise_in_main_thread, (number,))
            Interrupts._once_more.daemon = True
            Interrupts._once_more.start()
            raise error_of(number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._holding = True
        Interrupts._blocks -= 1
        if isinstance(error, KeyboardInterrupt) and Interrupts._once_more is not None:
            Interrupts._once_more.cancel()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._pending is not None and error is None:
            raise error_of(self._pending)


def _raise_in_main_thread(number: int) -> None:
    main = threading.main_thread().ident
    if main is not None:
        signal.pthread_kill(main, number)


def error_of(number: int) -> KeyboardInterrupt:
    """The exception for signal `number`."""
    return KeyboardInterrupt() if number == signal.SIGINT else Terminated(number)
