"""Notices of the user's code that keeps a preparation waiting: a dataset that reads all rows, a forward that hangs
while it is captured. No limit of time applies there, as models and searches may take long."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from strategies.capture.nodes import in_library, short

PATIENCE = 30.0
"""Seconds until the first notice; each further one comes after twice as many."""


def _line(frame: FrameType | None, around: str) -> str | None:
    """file:line of the innermost frame of the user's, within those of the file `around`."""
    for one, line in traceback.walk_stack(frame):
        file = one.f_code.co_filename
        if file == around:
            return None
        if not in_library(file):
            return f"{short(file)}:{line}"
    return None


@contextmanager
def noticed(say: Callable[[str], None]) -> Iterator[None]:
    """Within this context, `say` names the line of the user's that this thread runs, while it runs for long."""
    thread, ended, started = threading.get_ident(), threading.Event(), time.monotonic()
    around = sys._getframe(2).f_code.co_filename  # behind contextlib

    def watch() -> None:
        patience = PATIENCE
        while not ended.wait(patience):
            patience *= 2
            if where := _line(sys._current_frames().get(thread), around):
                say(f"preparing for {time.monotonic() - started:.0f} s; now at {where}")

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
