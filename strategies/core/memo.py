"""What follows from an object that never changes, made once and kept with it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any, TypeVar

T = TypeVar("T")


class Memo:
    """The base of such objects. A changed copy (`dataclasses.replace`) begins with nothing."""

    @cached_property
    def _made(self) -> dict[Hashable, Any]:
        return {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns; made for the first that asks, and kept for others."""
        if key not in self._made:
            self._made[key] = make()
        found: T = self._made[key]
        return found
