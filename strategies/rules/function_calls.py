"""A function that draws numbers with the global generators of Python or numpy, as one opaque operator: ranks call the
function itself, replicated, with the generators at the same numbers.

It is a random operator: `local.seeded` gives it a seed from (key, ordinal), like any other without a rule.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.utils._pytree import tree_leaves, tree_map_only

from strategies.rules.drawing_calls import begin_at, restored, states
from strategies.rules.module_calls import Results, Slot, changeable, of_text
from strategies.rules.registry import function_class, local_function

_drawing = threading.RLock()
"""Locked while the global generators are at a call's numbers."""


@dataclass(frozen=True)
class FunctionCall:
    """A call of the function `name` (`module::function`) with the arguments `given`, whose tensors are `Slot`s. Results
    are the arrays and tensors that it returns, as tensors of these shapes and dtypes."""

    name: str
    given: Any
    autocast: torch.dtype | None = None
    """Of the torch.autocast around the call."""
    results: Results = ()

    def __call__(self, operands: Sequence[Tensor], device: torch.device, number: int) -> tuple[Tensor, ...]:
        module, _, path = self.name.partition("::")
        returned, drew = self.returned(function_class(path, module), operands, device, number)
        if not drew:
            raise RuntimeError(
                f"{self.name}, which ranks call as one operator because it draws random numbers, drew none, which "
                "changes the numbers of all random operators behind it; let it draw some whatever its arguments are"
            )
        results = tuple(one.to(device) for one in tensors_in(returned))
        made = tuple((tuple(result.shape), result.dtype) for result in results)
        if made != self.results:
            raise RuntimeError(
                f"{self.name}, which ranks call as one operator because it draws random numbers, returned {made}, but "
                f"the plan is made for {self.results}"
            )
        return results

    def returned(
        self, function: Any, operands: Sequence[Tensor], device: torch.device, number: int
    ) -> tuple[Any, bool]:
        """What `function` returns where both generators begin at `number`, and whether it advances them. Raises
        RuntimeError where it does more than that."""
        args, kwargs = tree_map_only(Slot, lambda slot: operands[slot.index], self.given)
        args, kwargs = tree_map_only(torch.device, lambda _: device, (args, kwargs))
        casts = nullcontext() if self.autocast is None else torch.autocast(device.type, self.autocast)
        with _drawing, restored(), casts, torch.no_grad():
            begin_at(number)
            before, start = changeable(operands, device), states()
            returned = function(*args, **kwargs)
            if changeable(operands, device) != before:
                raise RuntimeError(
                    f"{self.name}, which ranks call as one operator because it draws numbers with Python's random or "
                    "numpy, also draws with torch, or writes into a tensor"
                )
            return returned, states() != start


def tensors_in(returned: Any) -> list[Tensor]:
    """The arrays and tensors in what a function returned, as tensors. Raises TypeError for anything else but None."""
    return [one if isinstance(one, Tensor) else _as_tensor(one) for one in tree_leaves(returned) if one is not None]


def _as_tensor(leaf: Any) -> Tensor:
    if not isinstance(leaf, np.ndarray):
        raise TypeError(f"a {type(leaf).__name__}")
    return torch.from_numpy(leaf.copy())


@local_function
def drawn_function(call: str, device: torch.device, *operands: Tensor) -> tuple[Tensor, ...]:
    """The tensors and arrays that the function of a `FunctionCall`, given as text, returns on `device`, with numbers
    from the seed of torch's generator."""
    known: FunctionCall = of_text(call)
    if device.type == "meta" or detect_fake_mode(operands) is not None:
        return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in known.results)
    return known(operands, device, torch.initial_seed())


drawn_function.tags = (torch.Tag.nondeterministic_seeded,)  # type: ignore[attr-defined]
