"""How far a decision is, where it takes long."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from strategies.search.joint import Choice

EVERY = 5.0
"""Seconds between lines of progress."""


@dataclass
class Progress:
    """Tells every few seconds how many of the `choices` have been `looked` at."""

    say: Callable[[str], None]
    choices: int
    looked: int = 0
    told: float = field(default_factory=time.monotonic)

    def tell(self, choice: Choice) -> None:
        """`choice` is the one that is looked at."""
        if time.monotonic() - self.told > EVERY:
            self.say(f"deciding: {self.looked} of {self.choices} choices looked at; now {choice}")
            self.told = time.monotonic()
