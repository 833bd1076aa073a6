"""One device's truth: the user's own eager module, with the random numbers that `train.random=exact` stands for.

Invariant: the n-th random operator of a forward draws from (key, n), as the captured program does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from strategies.rules.arguments import named
from strategies.rules.attention import attention_block
from strategies.rules.random import dropout_block, mix

DROPOUTS = frozenset({functional.dropout, torch.dropout})
COMPOSED = frozenset({functional.dropout1d, functional.dropout2d, functional.dropout3d, functional.gumbel_softmax})
"""Functions that draw once, through an operator of another name."""


@cache
def _drawing(name: str) -> bool:
    """Whether torch's operator of this name reads generators; each call runs whole on every rank and draws once."""
    packet: Any = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return False
    overloads: list[Any] = [getattr(packet, overload) for overload in packet.overloads()]  # type: ignore[no-untyped-call]
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


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
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            return self._attention(func, args, kwargs)
        if func is functional.multi_head_attention_forward:
            with self._inside("dropout", "scaled_dot_product_attention"):
                return func(*args, **kwargs)
        if func not in COMPOSED and not _drawing(name):
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

    def _attention(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        given = named("aten.scaled_dot_product_attention.default", args, kwargs)
        if given["dropout_p"] == 0:
            return func(*args, **kwargs)
        query, key, value, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
        lead = torch.broadcast_shapes(
            *(t.shape[:-2] for t in ((query,) if given["enable_gqa"] else (query, key, value)))
        )
        shape = (*lead, query.shape[-2], key.shape[-2])
        start = 0 if given["is_causal"] else None
        options = given["dropout_p"], given["scale"], given["enable_gqa"]
        zeros = (0,) * len(shape)
        return attention_block(query, key, value, mask, start, *options, self.key, self._next(), shape, zeros)

    @contextmanager
    def _inside(self, *names: str) -> Iterator[None]:
        """Put this mode before functions of `functional` that another one of it calls: torch has switched modes off
        there."""
        before = {name: getattr(functional, name) for name in names}
        for name, function in before.items():
            setattr(
                functional, name, lambda *args, _of=function, **kwargs: self.__torch_function__(_of, (), args, kwargs)
            )
        try:
            yield
        finally:
            for name, function in before.items():
                setattr(functional, name, function)

    def _next(self) -> int:
        ordinal, self.ordinal = self.ordinal, self.ordinal + 1
        return ordinal
