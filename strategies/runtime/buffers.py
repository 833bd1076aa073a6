"""The buffer update at the end of a step: written buffers take their new values.

Nothing writes before it, so every operator of the step reads the old value of a buffer, and operators that need the new
value take it as an operand. Autograd keeps no old value of a buffer that one device would not keep too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def store(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write each value into its buffer, as if all were written at once: a value may be the memory of another buffer."""
    written = {buffer.untyped_storage().data_ptr() for buffer in buffers}
    with torch.no_grad():
        fresh = [value.clone() if value.untyped_storage().data_ptr() in written else value for value in values]
        for buffer, value in zip(buffers, fresh, strict=True):
            buffer.copy_(value)
