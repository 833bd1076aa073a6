"""Stage 3 as a rank's memory sees it: parameters are whole only while a module of the program runs, forward or
backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def gather_late(module: nn.Module) -> list[Gathered]:
    """Make every module inside gather its parameters when it runs and let go of them afterwards."""
    found = []
    for one in module.modules():
        own = [parameter for parameter in one._parameters.values() if parameter is not None]
        if own:
            found.append(Gathered(own))
            one.forward = partial(_run, found[-1], one.forward)
    for holder in found:
        holder.release()
    return found


class Gathered:
    """The parameters of one module. Several are gathered into one flat tensor, and copied out of it."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.shapes = [parameter.shape for parameter in parameters]

    def gather(self) -> None:
        missing = [(p, shape) for p, shape in zip(self.parameters, self.shapes, strict=True) if p.shape != shape]
        flat = missing[0][0].new_empty(sum(shape.numel() for _, shape in missing)) if len(missing) > 1 else None
        for parameter, shape in missing:
            parameter.data = parameter.data.new_empty(shape)
        del flat

    def release(self) -> None:
        for parameter in self.parameters:
            parameter.data = parameter.data.new_empty(0)


class _Around(torch.autograd.Function):
    """Calls something in backward, when the gradients of what passes are there."""

    @staticmethod
    def forward(ctx: Any, then: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.then = then
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.then()
        return (None, *gradients)


def _around(then: Callable[[], None], values: tuple[Any, ...]) -> tuple[Any, ...]:
    at = [i for i, value in enumerate(values) if isinstance(value, Tensor) and value.requires_grad]
    if not at or not torch.is_grad_enabled():
        return values
    passed = dict(zip(at, _Around.apply(then, *(values[i] for i in at)), strict=True))  # type: ignore[no-untyped-call]
    return tuple(passed.get(i, value) for i, value in enumerate(values))


def _run(holder: Gathered, forward: Callable[..., Any], *inputs: Any) -> Any:
    inputs = _around(holder.release, inputs)
    holder.gather()
    results = forward(*inputs)
    holder.release()
    found = _around(holder.gather, results if isinstance(results, tuple) else (results,))
    return found if isinstance(results, tuple) else found[0]
