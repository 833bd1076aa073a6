"""A scale of a picture: values -> pixels."""

from __future__ import annotations

import math
from collections.abc import Collection

WIDTH, HEIGHT, LEFT, BELOW = 900, 320, 70, 24
"""Of the pictures, in pixels."""
DECADES = 1.5
"""Values that span more have a logarithmic scale."""


class Scale:
    """The pixels from `begin` to `end` of all that is between the least and the largest of `values`."""

    def __init__(self, values: Collection[float], begin: float, end: float, *, linear: bool = False) -> None:
        self.low, self.high = min(values), max(values)
        self.begin, self.end = begin, end
        self.logarithmic = not linear and self.low > 0 and math.log10(self.high / self.low) > DECADES

    def __call__(self, value: float) -> float:
        at, low, high = (math.log(one) if self.logarithmic else one for one in (value, self.low, self.high))
        return round(self.begin + (at - low) / ((high - low) or 1) * (self.end - self.begin), 1)

    @property
    def ticks(self) -> list[float]:
        """The least, the middle and the largest value."""
        middle = math.sqrt(self.low * self.high) if self.logarithmic else (self.low + self.high) / 2
        return sorted({self.low, middle, self.high})
