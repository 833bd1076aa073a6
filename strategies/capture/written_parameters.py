"""The values of parameters before calls of a module write them, in place or by other memory (`weight.data = ...`).

Only what is written is copied: parameters may be most of the memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class WrittenParameters(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what the parameters of `module` hold before operators in this context write them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = [(parameter, parameter.data) for parameter in module.parameters()]
        self._own = {_key(data): data for _, data in self._memory}
        self._before: dict[int, Tensor] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """A hook that torch calls; without it torch would import its compiler."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, OpOverload) and func._schema.is_mutable:
            for key in {_key(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}:
                if key in self._own and key not in self._before:
                    self._before[key] = self._own[key].clone()
        return func(*args, **(kwargs or {}))

    @torch.no_grad()
    def restore(self) -> None:
        """Give the parameters their memory and values back."""
        for parameter, data in self._memory:
            if _key(parameter) != _key(data):
                parameter.data = data
        for key, value in self._before.items():
            self._own[key].copy_(value)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
