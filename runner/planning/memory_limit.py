"""How a plan is made to keep the memory of a rank: by a search for less memory, and by recomputing layers.

The search sums all stored bytes; a rank needs the peak over time, which requires a trace of its program. So plans are
traced, and where one exceeds the limit either less memory is allowed to the search (`SearchBudget`) or layers are
recomputed (`RecomputeSelection`). The peak is nearly affine in what either saves, so both are found by regula falsi, in
few traces.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["full", "selective"]
MODES: tuple[Mode, ...] = ("full", "selective")
CLOSE = 0.97
"""Between a plan that needs so much of the limit, or of a larger plan's bytes, and that plan no other is searched."""
FLATTEST, USUAL = 0.25, 0.65
"""What a rank saves of a byte that the search saves: the least that is believed, and before any plan has shown it (a 7B
llama on 8 devices: 0.48 to 0.68)."""
SURE = 0.9
"""What recompute must save at least, of what interpolation between none and all of it says (a 7B llama: 0.93)."""


@dataclass
class SearchBudget:
    """Bytes that the next search may use so that a rank keeps `limit`, for plans of one kind on one graph.

    Attributes:
        limit: bytes of a rank.
        most: bytes of a rank per byte of the search, at most.
        slope: the same, as plans have shown it.
    """

    limit: int
    most: float
    slope: float = field(init=False)

    def __post_init__(self) -> None:
        self.slope = USUAL * self.most

    def next(self, seen: Sequence[tuple[float, int]]) -> int | None:
        """The budget of the next search; None where a plan is near the limit, or no budget is left.

        Args:
            seen: bytes of every plan so far, in the search's memory model and traced.
        """
        large = min((one for one in seen if one[1] > self.limit), default=None)
        small = max((one for one in seen if one[1] <= self.limit), default=None)
        if large is None or (small is not None and (small[1] >= CLOSE * self.limit or small[0] >= CLOSE * large[0])):
            return None
        if small is not None:
            share = (self.limit - small[1]) / (large[1] - small[1])
            return int(small[0] + share * (large[0] - small[0]))
        first = max(seen)
        if first[0] > large[0]:
            slope = (first[1] - large[1]) / (first[0] - large[0])
            self.slope = min(max(slope, FLATTEST * self.most), self.most)
        budget = int(large[0] - (large[1] - self.limit) / self.slope)
        return budget if budget > 0 else None


@dataclass(frozen=True)
class RecomputedLayers:
    """The layers that are recomputed, by mode, the extra seconds of a step, and the bytes that are stored less."""

    seconds: float
    saves: float
    paths: Mapping[Mode, tuple[str, ...]]


def pareto_front(layers: Mapping[str, Mapping[Mode, tuple[float, float]]]) -> list[RecomputedLayers]:
    """The best choices of recompute for `layers`: a knapsack, solved exactly.

    Of layers that cost and save the same the first ones are recomputed, in full before selectively: their second run
    comes when the tensors of later ones are freed.

    Args:
        layers: extra seconds and saved bytes of each, by mode.

    Returns:
        What no other beats in both time and bytes, by rising time, from no layer to all in full.
    """
    kinds: dict[tuple[tuple[Mode, tuple[float, float]], ...], list[str]] = {}
    for path, by_mode in layers.items():
        kinds.setdefault(tuple(by_mode.items()), []).append(path)
    front = [RecomputedLayers(0.0, 0.0, dict.fromkeys(MODES, ()))]
    for kind, paths in kinds.items():
        options, count = dict(kind), len(paths)
        (full_seconds, full_saves), (seconds, saves) = options["full"], options.get("selective", (0.0, 0.0))
        own = _undominated(
            RecomputedLayers(
                full * full_seconds + few * seconds,
                full * full_saves + few * saves,
                {"full": tuple(paths[:full]), "selective": tuple(paths[full : full + few])},
            )
            for full in range(count + 1)
            for few in range(count - full + 1 if "selective" in options else 1)
        )
        front = _undominated(
            RecomputedLayers(a.seconds + b.seconds, a.saves + b.saves, {m: (*a.paths[m], *b.paths[m]) for m in MODES})
            for a in front
            for b in own
        )
    return front


