"""Operators that make a tensor from numbers: every dim of the result is a factor, and a slice is made where it is used.

Tensors that lend only their dtype and device (x.new_zeros) may have any layout: each of their dims is a factor of its
own, or shares that of the result's dim in the same place where the sizes are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.registry import arguments, local_function, resolve, rule
from strategies.rules.sharding import Local, Sharding, numbered, sharding
from strategies.rules.table import line

OPTIONS = ("dtype", "layout", "device", "pin_memory")


def _sized(operator: Operator, local: Local) -> Ref:
    """The operator itself, with the local shape in place of its argument `size`."""
    return local.itself(size=local.result_shape())


@rule("empty", "full", "ones", "scalar_tensor", "zeros")
def constant(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """One value everywhere. What an empty tensor holds may be no number, so its slices are never padded."""
    dims = numbered(len(operator.results[0].shape))
    padded = () if operator.op == "empty" else dims
    return sharding(operator, specs, [], [dims], local=_sized if dims else None, padded=padded)


@rule("new_empty", "new_full", "new_ones", "new_zeros")
def new(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x.new_zeros(size) and its kin: nothing of x but its dtype and device."""
    shape = operator.results[0].shape
    dims = numbered(len(shape))
    lends = tuple(f"d{i}" if i < len(shape) and size == shape[i] else f"x{i}" for i, size in enumerate(specs[0].shape))
    padded = () if operator.op == "new_empty" else (*dims, *lends)
    return sharding(operator, specs, [lends], [dims], local=_sized, padded=padded)


@local_function
def arange_slice(start: int, step: int, position: int, length: int, options: Mapping[str, Any]) -> Tensor:
    """`length` numbers of start, start + step, ... from `position` on."""
    first = start + position * step
    made: Tensor = torch.ops.aten.arange.start_step(first, first + length * step, step, **options)
    return made


@local_function
def eye_slice(starts: Sequence[int], shape: Sequence[int], options: Mapping[str, Any]) -> Tensor:
    """The block of `shape` at `starts` of an identity matrix."""
    made: Tensor = torch.ops.aten.zeros.default(shape, **options)
    rows, columns = (
        torch.arange(start, start + size, device=made.device) for start, size in zip(starts, shape, strict=True)
    )
    return made.masked_fill(rows.unsqueeze(1) == columns, 1)


@local_function
def cut_slice(target: str, start: int, length: int, args: Sequence[Any], options: Mapping[str, Any]) -> Tensor:
    """`length` entries from `start` on, along the last dim, of the result of `target`; zeros past its end.

    A floating-point series is computed in full and sliced, because the rounding of an entry depends on its index.
    """
    made: Tensor = resolve(target)(*args, **options)
    past = max(0, start + length - made.shape[-1])
    return torch.nn.functional.pad(made, (0, past)).narrow(-1, start, length)


def _series(operator: Operator, local: Local) -> Ref:
    (length,) = local.result_shape()
    options = arguments(operator)
    start, end, step = (options.get(name, default) for name, default in (("start", 0), ("end", 0), ("step", 1)))
    if local.slices("d0") == 1:
        return local.itself()
    position = local.position("d0", length)
    if operator.op == "arange" and all(isinstance(number, int) for number in (start, end, step)):
        made_with = {name: options[name] for name in OPTIONS if options[name] is not None}
        return local.call("local.arange_slice", start, step, position, length, {"dtype": torch.int64} | made_with)
    return local.call("local.cut_slice", operator.target, position, length, local.args, local.kwargs)


def _triangle(operator: Operator, local: Local) -> Ref:
    """Rows and columns [2, n]; padding is index 0."""
    length = local.result_shape()[1]
    return local.call("local.cut_slice", operator.target, local.position("n", length), length, local.args, local.kwargs)


def _eye(operator: Operator, local: Local) -> Ref:
    shape = local.result_shape()
    starts = tuple(local.position(f"d{i}", size) for i, size in enumerate(shape))
    return local.call("local.eye_slice", starts, shape, local.kwargs)


SERIES = """
arange bartlett_window blackman_window fft_fftfreq fft_rfftfreq hamming_window hann_window kaiser_window linspace
logspace
"""
"""Numbers in even steps, and windows; bounds that are tensors do not fit the line."""
line("-> d0", SERIES, padded=True, local=_series)
line("-> !2 n", "tril_indices triu_indices", padded=True, local=_triangle)
line("-> d0 d1", "eye", padded=True, local=_eye)
