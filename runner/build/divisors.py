"""What a loss over classes divides by, seen while it runs: the targets that count, or their class weights.

Batches of an evaluation hold different numbers of them, as where documents end or rows are padded. The mean over all
tokens is that of the batches by their divisors, whatever their size. `runner.planning.counted` finds the same in a
graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

CLASS_LOSSES = frozenset({torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default})
MEAN = 1


def values(classes: Tensor, ignored: int, weight: Tensor | None) -> Tensor:
    """What each target counts in a mean over classes: 1 or the weight of its class, 0 if it is ignored; float64."""
    counts = classes != ignored
    if weight is None:
        return counts.double()
    return counts * weight.double()[classes.where(counts, 0)]


def divisor(given: Mapping[str, Any], rows: int) -> float:
    """What the mean of a call of cross_entropy or nll_loss with these arguments divides by; `rows` where targets are
    probabilities, which all count, or there are none."""
    target = given.get("target")
    if target is None or target.is_floating_point():
        return float(rows)
    return float(values(target, given.get("ignore_index", -100), given.get("weight")).sum())


class Divisors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the divisors of all means over classes that are computed inside of the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found: set[float] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in CLASS_LOSSES and args[3] == MEAN:
            _, classes, weight, _, ignored = args
            self._found.add(float(values(classes, ignored, weight).sum()))
        return func(*args, **(kwargs or {}))

    @property
    def only(self) -> float | None:
        """The divisor, if all means have the same one; None without means, or where they differ."""
        return next(iter(self._found)) if len(self._found) == 1 else None
