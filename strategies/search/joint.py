"""What a plan does not hold, decided together with it: the stage of ZeRO, stages and micro-batches of a pipeline, and
what is computed again.

Every choice has bounds that cost nothing: the least seconds of a step, and the least bytes of a rank. A choice is
looked at in steps, each of which costs more and never tells less seconds: its fastest plan, the memory of that, a
slower plan for less room. The next step is always taken for the choice that is told the least seconds, so no step is
taken for a choice that is slower than what is decided. Invariant: a choice that was left open could not have been
faster than the best, or could not have kept the limit.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from strategies.cost.limit import in_words
from strategies.errors import StrategyError
from strategies.plan import Plan


@dataclass(frozen=True, order=True)
class Choice:
    """`stages` 1 is no pipeline, which has 1 micro-batch; `recompute` is as in `parallel.recompute.operators`. Of
    choices that are as fast, the first in this order is taken."""

    stages: int
    zero: int
    micro_batches: int
    recompute: str

    def __str__(self) -> str:
        pipeline = f"{self.stages} stages, {self.micro_batches} micro-batches" if self.stages > 1 else "no pipeline"
        return f"ZeRO {self.zero}, {pipeline}, recompute {self.recompute}"


@dataclass(frozen=True)
class Bound:
    """Seconds of a step and bytes of a rank that no plan of a choice can do with less."""

    seconds: float
    bytes: float


@dataclass(frozen=True)
class Priced:
    """A plan of a choice: predicted seconds of a step, and bytes of the fullest rank at its fullest moment; None where
    nobody has looked yet."""

    plan: Plan
    seconds: float
    bytes: int | None


@dataclass(frozen=True)
class Decision:
    """The fastest choice within the limit and the next, how many were `tried`, and how many were `pruned` by bounds,
    `over` the limit, or `refused` because there is no such plan."""

    choice: Choice
    priced: Priced
    runner_up: tuple[Choice, float] | None
    tried: int
    pruned: int
    over: int
    refused: int

    def to_json(self) -> dict[str, Any]:
        """What a plan's `search` tells of it as `decided`."""
        second = None if self.runner_up is None else asdict(self.runner_up[0]) | {"seconds": self.runner_up[1]}
        counts = {"tried": self.tried, "pruned": self.pruned, "over": self.over, "refused": self.refused}
        return asdict(self.choice) | {"seconds": self.priced.seconds} | counts | {"runner_up": second}


@dataclass(frozen=True, order=True)
class _Next:
    """Where a choice stands: told to take at least `seconds`; of those that are told the same, what was looked at
    comes first."""

    seconds: float
    unseen: bool
    choice: Choice


def decide(bounds: Mapping[Choice, Bound], limit: float, look: Callable[[Choice], Iterator[Priced]]) -> Decision:
    """The best of the choices in `bounds`. `look` takes the steps of one: plans with ever more seconds, each first
    without and then with its bytes; after one that keeps `limit` no other is asked for. Raises StrategyError where none
    keeps `limit`, and the first error of `look` where it refuses all that could."""
    steps: dict[Choice, Iterator[Priced]] = {}
    last: dict[Choice, Priced] = {}
    refusals: dict[Choice, StrategyError] = {}
    too_large: dict[Choice, float] = {choice: one.bytes for choice, one in bounds.items() if one.bytes > limit}
    waiting = [_Next(bounds[choice].seconds, True, choice) for choice in bounds.keys() - too_large.keys()]
    heapq.heapify(waiting)
    while waiting:
        choice = heapq.heappop(waiting).choice
        if choice in last and _fits(last[choice], limit):
            break
        if choice not in steps:
            steps[choice] = look(choice)
        try:
            one = next(steps[choice], None)
        except StrategyError as error:
            refusals[choice] = error
            continue
        if one is not None:
            if one.bytes is not None and one.bytes > limit:
                too_large[choice] = min(one.bytes, too_large.get(choice, one.bytes))
            last[choice] = one
            heapq.heappush(waiting, _Next(one.seconds, False, choice))
    else:
        if not too_large:
            raise next(iter(refusals.values()))
        raise StrategyError(_nothing_fits(too_large, limit))
    found = last[choice]
    second = _second([one for one in sorted(waiting) if not one.unseen], steps, last, limit)
    over = len([one for one in too_large if bounds[one].bytes <= limit and one != choice])
    return Decision(choice, found, second, len(steps), len(bounds) - len(steps), over, len(refusals))


def _fits(one: Priced, limit: float) -> bool:
    return one.bytes is not None and one.bytes <= limit


def _second(
    waiting: list[_Next], steps: Mapping[Choice, Iterator[Priced]], last: Mapping[Choice, Priced], limit: float
) -> tuple[Choice, float] | None:
    """The next best of what was looked at, with the plan that is known; no other plan is searched for it."""
    for choice in (one.choice for one in waiting):
        known: Priced | None = last[choice]
        if known is not None and known.bytes is None:
            try:
                known = next(steps[choice], None)
            except StrategyError:
                continue  # it has no such plan
        if known is not None and _fits(known, limit):
            return choice, known.seconds
    return None


def _nothing_fits(needs: Mapping[Choice, float], limit: float) -> str:
    """One paragraph: the smallest need, whose it is, and what would help."""
    least = min(needs, key=lambda choice: (needs[choice], choice))
    return (
        f"Nothing that parallel.zero.stage, parallel.pipeline and parallel.recompute leave open fits into "
        f"{in_words(int(limit))} per rank (parallel.memory_limit, or the memory of a device of the cluster): of "
        f"{len(needs)} choices the smallest need is {in_words(int(needs[least]))} ({least}). More ranks, a smaller "
        "data.batch_size or more train.accumulate, parallel.offload, a higher limit, or auto for more of these keys "
        "would help."
    )
