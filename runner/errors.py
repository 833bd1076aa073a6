"""The errors that end a run with a message instead of a traceback.

Invariant: the text of these exceptions is all that the user needs to see. It names the fault, the place, and a
remedy; a code names its kind. `ConfigError` ends the command with exit code 2, `RunFailed` with 1, `Stopped` with
128 + its signal. No library is imported here, so parents, ranks and readers of data files can all raise them.
"""

from __future__ import annotations

import difflib
import signal
import textwrap
from collections.abc import Iterable

from strategies.core.errors import CodedError


class ConfigError(CodedError):
    """A command or config that cannot run."""


class InputError(CodedError, ValueError):
    """Input that a rank finds to be wrong only during training. The run has failed, and keeps its output files."""


class RunFailed(CodedError):
    """A run that started and could not end well: a rank raised, was killed, or hung. The text names the rank and the
    place; `rank` is that rank, `hosts` the hosts that no longer answer."""

    def __init__(self, code: str, text: str, *, rank: int | None = None, hosts: tuple[str, ...] = ()) -> None:
        super().__init__(code, text)
        self.rank, self.hosts = rank, hosts


def text_of(error: BaseException) -> str:
    """The text of any exception, of which a user's own may fail to give one."""
    try:
        return str(error)
    except Exception as own:
        return f"its text cannot be shown ({type(own).__name__})"


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP (`number`) arrived, and no orderly stop was possible."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(number)
        self.number = number


class Stopped(Exception):
    """A run that the signal `number` has stopped between two steps. The text says after which; with `saved` the command
    prints how to continue."""

    def __init__(self, text: str, number: int = signal.SIGTERM, *, saved: bool = False) -> None:
        super().__init__(text)
        self.number, self.saved = number, saved


LISTED = 400
"""Characters that a list of options takes at most."""


def allowed(value: str, options: Iterable[str]) -> str:
    """The end of an error paragraph: ` Allowed: a, b. Did you mean 'a'?`; empty without `options`, of which a long list
    is cut."""
    options = list(options)
    if not options:
        return ""
    prefixes = [o for o in options if len(o) > 2 < len(value) and (value.startswith(o) or o.startswith(value))]
    close = [max(prefixes, key=len)] if prefixes else difflib.get_close_matches(value, options, n=1, cutoff=0.6)
    shown = textwrap.shorten(f"{', '.join(options)}.", LISTED, placeholder=" ...")
    return f" Allowed: {shown}" + (f" Did you mean {close[0]!r}?" if close else "")
