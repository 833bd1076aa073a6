"""Runs a model entirely in double precision, including casts to single precision.

Many models compute norms and softmax in float32 explicitly, whatever precision they have; then no run agrees with
another to 1e-10. Inside `in_double` such requests mean float64, for the eager model and for its capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

GROUPED = "transformers.integrations.moe._can_use_grouped_mm"
"""torch's grouped product does not support float64; the explicit one of transformers does."""


class _Double(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        wide = lambda value: torch.float64 if value is torch.float32 else value  # noqa: E731
        return func(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


@contextmanager
def in_double() -> Iterator[None]:
    """Tensors created or requested as float32 inside are float64."""
    with double_by_default(), as_double():
        yield


@contextmanager
def as_double() -> Iterator[None]:
    """Requests for float32 inside mean float64; tensors made without a dtype keep their own."""
    with mock.patch(GROUPED, return_value=False), _Double():
        yield


@contextmanager
def double_by_default() -> Iterator[None]:
    """Tensors made without a dtype are float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
