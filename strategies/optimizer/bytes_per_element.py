"""What an optimizer needs per element of what it updates: tried out on a small parameter.

Trying takes a step of the real optimizer, so any optimizer is known whose states and temporaries grow with the number
of elements. What the last few factories made is remembered: a decision asks for the same one for every choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from strategies.optimizer.kernels import Kernels, choose
from strategies.runtime.live_tensors import Live, bytes_of

SIDE = 64
"""Of the square matrix that is tried."""


@dataclass(frozen=True)
class Need:
    """Bytes per element: `kept` between updates; while a tensor is updated, `alone` for it and `before` for the one
    before it, whose temporaries a loop may still hold; `together` of all tensors where one call updates them all;
    `moved` is what its calls read and write. An update makes `calls` of operators, and `each` more per tensor. An
    element has `item` bytes."""

    kept: float
    alone: float
    before: float
    together: float
    moved: float
    calls: float
    each: float
    item: int

    def elements(self, count: int, dtype: torch.dtype) -> int:
        """The elements of `item` bytes that take as much as `count` of `dtype`, in fp32 or wider: complex numbers are
        two."""
        return count * torch.promote_types(dtype, torch.float32).itemsize // self.item

    def during(self, sizes: Sequence[int]) -> int:
        """Temporary bytes of an update of tensors with `sizes` elements, in this order."""
        pairs = zip(sizes, [0, *sizes], strict=False)
        most = max((self.alone * size + self.before * last for size, last in pairs), default=0.0)
        return int(most + self.together * sum(sizes))


@lru_cache(maxsize=8)
def needed(factory: Callable[[list[dict[str, Any]]], Optimizer], dtype: torch.dtype, kernels: Kernels = "loop") -> Need:
    """What the optimizer that `factory` makes from torch's parameter groups needs for parameters of `dtype`, which it
    updates with these `kernels` where the user has chosen none."""
    one, four = (_tried(factory, dtype, count, kernels) for count in (1, 4))
    elements = SIDE * SIDE
    per_tensor = (four.calls - one.calls) / 3
    alone, before, together = one.temporary, four.temporary - one.temporary, 0.0
    if four.temporary > 3 * one.temporary:
        alone, before, together = 0, 0, four.temporary / 4
    return Need(
        one.kept / elements,
        alone / elements,
        before / elements,
        together / elements,
        one.moved / elements,
        one.calls - per_tensor,
        per_tensor,
        dtype.itemsize,
    )


@dataclass(frozen=True)
class _Tried:
    """Bytes of the states, of the temporaries of a step, and of what it reads and writes; how many calls it makes."""

    kept: int
    temporary: int
    moved: int
    calls: int


def _tried(factory: Callable[..., Optimizer], dtype: torch.dtype, count: int, kernels: Kernels) -> _Tried:
    """A step of `count` parameters."""
    parameters = [nn.Parameter(torch.ones(SIDE, SIDE, dtype=dtype)) for _ in range(count)]
    optimizer = factory([{"params": parameters}])
    choose(optimizer, kernels)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # makes the states
    with _Counting() as counting:
        optimizer.step()
    states = [value for value in tree_leaves([*optimizer.state.values()]) if isinstance(value, Tensor)]
    with Live("cpu") as live:
        live.see([*parameters, *(one.grad for one in parameters if one.grad is not None), *states])
        before = live.now
        live.restart()
        optimizer.step()
    return _Tried(_large(states), live.peak - before, counting.moved, counting.calls)


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts calls, and the bytes of all that they read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved = self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        given = zip(func._schema.arguments, args, strict=False)
        changed = [one for argument, one in given if argument.alias_info is not None and argument.alias_info.is_write]
        self.calls += 1
        self.moved += _large((args, kwargs)) + _large((changed, results))
        return results


def _large(some: object) -> int:
    """Bytes of the distinct tensors in it, without counters."""
    return bytes_of(one for one in tree_leaves(some) if isinstance(one, Tensor) and one.numel() >= SIDE)
