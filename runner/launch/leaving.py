"""What a rank does before it ends because another one is down: it saves its memory (`launch.rescue`).

The command asks for it, since a rank may wait where no error reaches it: in the start of a process group, or for a file
that nobody writes any more. So the thread that hears the command does it, whatever the rank waits for meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

NOTHING = "rescue: nothing is saved: "
"""How a rank begins the line in its log that says why."""

_action: Callable[[], None] | None = None


@contextmanager
def saving(action: Callable[[], None]) -> Iterator[None]:
    """Inside of the block `action` saves what would be lost. It returns at once where that has been done."""
    global _action
    _action = action
    try:
        yield
    finally:
        _action = None


def leave() -> None:
    """Save it, if there is anything."""
    if (action := _action) is not None:
        action()
