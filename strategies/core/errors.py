"""The one exception for input that cannot be planned: its text is all that a user needs to see."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class StrategyError(Exception):
    """A model, layout, strategy or plan that cannot be carried out. The text is one paragraph: what, where, what would
    be right.
    """


class TooLarge(StrategyError):
    """No plan keeps so many bytes; the one that keeps least has `smallest`, by the search's own count."""

    def __init__(self, text: str, smallest: float) -> None:
        super().__init__(text)
        self.smallest = smallest


def closest(word: str, options: Iterable[str]) -> str:
    """A sentence that lists `options` (at most twelve) and the one nearest to `word`, or nothing if there are none."""
    known = list(dict.fromkeys(options))
    if not known:
        return ""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    guess = f" Did you mean {near[0]!r}?" if near else ""
    shown = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
    return f" Known: {shown}.{guess}"
