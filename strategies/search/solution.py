"""The result of a search: a plan by its assignments, with its cost and what bounds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from strategies.core.errors import TooLarge
from strategies.core.graph import Ref
from strategies.core.layout import Layout
from strategies.memory.parts import in_words
from strategies.rules.sharding import Assignment


@dataclass(frozen=True)
class Solution:
    """A plan that a search found.

    Attributes:
        assignments: by operator id.
        cost: seconds of a micro-batch, with its share of the work done once per step.
        bytes: memory estimate of a rank.
        lower_bound: seconds that any plan takes at least (0: unknown).
        tensors: layouts of parameters with several uses; others have the layout that their first use wants.
        multiplier: seconds per byte of the memory limit at which it was found.
    """

    assignments: Mapping[str, Assignment]
    cost: float
    bytes: float
    lower_bound: float = 0.0
    tensors: Mapping[Ref, Layout] = field(default_factory=dict)
    multiplier: float = 0.0

    @property
    def gap(self) -> float:
        """The optimality gap: how much cheaper, relative to the bound, a plan can be at most."""
        return (self.cost - self.lower_bound) / self.lower_bound if self.lower_bound > 0 else 0.0


def too_large(limit: float, smallest: float) -> TooLarge:
    """The error where no plan keeps the limit."""
    return TooLarge(
        "MW502",
        f"parallel.memory_limit = {in_words(int(limit))} per rank, but no plan was found that keeps it: the smallest "
        f"needs {in_words(int(smallest))}. Use more ranks, a higher parallel.zero.stage, smaller batches, or a larger "
        "limit.",
        smallest,
    )
