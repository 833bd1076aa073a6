"""`x[i]`, `x[i : i + n]` and their assignments in a forward, where a tensor holds the number `i`, by places: a graph
has no element and no slice of which only a step will know where it is. What masks select is passed on (`masked`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from strategies.capture.constants import number
from strategies.capture.masked import FINDING, LINEAR, NOT_KNOWN, Selections


def by_places(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, in which indices are replaced. The exporter itself replaces some, in a mode around it."""

    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _Indexing():
            return forward(*args, **kwargs)

    return call


class _Indexing(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.selections = Selections()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.__getitem__, Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(map(_is_symbolic, index)):
                return indexed(args[0], [number(part) for part in index], *args[2:])
            mask = index[0] if len(index) == 1 and _is_mask(index[0]) else self.selections.mask_of(args[0], index)
            if mask is not None and function is Tensor.__getitem__:
                return self.selections.select(function, args[0], mask)
            if mask is not None:
                return self.selections.choose(args[0], mask, args[2])
        if function in (torch.masked_select, Tensor.masked_select) and len(args) == 2 and not kwargs:
            return self.selections.select(function, *args)
        if function in FINDING or (function is torch.where and len(args) == 1 and not kwargs):
            return self.selections.find(function, args, kwargs or {})
        if self.selections.places and args:
            if function in (torch.index_select, Tensor.index_select) and args[1:2] == (0,) and len(args) == 3:
                if (mask := self.selections.mask_of(args[0], args[2:])) is not None:
                    return self.selections.select(Tensor.__getitem__, args[0], mask)
            if (places := self.selections.places.get(id(args[0]))) is not None:
                return self.selections.column(places, function, args, kwargs or {})
        if self.selections.known:
            if function in LINEAR and len(args) == 2 and isinstance(args[1], torch.SymInt):
                args = args[0], self.selections.count(args[1])
            result = self.selections.through(function, args, kwargs or {})
            if result is not NOT_KNOWN:
                return result
        return function(*args, **(kwargs or {}))


def _is_mask(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype is torch.bool and part.dim() > 0


def indexed(tensor: Tensor, parts: list[Any], *value: Any) -> Tensor | None:
    """`tensor[parts]`, or `tensor[parts] = value`, where tensors hold which element of a dim it is, or where a slice of
    a known length begins. What is not all within the dim raises IndexError."""
    place = next((place for place, part in enumerate(parts) if _is_symbolic(part)), None)
    if place is None:
        if not value:
            return tensor[tuple(parts)]
        tensor[tuple(parts)] = value[0]
        return None
    dim = sum(map(_dims, parts[:place]))
    if any(part is Ellipsis for part in parts[:place]):
        dim = tensor.dim() - sum(map(_dims, parts[place:]))
    part, size = parts[place], tensor.shape[dim]
    if isinstance(part, slice):
        length, start = _length(part), _tensor(part.start, tensor)
        places = start.where((start >= 0) & (start <= size - length), size) + torch.arange(length, device=tensor.device)
    else:
        start = _tensor(part, tensor).reshape(1)
        places = start.where(start >= 0, start + size)
    chosen = tensor.index_select(dim, places)
    rest = [*parts[:place], slice(None) if isinstance(part, slice) else 0, *parts[place + 1 :]]
    found = indexed(chosen, rest, *value)
    if value:
        tensor.index_copy_(dim, places, chosen)
    return found


def _is_symbolic(part: Any) -> bool:
    """Whether only a step knows what a part of an index says: a tensor of one number, a symbol, a slice from one."""
    if isinstance(part, slice):
        return _length(part) is not None
    single = isinstance(part, Tensor) and not part.dim() and part.dtype not in (torch.bool, torch.uint8)
    return single or isinstance(part, torch.SymInt)


def _length(part: slice) -> Any:
    """How many elements a slice has that begins at a number which a tensor holds; None for other slices, and where
    it is not known."""
    if part.step not in (None, 1) or not isinstance(part.start, torch.SymInt) or part.stop is None:
        return None
    difference = part.stop - part.start
    return difference.node.maybe_as_int() if isinstance(difference, torch.SymInt) else difference


def _tensor(number: Any, like: Tensor) -> Tensor:
    return number if isinstance(number, Tensor) else torch.full((), number, device=like.device)


def _dims(part: Any) -> int:
    """How many dims a part of an index takes."""
    if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8):
        return part.dim()
    return 0 if part is None or part is Ellipsis or isinstance(part, bool) else 1
