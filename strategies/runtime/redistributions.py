"""Redistributions as functions that generated code calls: at once, or as a pair that starts one and waits for it.

Autograd runs nodes in the reverse order of their forward calls, so a pair overlaps in forward and backward: in backward
the wait's node launches and the start's node waits. The two share a `Flight` that is made per call; the gradient
between them is an empty token. Invariant: a pair computes, bit for bit, what the one function does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from strategies.core.program import Fused, Redistribute, Start, Wait
from strategies.core.steps import ReshardingPath
from strategies.runtime.communicator import Carrier, CarrierOfAll, Communicator, Landing, Launcher
from strategies.runtime.compiled import opaque, opaque_all
from strategies.runtime.flight_recorder import PLACE, recorder
from strategies.runtime.recompute import carried_once

Edge = Callable[[Tensor], Tensor]


class _Redistribution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: Carrier, backward: Carrier, scale: float, placed: bool) -> Tensor:
        ctx.carrier, ctx.scale, ctx.place = backward, scale, recorder.cells[PLACE] if placed else 0
        result = forward(tensor)
        return result.view_as(result) if result is tensor else result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if ctx.place:
            recorder.cells[PLACE] = ctx.place
        if ctx.scale != 1:
            gradient = gradient * ctx.scale
        return ctx.carrier(gradient), None, None, None, None


def edge(instruction: Redistribute, communicator: Communicator, compiled: bool = False, kept: bool = False) -> Edge:
    """The function that redistributes a value for its use. Values `kept` by a recomputed module are sent only once."""

    def carrier(steps: ReshardingPath) -> Carrier:
        found = communicator.carrier(steps)
        return opaque(found, steps, communicator.mesh) if compiled else found

    forward, backward, scale = carrier(instruction.forward), carrier(instruction.backward), instruction.scale
    if kept:
        forward = carried_once(forward)
    if instruction.differentiable:

        def redistribute(tensor: Tensor) -> Tensor:
            result: Tensor = _Redistribution.apply(tensor, forward, backward, scale, not compiled)  # type: ignore[no-untyped-call]
            return result
    else:

        def redistribute(tensor: Tensor) -> Tensor:
            return forward(tensor.detach())

    return _named(redistribute, instruction.forward)


def _named(function: Callable[..., Any], steps: ReshardingPath, prefix: str = "") -> Callable[..., Any]:
    text = prefix + (" then ".join(map(str, steps)) or "keep")
    function.__name__ = function.__qualname__ = re.sub(r"\W+", "_", text).strip("_")
    function.__module__ = "redistribute"
    return function


class _Redistributions(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        forward: CarrierOfAll,
        backward: CarrierOfAll,
        scales: tuple[float, ...],
        placed: bool,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.carrier, ctx.scales, ctx.place = backward, scales, recorder.cells[PLACE] if placed else 0
        results = zip(forward(tensors), tensors, strict=True)
        return tuple(result.view_as(result) if result is tensor else result for result, tensor in results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        if ctx.place:
            recorder.cells[PLACE] = ctx.place
        pairs = zip(gradients, ctx.scales, strict=True)
        found = ctx.carrier([gradient if scale == 1 else gradient * scale for gradient, scale in pairs])
        return (None, None, None, None, *found)


def edges(instruction: Fused, communicator: Communicator, compiled: bool = False) -> Callable[..., Sequence[Tensor]]:
    """The function that carries several values to their uses, with one call for all of them."""

    def carrier(chains: Sequence[ReshardingPath]) -> CarrierOfAll:
        found = communicator.carrier_of_all(chains)
        return opaque_all(found, chains, communicator.mesh) if compiled else found

    forward = carrier([part.forward for part in instruction.parts])
    backward = carrier([part.backward for part in instruction.parts])
    scales = tuple(part.scale for part in instruction.parts)
    if instruction.differentiable:

        def redistribute(*tensors: Tensor) -> Sequence[Tensor]:
            results: Sequence[Tensor] = _Redistributions.apply(forward, backward, scales, not compiled, *tensors)  # type: ignore[no-untyped-call]
            return results
    else:

        def redistribute(*tensors: Tensor) -> Sequence[Tensor]:
            return forward([tensor.detach() for tensor in tensors])

    return _named(redistribute, instruction.parts[0].forward)


class Flight:
    """The results in flight between a start and its wait: values in forward, then gradients in backward."""

    def __init__(self, landing: Landing) -> None:
        self._landing: Landing | None = landing

    def launch(self, landing: Landing) -> None:
        self._landing = landing

    def land(self) -> list[Tensor]:
        """Wait, once per launch."""
        assert self._landing is not None, "a redistribution is waited for once"
        landing, self._landing = self._landing, None
        return landing()


Token = tuple[Tensor | None, Flight]
"""What a start hands to its wait; through the tensor the gradient's token comes back."""


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: Flight, *tensors: Tensor) -> Tensor:
        ctx.flight, ctx.place = flight, recorder.cells[PLACE]
        return tensors[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Any, ...]:
        recorder.cells[PLACE] = ctx.place
        return (None, *ctx.flight.land())


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: Flight, backward: Launcher, scales: tuple[float, ...], token: Tensor) -> Any:
        ctx.flight, ctx.launcher, ctx.scales, ctx.place = flight, backward, scales, recorder.cells[PLACE]
        results = tuple(result.detach() for result in flight.land())
        return results[0] if len(scales) == 1 else results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        recorder.cells[PLACE] = ctx.place
        pairs = zip(gradients, ctx.scales, strict=True)
        scaled = [gradient if scale == 1 else gradient * scale for gradient, scale in pairs]
        ctx.flight.launch(ctx.launcher(scaled))
        return None, None, None, gradients[0].new_zeros(())


def starting(instruction: Start, communicator: Communicator) -> Callable[..., Token]:
    """The function that begins to carry values to their uses."""
    parts = instruction.of.parts
    launch = communicator.launcher([part.forward for part in parts])
    differentiable = instruction.of.differentiable

    def start(*tensors: Tensor) -> Token:
        flight = Flight(launch([tensor.detach() for tensor in tensors]))
        if not differentiable:
            return None, flight
        return _Start.apply(flight, *tensors), flight  # type: ignore[no-untyped-call]

    return _named(start, parts[0].forward, "start ")


def waiting(instruction: Wait, communicator: Communicator) -> Callable[[Token], Any]:
    """The function that waits for what `starting` began: a tensor, or one per joined redistribution."""
    parts = instruction.of.parts
    backward = communicator.launcher([part.backward for part in parts]) if instruction.of.differentiable else None
    scales, joined = tuple(part.scale for part in parts), isinstance(instruction.of, Fused)

    def wait(started: Token) -> Any:
        token, flight = started
        if backward is None:
            results = flight.land()
            return results if joined else results[0]
        return _Wait.apply(flight, backward, scales, token)  # type: ignore[no-untyped-call]

    return _named(wait, parts[0].forward, "wait for ")
