"""The last thing a step does: written buffers take their new values.

Until then nothing writes, so every operator of the step reads what a buffer held before, and operators that read the
new value were given it by name. Autograd keeps no old value of a buffer that one device would not keep too.
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
