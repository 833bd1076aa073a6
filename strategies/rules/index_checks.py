"""Bounds checks of indices at their use, for local functions that would mask invalid ones.

Invariant: no check synchronizes a device. A GPU is not checked at all, as in torch's own operators; on the CPU an
invalid index raises IndexError, and in a compiled program, which cannot branch on values, an assertion fails.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_inside(indices: Tensor, lowest: int, end: int, what: str, counted: Tensor | None = None) -> None:
    """Raises IndexError on the CPU unless lowest <= indices < end (where `counted`, of the same shape, is true)."""
    if indices.device.type != "cpu":
        return
    outside = (indices < lowest) | (indices >= end)
    if counted is not None:
        outside = outside & counted
    wrong = outside.any()
    if torch.compiler.is_compiling():
        torch._assert_async(~wrong, what)
    elif not hasattr(wrong, "fake_mode") and bool(wrong):  # a fake tensor has no values to check
        raise IndexError(f"{what} (smallest {indices.min()}, largest {indices.max()}).")
