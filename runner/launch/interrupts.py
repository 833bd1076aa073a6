"""Ctrl-C and SIGTERM while ranks run: they end the work at once, but never the clean-up after it.

Invariant: afterwards the handlers are those of before, and a signal that arrived during the clean-up still ends the
program, unless an error already does. Outside the main thread, where handlers cannot be set, nothing changes.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """SIGINT and SIGTERM raise KeyboardInterrupt inside the block; from `hold` on, they wait for its end.

    Signals that were ignored before (background jobs of a script) stay ignored.
    """

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._holding = False
        self._held = False

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
        if not self._holding:
            raise KeyboardInterrupt
        self._held = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._holding = True
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._held and error is None:
            raise KeyboardInterrupt


@contextmanager
def ignoring(number: signal.Signals) -> Iterator[None]:
    """Ignore a signal inside the block, and in every process that is started there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)
