"""Says how far many ranks are on their way to their first phase, which may take minutes where there are few cores."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from strategies.runtime.flight_recorder import BEGUN, PHASE, PROGRESS, START, read_cells

EVERY = 10.0
"""Seconds between two lines."""
MANY = 16
"""Ranks; fewer start too soon to talk about it."""


class Starting:
    """`files` are the ranks' whereabouts, each of which appears when its process runs."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._begun = self._said = time.monotonic()
        self._over = len(files) <= MANY

    def look(self) -> None:
        """Print a line if the last one is old; nothing once a rank is past its start."""
        now = time.monotonic()
        if self._over or now < self._said + EVERY:
            return
        self._said = now
        cells = [found for found in map(read_cells, self._files) if found]
        self._over = any(one[BEGUN] or one[PROGRESS] or one[PHASE] != START for one in cells)
        if not self._over:
            print(
                f"starting: {len(cells)} of {len(self._files)} ranks run, none of them is ready; "
                f"{now - self._begun:.0f} s so far",
                flush=True,
            )
