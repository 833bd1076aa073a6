"""The exceptions for input that cannot be carried out.

Each has a text that is all that a user needs to see, and a code that names the kind of refusal. `run explain CODE`
prints what a code means.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TypeVar

E = TypeVar("E", bound="CodedError")


class CodedError(Exception):
    """An error that ends a command with its text and code instead of a traceback.

    Args:
        code: the kind of error, such as `MW204`; all of them stand in `runner/refusals.yaml`.
        text: one paragraph: the fault, the place, and a remedy.
        more: further paragraphs.
    """

    def __init__(self, code: str, text: str, *more: str) -> None:
        super().__init__(code, text, *more)
        self.paragraphs = (text, *more)
        self.codes = (code,) * len(self.paragraphs)

    @classmethod
    def of(cls: type[E], faults: Iterable[tuple[str, str]]) -> E:
        """One error from several pairs of a code and a paragraph."""
        codes, paragraphs = zip(*faults, strict=True)
        error = cls(codes[0], *paragraphs)
        error.codes = codes
        return error

    @property
    def code(self) -> str:
        """The code of the first paragraph."""
        return self.codes[0]

    @property
    def marked(self) -> tuple[str, ...]:
        """The paragraphs as a console shows them, with the code at the end of their first lines."""
        return tuple(
            "\n".join([f"{first} [{code}]", *rest])
            for code, (first, *rest) in zip(self.codes, (p.split("\n") for p in self.paragraphs), strict=True)
        )

    def __str__(self) -> str:
        return "\n".join(self.paragraphs)


class StrategyError(CodedError):
    """A model, layout, strategy or plan that cannot be carried out."""


class TooLarge(StrategyError):
    """No plan fits into the memory limit; the smallest needs `smallest` bytes, by the search's memory estimate."""

    def __init__(self, code: str, text: str, smallest: float) -> None:
        super().__init__(code, text)
        self.smallest = smallest


def closest(word: str, options: Iterable[str]) -> str:
    """A sentence that lists `options` (at most twelve) and those within `word`, or else the one nearest to it; nothing
    if there are no options."""
    known = list(dict.fromkeys(options))
    if not known:
        return ""
    within = [one for one in known if one.startswith(f"{word}.")]
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    guess = f" {word} has {', '.join(within[:4])}." if within else f" Did you mean {near[0]!r}?" if near else ""
    shown = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
    return f" Known: {shown}.{guess}"
