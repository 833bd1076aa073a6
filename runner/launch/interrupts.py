"""Ctrl-C and SIGTERM while ranks run: they end the work at once, but never the clean-up after it. Ranks that can stop
between two steps are told to at the first SIGTERM.

Invariant: afterwards the handlers are those of before, and a signal that arrived during the clean-up still ends the
program, unless an error already does. Outside the main thread, where handlers cannot be set, nothing changes.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from runner.errors import Terminated


class Interrupts:
    """SIGINT raises KeyboardInterrupt inside the block and SIGTERM Terminated, unless it is the first one and there is
    `stop` to call; from `hold` on, they wait for its end.

    Signals that were ignored before (background jobs of a script) stay ignored.
    """

    def __init__(self, stop: Callable[[], None] | None = None) -> None:
        self._stop = stop
        self.stopping = False
        self._before: dict[signal.Signals, Any] = {}
        self._holding = False
        self._held: int | None = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._arrived)
        return self

    def hold(self) -> None:
        """From here on, remember a signal instead of raising."""
        self._holding = True

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self._holding:
            self._held = number
        elif number == signal.SIGTERM and self._stop is not None and not self.stopping:
            self.stopping = True
            self._stop()
        else:
            raise _kind(number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._holding = True
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._held is not None and error is None:
            raise _kind(self._held)


def _kind(number: int) -> type[KeyboardInterrupt]:
    return Terminated if number == signal.SIGTERM else KeyboardInterrupt
