"""What an optimizer needs per element of what it updates: tried out on a small parameter.

Trying takes a step of the real optimizer, so any optimizer is known whose states and temporaries grow with the number
of elements. What the last few factories made is remembered: a decision asks for the same one for every choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from strategies.cost.live import Live, bytes_of

SIDE = 64
"""Of the square matrix that is tried."""


@dataclass(frozen=True)
class Need:
    """Bytes per element: `kept` between updates; while a tensor is updated, `alone` for it and `before` for the one
    before it, whose temporaries a loop may still hold; `together` of all tensors where one call updates them all."""

    kept: float
    alone: float
    before: float
    together: float

    def during(self, sizes: Sequence[int]) -> int:
        """Bytes that an update of tensors of so many elements, in this order, takes for a while."""
        pairs = zip(sizes, [0, *sizes], strict=False)
        most = max((self.alone * size + self.before * last for size, last in pairs), default=0.0)
        return int(most + self.together * sum(sizes))


@lru_cache(maxsize=8)
def needed(factory: Callable[[list[dict[str, Any]]], Optimizer], dtype: torch.dtype, *, at_once: bool = False) -> Need:
    """What the optimizer that `factory` makes from torch's parameter groups needs for parameters of `dtype`; with
    `at_once` it may update all of them by one call, as optimizers do on a GPU."""
    (kept, one), (_, four) = (_tried(factory, dtype, count, at_once) for count in (1, 4))
    elements = SIDE * SIDE
    if four > 3 * one:
        return Need(kept / elements, 0.0, 0.0, four / 4 / elements)
    return Need(kept / elements, one / elements, (four - one) / elements, 0.0)


def _tried(factory: Callable[..., Optimizer], dtype: torch.dtype, count: int, at_once: bool) -> tuple[int, int]:
    """Bytes of the states and of the temporaries of a step of `count` parameters."""
    parameters = [nn.Parameter(torch.ones(SIDE, SIDE, dtype=dtype)) for _ in range(count)]
    optimizer = factory([{"params": parameters}])
    for group in optimizer.param_groups:
        if at_once and group.get("foreach", True) is None and not group.get("fused"):
            group["foreach"] = True
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = list(_states(optimizer))
    with Live("cpu") as live:
        live.see([*parameters, *(one.grad for one in parameters if one.grad is not None), *states])
        before = live.now
        live.restart()
        optimizer.step()
    kept = bytes_of(tensor for tensor in states if tensor.numel() >= SIDE)  # the rest are counters
    return kept, live.peak - before


def _states(optimizer: Optimizer) -> Iterator[Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
