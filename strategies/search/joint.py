"""What a plan does not hold, decided together with it: the stage of ZeRO, stages and micro-batches of a pipeline, and
what is computed again.

Every choice has bounds that cost nothing: the least seconds of a step, and the least bytes of a rank. Choices are
priced by rising bound, each with the best plan that it allows, until the next bound is no better than what was found.
Invariant: a choice that was not priced could not have been faster than the best, or could not have kept the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
    nobody looked, because others are faster."""

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


def decide(bounds: Mapping[Choice, Bound], limit: float, price: Callable[[Choice, float], Priced]) -> Decision:
    """The best of the choices in `bounds` by what `price` tells of one, given the seconds of the best so far. Raises
    StrategyError where none keeps `limit`, and the first error of `price` where it refuses all that could."""
    found: dict[Choice, Priced] = {}
    slower: dict[Choice, float] = {}
    refusals: list[StrategyError] = []
    too_large: dict[Choice, float] = {choice: one.bytes for choice, one in bounds.items() if one.bytes > limit}
    open_choices = sorted(bounds.keys() - too_large.keys(), key=lambda choice: (bounds[choice].seconds, choice))
    tried, best = 0, math.inf
    for choice in open_choices:
        if bounds[choice].seconds >= best:
            break
        tried += 1
        try:
            one = price(choice, best)
        except StrategyError as error:
            refusals.append(error)
            continue
        if one.bytes is not None and one.bytes > limit:
            too_large[choice] = one.bytes
        elif one.bytes is not None and one.seconds < best:
            found[choice] = one
            best = one.seconds
        else:
            slower[choice] = one.seconds
    if not found:
        if not too_large:
            raise refusals[0]
        raise StrategyError(_nothing_fits(too_large, limit))
    first = min(found, key=lambda choice: found[choice].seconds)
    behind = slower | {choice: one.seconds for choice, one in found.items() if choice != first}
    second = None
    for choice in sorted(behind, key=lambda choice: (behind[choice], choice)):
        one = found[choice] if choice in found else price(choice, math.inf)
        if one.bytes is not None and one.bytes <= limit:
            second = choice, one.seconds
            break
    over = len([choice for choice, size in too_large.items() if bounds[choice].bytes <= limit])
    return Decision(first, found[first], second, tried, len(bounds) - tried, over, len(refusals))


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
