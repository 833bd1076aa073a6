"""Indices outside a table, told where they are used, for local functions that would mask them away.

Invariant: no device waits for it. A GPU is not asked at all, as torch's own operators do not; on the CPU a wrong index
raises IndexError, and in a compiled program, which cannot branch on values, an assertion of the program fails.
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
    elif not hasattr(wrong, "fake_mode") and bool(wrong):  # a tensor without numbers has nothing to tell
        raise IndexError(f"{what} (smallest {indices.min()}, largest {indices.max()}).")