def _undominated(every: Iterable[RecomputedLayers]) -> list[RecomputedLayers]:
    front: list[RecomputedLayers] = []
    for one in sorted(every, key=lambda one: (one.seconds, -one.saves)):
        if not front or one.saves > front[-1].saves:
            front.append(one)
    return front


@dataclass
class _GroupSelection:
    """The position on its `front` of a group of ranks: at `low` it recomputes too little, at the bytes `above`, at
    `high` enough, at the bytes `below`; `measured` says that `above` was traced."""

    limit: int
    front: Sequence[RecomputedLayers]
    above: int
    below: int
    measured: bool

    def __post_init__(self) -> None:
        enough = self.above <= self.limit
        self.low = 0 if self.measured and not enough else -1
        self.high = 0 if enough else len(self.front) - 1

    @property
    def guess(self) -> int:
        return self.at(1.0)

    @property
    def least(self) -> int:
        """About the bytes that are recomputed in any case."""
        return max(self.at(SURE) - 1, 0)

    def at(self, share: float) -> int:
        """The position that saves a `share` of the wanted bytes by interpolation."""
        if self.high - self.low <= 1:
            return self.high
        first, last = self.front[max(self.low, 0)].saves, self.front[self.high].saves
        wanted = first + share * (last - first) * (self.above - self.limit) / (self.above - self.below)
        guess = bisect_left(self.front, wanted, key=lambda one: one.saves)
        return min(max(guess, self.low + 1), self.high - 1)

    def update(self, position: int, size: int) -> None:
        if size > self.limit:
            if position >= self.high:  # other groups recompute less, of which a layer was this group's too
                self.high = len(self.front) - 1
            self.low, self.above = position, size
        elif position < self.high:
            if position > 0:
                before, own, last = (self.front[at].saves for at in (position - 1, position, self.high))
                if size + (size - self.below) * (own - before) / (last - own) > self.limit:
                    self.low = position - 1
            self.high, self.below = position, size


class RecomputeSelection:
    """The layers to recompute so that every group of ranks keeps its limit at the least extra time.

    Each group has its own front, since groups of a pipeline keep different numbers of micro-batches; all are tried
    together.
    """

    def __init__(
        self,
        limits: Sequence[int],
        fronts: Iterable[Sequence[RecomputedLayers]],
        none: Sequence[int],
        every: Sequence[int],
        *,
        measured: bool,
    ) -> None:
        """Args:
        limits: bytes of a rank, by group.
        fronts: what may be recomputed, by group, as `pareto_front` returns it.
        none: bytes of every group that recomputes nothing.
        every: bytes of every group that recomputes the last of its front.
        measured: whether `none` was traced, not estimated.
        """
        self.groups = [_GroupSelection(*one, measured) for one in zip(limits, fronts, none, every, strict=True)]
        self.tried: list[int] = []

    @property
    def lower_bound(self) -> dict[str, Mode]:
        """About the least that is recomputed in any case: the mode of every layer, by path."""
        return self._layers([group.least for group in self.groups])

    def next(self) -> dict[str, Mode] | None:
        """The mode of every layer to try; None where the last ones are the best, or all are too few."""
        positions = [group.guess for group in self.groups]
        if positions == self.tried:
            return None
        self.tried = positions
        return self._layers(positions)

    def update(self, sizes: Sequence[int]) -> bool:
        """Receive the bytes that every group needs with the last layers. Returns whether all keep their limits."""
        for group, position, size in zip(self.groups, self.tried, sizes, strict=True):
            group.update(position, size)
        return all(size <= group.limit for group, size in zip(self.groups, sizes, strict=True))

    def _layers(self, positions: Collection[int]) -> dict[str, Mode]:
        """The layers to recompute by path, completely where any group does so."""
        paths = [group.front[position].paths for group, position in zip(self.groups, positions, strict=True)]
        return {path: mode for mode in reversed(MODES) for one in paths for path in one[mode]}
