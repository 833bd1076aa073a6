"""How much room a search is given so that a rank keeps a limit, by regula falsi: the search adds up all that is stored,
views twice and stages together, and a rank needs the most of any moment, which is traced. The two rise together, but
not by the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

CLOSE = 0.97
"""Of the limit: a plan that needs so much is not looked for between it and a larger one."""
FLATTEST, USUAL = 0.25, 0.65
"""Of the bytes that a search saves, what a rank saves: at least, less is taken for chance; and before plans have told
it (a 7B llama on 8 devices: 0.48 to 0.68)."""


@dataclass
class Rooms:
    """For plans of one kind on one graph. `most` are the bytes of a rank that a byte of the search stands for at most;
    `slope` is what plans have told."""

    limit: int
    most: float
    slope: float = field(init=False)

    def __post_init__(self) -> None:
        self.slope = USUAL * self.most

    def next(self, seen: Sequence[tuple[float, int]]) -> int | None:
        """The bytes that the next plan may have by the search's own count, after plans with so many by that count, and
        by that of a rank; None where what was found is near the limit, or nothing is left to give."""
        large = min((one for one in seen if one[1] > self.limit), default=None)
        small = max((one for one in seen if one[1] <= self.limit), default=None)
        if large is None or (small is not None and small[1] >= CLOSE * self.limit):
            return None
        if small is not None:
            share = (self.limit - small[1]) / (large[1] - small[1])
            return int(small[0] + share * (large[0] - small[0]))
        if len(seen) > 1:
            first = max(seen)
            slope = (first[1] - large[1]) / (first[0] - large[0])
            self.slope = min(max(slope, FLATTEST * self.most), self.most)
        room = int(large[0] - (large[1] - self.limit) / self.slope)
        return room if room > 0 else None
