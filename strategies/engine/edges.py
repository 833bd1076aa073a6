"""The functions that carry values to their uses: one differentiable redistribution each, named after what it does so
that generated code can be read.

Invariant: forward carries out the chain of the forward pass, backward that of the gradient, times its scale.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from strategies.engine.communicator import Carrier, CarrierOfAll, Communicator
from strategies.engine.compiled import opaque, opaque_all
from strategies.engine.program import Fused, Redistribute
from strategies.engine.recompute import carried_once
from strategies.redistribution import Chain

Edge = Callable[[Tensor], Tensor]


class _Redistribution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: Carrier, backward: Carrier, scale: float) -> Tensor:
        ctx.carrier, ctx.scale = backward, scale
        result = forward(tensor)
        return result.view_as(result) if result is tensor else result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if ctx.scale != 1:
            gradient = gradient * ctx.scale
        return ctx.carrier(gradient), None, None, None


def edge(instruction: Redistribute, communicator: Communicator, compiled: bool = False, kept: bool = False) -> Edge:
    """The function that carries a value to its use. What is `kept` by a recomputed module is sent only once."""

    def carrier(steps: Chain) -> Carrier:
        found = communicator.carrier(steps)
        return opaque(found, steps, communicator.mesh) if compiled else found

    forward, backward, scale = carrier(instruction.forward), carrier(instruction.backward), instruction.scale
    if kept:
        forward = carried_once(forward)
    if instruction.differentiable:

        def redistribute(tensor: Tensor) -> Tensor:
            result: Tensor = _Redistribution.apply(tensor, forward, backward, scale)  # type: ignore[no-untyped-call]
            return result
    else:

        def redistribute(tensor: Tensor) -> Tensor:
            return forward(tensor.detach())

    return _named(redistribute, instruction.forward)


def _named(function: Callable[..., Any], steps: Chain) -> Callable[..., Any]:
    text = " then ".join(map(str, steps)) or "keep"
    function.__name__ = function.__qualname__ = re.sub(r"\W+", "_", text).strip("_")
    function.__module__ = "redistribute"
    return function


class _Redistributions(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, forward: CarrierOfAll, backward: CarrierOfAll, scales: tuple[float, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.carrier, ctx.scales = backward, scales
        results = zip(forward(tensors), tensors, strict=True)
        return tuple(result.view_as(result) if result is tensor else result for result, tensor in results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        pairs = zip(gradients, ctx.scales, strict=True)
        found = ctx.carrier([gradient if scale == 1 else gradient * scale for gradient, scale in pairs])
        return (None, None, None, *found)


def edges(instruction: Fused, communicator: Communicator, compiled: bool = False) -> Callable[..., Sequence[Tensor]]:
    """The function that carries several values to their uses, with one call for all of them."""

    def carrier(chains: Sequence[Chain]) -> CarrierOfAll:
        found = communicator.carrier_of_all(chains)
        return opaque_all(found, chains, communicator.mesh) if compiled else found

    forward = carrier([part.forward for part in instruction.parts])
    backward = carrier([part.backward for part in instruction.parts])
    scales = tuple(part.scale for part in instruction.parts)
    if instruction.differentiable:

        def redistribute(*tensors: Tensor) -> Sequence[Tensor]:
            results: Sequence[Tensor] = _Redistributions.apply(forward, backward, scales, *tensors)  # type: ignore[no-untyped-call]
            return results
    else:

        def redistribute(*tensors: Tensor) -> Sequence[Tensor]:
            return forward([tensor.detach() for tensor in tensors])

    return _named(redistribute, instruction.parts[0].forward)
