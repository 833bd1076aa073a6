"""Parameters of a worker as views of one flat tensor, and their gradients, which micro-batches add up in fp32 or wider.

What a server holds is a part of each flat tensor, which is received and sent without another copy.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of masters and gradients where workers compute with `dtype`."""
    return torch.promote_types(dtype, torch.float32)


class FlatParameters:
    """The parameters `sizes` (elements by name) of `tensors`, which show `values` from now on.

    Args:
        masters: the same in fp32 or wider, which become `values` where the worker computes with that dtype.

    Attributes:
        values: [elements], in the dtype with which the worker computes.
        gradients: [elements], of the slice at hand, in fp32 or wider.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], sizes: Mapping[str, int], dtype: torch.dtype, masters: Tensor | None = None
    ) -> None:
        total = sum(sizes.values())
        self.values = torch.zeros(total, dtype=dtype) if masters is None else masters.to(dtype)
        self.gradients = torch.zeros(total, dtype=wide(dtype))
        self._last = self.gradients if dtype == wide(dtype) else torch.zeros_like(self.values)
        """What backward adds to."""
        parts = [torch.split(flat, [*sizes.values()]) for flat in (self.values, self._last)]
        for name, value, gradient in zip(sizes, *parts, strict=True):
            parameter = tensors[name]
            parameter.data, parameter.grad = value.view(parameter.shape), gradient.view(parameter.shape)

    def begin(self) -> None:
        """A slice begins: its gradients are zero."""
        self.gradients.zero_()

    def collect(self) -> None:
        """Add the gradients of the micro-batch that has just run backward."""
        if self._last is not self.gradients:
            self.gradients += self._last
            self._last.zero_()
