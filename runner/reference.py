"""One device's truth: the user's own eager module, with the random numbers that `train.random=exact` stands for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from strategies.rules.random import dropout_block


class ExactRandom(TorchFunctionMode):
    """Dropout of an eager module draws from (key, ordinal of the call), as the sharded program does with `random: exact`."""

    def __init__(self, key: int) -> None:
        super().__init__()
        self.key, self.ordinal = key, 0

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (functional.dropout, torch.dropout):
            return func(*args, **kwargs)
        options = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
        p = options.get("p", 0.5)
        if not options.get("training", True) or p == 0:
            return options["input"]
        ordinal, self.ordinal = self.ordinal, self.ordinal + 1
        x: Tensor = options["input"]
        return dropout_block(x, p, self.key, ordinal, tuple(x.shape), (0,) * x.dim())
