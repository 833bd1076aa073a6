"""`x[i]`, `x[i : i + n]` and their assignments in a forward, where a tensor holds the number `i`, by places: a graph
has no element and no slice of which only a step will know where it is. What masks select is passed on (`masked`), and a
slice whose length only a step will know (`x[:n]`) is what a mask selects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode

from strategies.capture.constants import number
from strategies.capture.masked import FINDING, LINEAR, NOT_KNOWN, SELECTIONS, Selections
from strategies.capture.nodes import asked_by_user, replaced

CONDITIONS = {torch.where: 0, Tensor.where: 1}
"""The place of the condition among the arguments."""


def by_places(forward: Callable[..., Any], selections: Selections) -> Callable[..., Any]:
    """`forward`, in which indices are replaced, and what masks select is noted. The exporter itself replaces some, in a
    mode around it."""

    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        selections.restore(Selections())
        counting = replaced(torch.SymBool, "__bool__", _counting(torch.SymBool.__bool__, selections))
        SELECTIONS.append(selections)
        try:
            with _Indexing(selections), counting:
                return forward(*args, **kwargs)
        finally:
            SELECTIONS.pop()

    return call


def _counting(truth: Callable[[torch.SymBool], bool], selections: Selections) -> Callable[[torch.SymBool], bool]:
    """The truth of a comparison of sizes, which may be that of what masks count."""

    def call(symbol: torch.SymBool) -> bool:
        try:
            return truth(symbol)
        except GuardOnDataDependentSymNode:
            counted = selections.count(symbol) if asked_by_user() else None
            if not isinstance(counted, Tensor):
                raise
        return bool(counted)

    return call


class _Indexing(TorchFunctionMode):
    def __init__(self, selections: Selections) -> None:
        super().__init__()
        self.selections = selections

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (place := CONDITIONS.get(function)) is not None and len(args) == 3:
            if isinstance(args[place], Tensor) and args[place].dtype is torch.uint8:
                args = *args[:place], args[place] != 0, *args[place + 1 :]  # tensors without numbers refuse bytes
        if function in (Tensor.__getitem__, Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if function is Tensor.__getitem__ and (selecting := _selecting(args[0], index)) is not None:
                tensor, chosen, rest = selecting
                return self._taken(self.selections.select(function, tensor, chosen), rest)
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
            if function in LINEAR and len(args) == 2 and isinstance(args[1], (torch.SymInt, torch.SymFloat)):
                args = args[0], self.selections.count(args[1])
            result = self.selections.through(function, args, kwargs or {})
            return self.selections.stopped(function, args, kwargs or {}) if result is NOT_KNOWN else result
        return function(*args, **(kwargs or {}))

    def _taken(self, selected: Tensor, rest: Sequence[Any]) -> Tensor:
        """The selected rows, indexed behind their first dim."""
        if all(part is Ellipsis or part == slice(None) for part in rest):
            return selected
        index = (slice(None), *rest)
        result = self.selections.through(Tensor.__getitem__, (selected, index), {})
        taken: Tensor = selected[index] if result is NOT_KNOWN else result
        return taken


def _is_mask(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype is torch.bool and part.dim() > 0


def _is_plain(parts: Sequence[Any]) -> bool:
    return all(part is None or part is Ellipsis or type(part) in (int, slice) for part in parts)


def _selecting(tensor: Tensor, index: Sequence[Any]) -> tuple[Tensor, Tensor, Sequence[Any]] | None:
    """A tensor, the mask that selects what an index of another does, and the rest of the index, behind the mask: that
    of a mask and more, or of numbers and a slice that begins or ends where a tensor says. None for other indices."""
    place = next((place for place, part in enumerate(index) if _is_mask(part) or _is_open(part)), None)
    if place is None or not _is_plain(rest := index[place + 1 :]) or any(type(one) is not int for one in index[:place]):
        return None
    part = index[place]
    if isinstance(part, Tensor):
        return None if place or not rest else (tensor, part, rest)
    tensor = tensor[tuple(index[:place])] if place else tensor
    places, size = torch.arange(tensor.shape[0], device=tensor.device), tensor.shape[0]
    start, stop = (None if one is None else _tensor(one, tensor) for one in (part.start, part.stop))
    masks = [] if start is None else [places >= start.where(start >= 0, start + size)]
    masks += [] if stop is None else [places < stop.where(stop >= 0, stop + size)]
    return tensor, masks[0] if len(masks) == 1 else masks[0] & masks[1], rest


def _is_open(part: Any) -> bool:
    """Whether only a step knows how many elements a slice has."""
    if not isinstance(part, slice) or part.step not in (None, 1) or _length(part) is not None:
        return False
    return any(_is_symbolic(one) and not isinstance(number(one), int) for one in (part.start, part.stop))


def indexed(tensor: Tensor, parts: list[Any], *value: Any) -> Tensor | None:
    """`tensor[parts]`, or `tensor[parts] = value`, where tensors hold which element of a dim it is, or where a slice of
    a known length begins. A range beyond the dim raises IndexError."""
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
