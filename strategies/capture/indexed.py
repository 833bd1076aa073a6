"""`x[i]`, `x[i : i + n]` and their assignments in a forward, where a tensor holds the number `i`, by places, and
`x[mask] = y[mask]` by a choice: a graph has no element and no slice of which only a step will know where it is, or how
many elements it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from strategies.capture.constants import number
from strategies.rules.registry import PLAIN

LINEAR: dict[Any, Callable[..., Tensor]] = {
    getattr(Tensor, form.format(name)): getattr(torch, name)
    for name in ("add", "sub", "mul")
    for form in ("{}", "{}_", "__{}__", "__i{}__")
} | {getattr(Tensor, name): torch.div for name in ("div", "div_", "__truediv__", "__itruediv__")}
"""What may be done to selected elements with a number: elements that are not selected get no gradient of it."""
MAKING_MASKS = {
    getattr(owner, form.format(name))
    for name in ("eq", "ne", "gt", "ge", "lt", "le", "logical_and", "logical_or", "logical_not", "isnan", "isfinite")
    for owner, form in ((torch, "{}"), (Tensor, "{}"))
} | {getattr(Tensor, f"__{name}__") for name in ("eq", "ne", "gt", "ge", "lt", "le", "and", "or", "invert", "getitem")}
"""Functions that make masks, equal ones of equal operands."""


def by_places(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, in which indices are replaced. The exporter itself replaces some, in a mode around it."""

    @wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _Indexing():
            return forward(*args, **kwargs)

    return call


@dataclass(frozen=True)
class _Selected:
    """What `dense[mask]` returned, and how often it and its operands had been written by then."""

    result: Tensor
    mask: Tensor
    dense: Tensor
    versions: tuple[int, ...]

    @property
    def is_current(self) -> bool:
        return self.versions == _versions(self.result, self.mask, self.dense)


@dataclass(frozen=True)
class _Mask:
    """What a function of MAKING_MASKS returned for `args`, and how often they had been written by then."""

    result: Tensor
    function: Any
    args: tuple[Any, ...]
    versions: tuple[int, ...]

    @property
    def is_current(self) -> bool:
        return self.versions == _versions(self.result, *_tensors(self.args))


class _Indexing(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[int, _Mask] = {}
        """By the id of the result, which is alive."""
        self.selected: dict[int, _Selected] = {}
        """By the id of the result, which is alive."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.__getitem__, Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(map(_is_symbolic, index)):
                return indexed(args[0], [number(part) for part in index], *args[2:])
            if len(index) == 1 and isinstance(mask := index[0], Tensor) and mask.dtype is torch.bool and mask.dim():
                return self._select(*args) if function is Tensor.__getitem__ else self._choose(*args)
        known = self._known(args[0]) if self.selected and function in LINEAR and not kwargs else None
        result = function(*args, **(kwargs or {}))
        if known is not None and type(args[1]) in (int, float):
            self._note(result, known.mask, LINEAR[function](known.dense, args[1]))
        if function in MAKING_MASKS and not kwargs and isinstance(result, Tensor):
            self.masks[id(result)] = _Mask(result, function, args, _versions(result, *_tensors(args)))
        return result

    def _known(self, value: Any) -> _Selected | None:
        known = self.selected.get(id(value))
        return known if known is not None and known.is_current else None

    def _note(self, result: Tensor, mask: Tensor, dense: Tensor) -> None:
        self.selected[id(result)] = _Selected(result, mask, dense, _versions(result, mask, dense))

    def _are_equal(self, one: Any, other: Any) -> bool:
        """Whether two masks are one, or were made of the same by the same functions; or two operands of these."""
        if one is other or type(one) is not type(other):
            return one is other
        if isinstance(one, tuple):
            return len(one) == len(other) and all(map(self._are_equal, one, other))
        if not isinstance(one, Tensor):
            return isinstance(one, (*PLAIN, slice)) and bool(one == other)
        first, second = self.masks.get(id(one)), self.masks.get(id(other))
        if first is None or second is None or not first.is_current or not second.is_current:
            return False
        return first.function == second.function and self._are_equal(first.args, second.args)

    def _select(self, tensor: Tensor, index: Any) -> Tensor:
        (mask,) = index if isinstance(index, tuple) else (index,)
        result = tensor[index]
        if isinstance(result.shape[0], torch.SymInt):
            self._note(result, mask, tensor)
        return result

    def _choose(self, tensor: Tensor, index: Any, value: Any) -> None:
        (mask,), known = index if isinstance(index, tuple) else (index,), self._known(value)
        same = known is not None and self._are_equal(known.mask, mask) and known.dense.shape == tensor.shape
        if known is None or not same or known.dense.dtype != tensor.dtype:
            tensor[index] = value
        else:
            chosen = mask.reshape(*mask.shape, *(1,) * (tensor.dim() - mask.dim()))
            tensor.copy_(torch.where(chosen, known.dense, tensor))


def _tensors(args: tuple[Any, ...]) -> list[Tensor]:
    return [arg for arg in args if isinstance(arg, Tensor)]


def _versions(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in tensors)


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
