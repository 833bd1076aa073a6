"""One device's truth: the user's own eager module, with the random numbers that `train.random=exact` stands for.

Invariant: the n-th random operator of a forward draws from (key, n), as the captured program does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from strategies.rules.random import dropout_block, mix

DROPOUTS = frozenset({functional.dropout, torch.dropout})
RANDOM = frozenset(
    getattr(owner, name)
    for owner, names in (
        (torch, "rand randn randint randperm normal rand_like randn_like randint_like bernoulli poisson multinomial"),
        (torch, "feature_dropout alpha_dropout feature_alpha_dropout rrelu"),
        (functional, "dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu gumbel_softmax"),
        (Tensor, "bernoulli multinomial bernoulli_ uniform_ normal_ exponential_ random_"),
    )
    for name in names.split()
)
"""Other functions that draw once: each runs whole on every rank, with torch's generators set for the call."""


class ExactRandom(TorchFunctionMode):
    """Makes random functions of an eager module draw from (key, ordinal of the call)."""

    def __init__(self, key: int) -> None:
        super().__init__()
        self.key, self.ordinal = key, 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in DROPOUTS:
            given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
            given["training"] = given.pop("train", given.get("training", True))  # torch.dropout calls it so
            return self._dropout(**given)
        if func not in RANDOM:
            return func(*args, **kwargs)
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        with torch.random.fork_rng(devices):
            torch.manual_seed(mix(self.key, self._next()))
            return func(*args, **kwargs)

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return input
        dropped = dropout_block(input, p, self.key, self._next(), tuple(input.shape), (0,) * input.dim())
        return input.copy_(dropped) if inplace else dropped

    def _next(self) -> int:
        ordinal, self.ordinal = self.ordinal, self.ordinal + 1
        return ordinal
