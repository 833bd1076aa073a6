"""The joint decision: the stage of ZeRO, stages and micro-batches of a pipeline, and recompute, optimised with a plan.

Every choice has bounds that cost nothing: the least seconds of a step, and the least bytes of a rank. A choice is
evaluated in steps, each of which costs more and never returns fewer seconds: a bound from other choices, its fastest
plan, the memory of that, a slower plan that needs less. The next step is always taken for the choice with the fewest
seconds, so none is taken for a choice that is slower than the decision. Invariant: a choice that was pruned could not
have been faster than the best, or could not have kept the limit.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from strategies.core.errors import StrategyError
from strategies.core.plan import Plan
from strategies.memory.parts import in_words

KEEPING = "_keep"
"""Ends a recompute that keeps the results of collectives though it would repeat them by itself."""
AGAIN = ("none", "selective", f"full{KEEPING}", "full")
"""Recompute, from no operator to all."""


@dataclass(frozen=True)
class Choice:
    """`stages` 1 is no pipeline, which has 1 micro-batch; `recompute` is as in `parallel.recompute.operators`. Of
    choices that are as fast, the least is taken: fewer stages, a lower stage of ZeRO, less recompute."""

    stages: int
    zero: int
    micro_batches: int
    recompute: str

    def __lt__(self, other: Choice) -> bool:
        return self._rank < other._rank

    @property
    def _rank(self) -> tuple[int, ...]:
        again = AGAIN.index(self.recompute) if self.recompute in AGAIN else len(AGAIN)
        return self.stages, self.zero, self.micro_batches, again

    def __str__(self) -> str:
        pipeline = f"{self.stages} stages, {self.micro_batches} micro-batches" if self.stages > 1 else "no pipeline"
        return f"ZeRO {self.zero}, {pipeline}, recompute {self.recompute}"


@dataclass(frozen=True)
class Bound:
    """Seconds of a step and bytes of a rank below those of any plan of a choice."""

    seconds: float
    bytes: float


@dataclass(frozen=True)
class Priced:
    """A plan of a choice: predicted seconds of a step, and peak bytes of the rank that needs most; None where they
    are not known yet. `modules` are those with recompute, None for all that are allowed."""

    plan: Plan
    seconds: float
    bytes: int | None
    modules: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Decision:
    """The fastest choice within the limit; the next of those that are known to keep it, or else of those that may
    (`runner_up`, whose bytes are then None: to know them takes longer than to decide); how many were `tried`, and how
    many were `pruned` by bounds, `over` the limit, or `refused` because there is no such plan."""

    choice: Choice
    priced: Priced
    runner_up: tuple[Choice, Priced] | None
    tried: int
    pruned: int
    over: int
    refused: int

    def to_json(self) -> dict[str, Any]:
        """The key `decided` of a plan's `search`."""
        second = None
        if self.runner_up is not None:
            second = _shown(*self.runner_up) | {"fits": self.runner_up[1].bytes is not None}
        counts = {"tried": self.tried, "pruned": self.pruned, "over": self.over, "refused": self.refused}
        return _shown(self.choice, self.priced) | counts | {"runner_up": second}


def _shown(choice: Choice, priced: Priced) -> dict[str, Any]:
    modules = None if priced.modules is None else list(priced.modules)
    shown = asdict(choice) | {"recompute": choice.recompute.removesuffix(KEEPING)}
    return shown | {"modules": modules, "seconds": priced.seconds}


def decide(bounds: Mapping[Choice, Bound], limit: float, look: Callable[[Choice], Iterator[Priced]]) -> Decision:
    """The best choice within a memory limit.

    Args:
        bounds: Of every choice.
        limit: Bytes of a rank.
        look: Yields successive evaluations of a choice: non-decreasing seconds, and plans first without, then with
            their bytes; it stops at one within `limit`.

    Raises:
        StrategyError: No choice is within `limit`; the first error of `look` where it rejects all that could be.
    """
    too_large = {choice: one.bytes for choice, one in bounds.items() if one.bytes > limit}
    # what a choice takes at least, and whether it has no plan yet: of equal ones those with a plan come first
    waiting = [(bounds[choice].seconds, True, choice) for choice in bounds.keys() - too_large.keys()]
    heapq.heapify(waiting)
    steps: dict[Choice, Iterator[Priced]] = {}
    last: dict[Choice, Priced] = {}
    refused: dict[Choice, StrategyError] = {}

    def fits(choice: Choice) -> bool:
        size = last[choice].bytes if choice in last else None
        return size is not None and size <= limit

    while waiting and (waiting[0][1] or not fits(waiting[0][2])):
        _, _, choice = heapq.heappop(waiting)
        if choice not in steps:
            steps[choice] = look(choice)
        try:
            one = next(steps[choice], None)
        except StrategyError as error:
            refused[choice] = error
            continue
        if one is None:
            continue
        if one.bytes is not None and one.bytes > limit:
            too_large[choice] = min(one.bytes, too_large.get(choice, one.bytes))
        last[choice] = one
        heapq.heappush(waiting, (one.seconds, False, choice))
    if not waiting:
        if not too_large:
            raise next(iter(refused.values()))
        raise StrategyError("MW502", _nothing_fits(too_large, limit))
    _, _, first = heapq.heappop(waiting)
    others = [(one.seconds, choice) for choice, one in last.items() if choice != first and fits(choice)]
    if not others:
        others = [(seconds, choice) for seconds, unseen, choice in waiting if not unseen and choice not in too_large]
    second = min(others)[1] if others else None
    runner_up = None if second is None else (second, last[second])
    over = len([one for one in too_large if bounds[one].bytes <= limit and one != first])
    return Decision(first, last[first], runner_up, len(steps), len(bounds) - len(steps), over, len(refused))


def _nothing_fits(needs: Mapping[Choice, float], limit: float) -> str:
    """One paragraph: the smallest need, whose it is, and what would help."""
    least = min(needs, key=lambda choice: (needs[choice], choice))
    return (
        f"Nothing that parallel.zero.stage, parallel.pipeline and parallel.recompute leave open fits into "
        f"{in_words(int(limit))} per rank (parallel.memory_limit, or the memory of a device of the cluster): of "
        f"{len(needs)} choices the smallest needs {in_words(int(needs[least]))} or more ({least}). More ranks, a "
        "smaller data.batch_size or more train.accumulate, parallel.offload, a higher limit, or auto for more of these "
        "keys would help."
    )
