"""A cache of the results of operators on fake tensors.

A trace calls the same operators with the same shapes for every layer, and so does the next trace. torch caches them
too, but inspects everything that a tensor may be before it does, which takes most of a trace's time. Invariant: only
calls on plain tensors are cached, of operators that write nothing, whose results have new memory or that of an operand,
as they would without the cache, and of those that write numbers alone, whose result is their first operand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from strategies.core.lstm_workspace import LAYER, with_workspace

MOST = 1 << 16
"""Calls that are remembered; then all are forgotten."""
WRITES_NUMBERS = frozenset(("add_", "copy_", "div_", "fill_", "mul_", "sub_", "zero_"))
"""Operators that change the numbers of their first operand and nothing else of it."""


@dataclass(frozen=True)
class _Made:
    """One result: with new memory, or `offset` elements behind the begin of that of operand number `of`."""

    of: int | None
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


_known: dict[Hashable, tuple[type | None, tuple[_Made | None, ...]] | None] = {}
"""By call: what holds the results (None: there is one) and the results; None where it cannot be remembered."""
_FIRST: tuple[None, tuple[()]] = (None, ())
"""The result is the first operand."""


class _NotPlain(Exception):
    """An argument that is not plain."""


def call(func: Any, args: Sequence[Any], kwargs: dict[str, Any], given: Sequence[Tensor], mode: FakeTensorMode) -> Any:
    """`func(*args, **kwargs)` on tensors of `mode`, of which `given` are all. Where torch's cache is off, because
    memory is given away meanwhile and a remembered view would make it anew, nothing is remembered here either."""
    if not mode.cache_enabled or not _plain(func):
        return _called(func, args, kwargs)
    try:
        key = func, _key(args, func.is_view), _key(tuple(kwargs.items())), torch.get_default_dtype()
    except _NotPlain:
        return _called(func, args, kwargs)
    known = _known.get(key)
    if known is _FIRST:
        return args[0]
    if known is not None:
        kind, made = known
        with no_dispatch():
            cached = [None if one is None else _new(one, given, mode) for one in made]
        return cached[0] if kind is None else kind(cached)
    results = _called(func, args, kwargs)
    if key not in _known:
        if len(_known) >= MOST:
            forget()
        _known[key] = _FIRST if results is args[0] else _remembered(results, given)
    return results


def _called(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    results = func(*args, **kwargs)
    return with_workspace(results, args) if func is LAYER and args[-1] else results


def forget() -> None:
    """Forget all shapes."""
    _known.clear()


def _new(one: _Made, given: Sequence[Tensor], mode: FakeTensorMode) -> FakeTensor:
    if one.of is None:
        made = torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device="meta")
    else:
        made = torch.empty(0, dtype=one.dtype, device="meta")
        made.set_(given[one.of].untyped_storage(), one.offset, one.shape, one.stride)
    return _fake(made, one.device, mode)


_attributes: dict[torch.device, dict[str, Any]] = {}


def _fake(made: Tensor, device: torch.device, mode: FakeTensorMode) -> FakeTensor:
    """`FakeTensor(mode, made, device)`, whose attributes but for the mode are those of any new one on this device."""
    if device not in _attributes:
        new = FakeTensor(mode, made, device)
        _attributes[device] = {name: value for name, value in vars(new).items() if name != "fake_mode"}
        return new
    new = Tensor._make_subclass(FakeTensor, made, False, dispatch_device=True, device_for_backend_keys=device)
    torch._C._set_throw_on_mutable_data_ptr(new)
    vars(new).update(_attributes[device], fake_mode=mode)
    return new


@cache
def _plain(func: Callable[..., Any]) -> bool:
    """Whether an operator makes tensors, of others or on a device, and changes none, or only the numbers of its first
    operand."""
    if not isinstance(func, OpOverload):
        return False
    makes = any("Tensor" in str(one.type) or one.name == "device" for one in func._schema.arguments)
    return makes and (not func._schema.is_mutable or func._schema.name.removeprefix("aten::") in WRITES_NUMBERS)


def _key(value: Any, view: bool = False) -> Hashable:
    """The cache key of a value. Raises _NotPlain for a value that is not plain: a zero-dim tensor may be a wrapped
    number, whose dtype counts for less, but in a `view`. 1, 1.0 and True are different keys."""
    kind = type(value)
    if kind is FakeTensor:
        plain = value.layout is torch.strided and not value.dtype.is_complex and value.constant is None
        if not plain or not (view or value.ndim):
            raise _NotPlain
        return value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device
    if kind is tuple or kind is list:
        return kind, *[_key(one, view) for one in value]
    if value is None or kind in _SIMPLE:
        return kind, "nan" if kind is float and math.isnan(value) else value  # which is not equal to itself
    raise _NotPlain


_SIMPLE = frozenset((bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format))


def _remembered(results: Any, given: Sequence[Tensor]) -> tuple[type | None, tuple[_Made | None, ...]] | None:
    """The cache entry of results; None if they are not plain, or share new memory."""
    several = type(results) if isinstance(results, (tuple, list)) else None
    entries: list[_Made | None] = []
    operands = {tensor.untyped_storage()._cdata: number for number, tensor in enumerate(given)}
    own = set[int]()
    for one in results if several else [results]:
        if one is None:
            entries.append(None)
            continue
        if type(one) is not FakeTensor or one.constant is not None or one.layout is not torch.strided:
            return None
        storage = one.untyped_storage()
        of, offset = operands.get(storage._cdata), int(one.storage_offset())
        if of is None:
            with no_dispatch():
                alone = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta")
            if storage._cdata in own or offset or storage.nbytes() != alone.untyped_storage().nbytes():
                return None
            own.add(storage._cdata)
        entries.append(_Made(of, offset, tuple(one.shape), one.stride(), one.dtype, one.fake_device))
    return several, tuple(entries)
