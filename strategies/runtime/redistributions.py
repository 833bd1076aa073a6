"""Redistributions as functions that generated code calls: at once, or as a pair that starts one and waits for it.

Autograd runs nodes in the reverse order of their forward calls, so a pair overlaps in forward and backward: in backward
the wait's node launches and the start's node waits. The two share a `Flight` that is made per call; the gradient
between them is an empty token. Invariant: a pair computes, bit for bit, what the one function does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strategies.core.program import Fused, Redistribute
from strategies.core.steps import ReshardingPath
from strategies.runtime.communicator import Carrier, Communicator, Landing, Launcher
from strategies.runtime.compiled import opaque_carrier
from strategies.runtime.flight_recorder import PLACE, recorder
from strategies.runtime.recompute import carried_once


def _scaled(gradients: Sequence[Tensor], scales: Sequence[float]) -> list[Tensor]:
    pairs = zip(gradients, scales, strict=True)
    return [gradient if scale == 1 else gradient * scale for gradient, scale in pairs]


def _mark_untrained(ctx: Any, results: Sequence[Tensor], trained: Sequence[bool]) -> None:
    """Of values that are joined, those that need no gradient come back as such: some operators refuse a target that
    has one."""
    if any(trained) and not all(trained):
        ctx.mark_non_differentiable(*[one for one, learns in zip(results, trained, strict=True) if not learns])


class Redistribution(torch.autograd.Function):
    """Carries tensors forward, and their gradients, times `scales`, backward."""

    @staticmethod
    def forward(
        ctx: Any, forward: Carrier, backward: Carrier, scales: tuple[float, ...], placed: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.carrier, ctx.scales, ctx.place = backward, scales, recorder.cells[PLACE] if placed else 0
        carried = zip(forward(tensors), tensors, strict=True)
        results = tuple([result.view_as(result) if result is tensor else result for result, tensor in carried])
        _mark_untrained(ctx, results, ctx.needs_input_grad[-len(tensors) :])
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        if ctx.place:
            recorder.cells[PLACE] = ctx.place
        return (None, None, None, None, *ctx.carrier(_scaled(gradients, ctx.scales)))


def redistributing(
    instruction: Redistribute | Fused, communicator: Communicator, compiled: bool = False, kept: bool = False
) -> Callable[..., Any]:
    """The function that carries values to their uses, with one call for all of them: to a tensor, or to one per joined
    redistribution. Values `kept` by a recomputed module are sent only once."""

    def carrier(paths: Sequence[ReshardingPath]) -> Carrier:
        carry = communicator.carrier(paths)
        return opaque_carrier(carry, paths, communicator.mesh) if compiled else carry

    parts, joined = instruction.parts, isinstance(instruction, Fused)
    forward, backward = carrier([part.forward for part in parts]), carrier([part.backward for part in parts])
    scales = tuple(part.scale for part in parts)
    if kept:
        forward = carried_once(forward)
    if instruction.differentiable:

        def redistribute(*tensors: Tensor) -> Any:
            results = Redistribution.apply(forward, backward, scales, not compiled, *tensors)  # type: ignore[no-untyped-call]
            return results if joined else results[0]
    else:

        def redistribute(*tensors: Tensor) -> Any:
            results = forward([tensor.detach() for tensor in tensors])
            return results if joined else results[0]

    return _named(redistribute, parts[0].forward)


def _named(function: Callable[..., Any], steps: ReshardingPath, prefix: str = "") -> Callable[..., Any]:
    text = prefix + (" then ".join(map(str, steps)) or "keep")
    function.__name__ = function.__qualname__ = re.sub(r"\W+", "_", text).strip("_")
    function.__module__ = "redistribute"
    return function


@dataclass
class Flight:
    """The results in flight between a start and its wait: values in forward, then gradients in backward. `trained`:
    which of the values need a gradient."""

    landing: Landing | None
    trained: tuple[bool, ...] = ()

    def land(self) -> list[Tensor]:
        """Wait, once per launch."""
        assert self.landing is not None, "a redistribution is waited for once"
        landing, self.landing = self.landing, None
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
        _mark_untrained(ctx, results, flight.trained)
        return results[0] if len(scales) == 1 else results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        recorder.cells[PLACE] = ctx.place
        ctx.flight.landing = ctx.launcher(_scaled(gradients, ctx.scales))
        return None, None, None, gradients[0].new_zeros(())


def starting(of: Redistribute | Fused, communicator: Communicator) -> Callable[..., Token]:
    """The function that begins to carry values to their uses."""
    launch = communicator.launcher([part.forward for part in of.parts])
    differentiable = of.differentiable

    def start(*tensors: Tensor) -> Token:
        flight = Flight(
            launch([tensor.detach() for tensor in tensors]), tuple([tensor.requires_grad for tensor in tensors])
        )
        return (_Start.apply(flight, *tensors) if differentiable else None), flight  # type: ignore[no-untyped-call]

    return _named(start, of.parts[0].forward, "start ")


def waiting(of: Redistribute | Fused, communicator: Communicator) -> Callable[[Token], Any]:
    """The function that waits for what `starting` began: a tensor, or one per joined redistribution."""
    backward = communicator.launcher([part.backward for part in of.parts]) if of.differentiable else None
    scales, joined = tuple(part.scale for part in of.parts), isinstance(of, Fused)

    def wait(started: Token) -> Any:
        token, flight = started
        if backward is None:
            results = flight.land()
            return results if joined else results[0]
        return _Wait.apply(flight, backward, scales, token)  # type: ignore[no-untyped-call]

    return _named(wait, of.parts[0].forward, "wait for ")
