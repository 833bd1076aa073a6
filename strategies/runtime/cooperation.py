"""Cooperative local functions as functions that generated code calls: computation that communicates on its way, in an
order of its own, so that sending and computing overlap.

They are written for any number of ranks at hand. A process has one; the simulation has all, and carries their tensors
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from strategies.core.program import Cooperate, Fused
from strategies.core.steps import Step
from strategies.rules.registry import Landing, Link, resolve
from strategies.runtime.communicator import Communicator
from strategies.runtime.flight_recorder import PLACE, recorder
from strategies.runtime.recompute import carried_once


def steps_of(channel: Fused) -> list[tuple[Step, ...]]:
    """The path of each tensor that a channel sends, once; none where it never sends."""
    paths = [(part.forward or part.backward)[:1] for part in channel.parts]
    return paths if all(paths) else []


def cooperating(instruction: Cooperate, communicator: Communicator, kept: bool) -> Callable[..., Tensor]:
    """The function of one rank. Values `kept` by a recomputed module are computed and sent only once."""
    function: Callable[..., list[Tensor]] = resolve(instruction.target)
    links = [_link(communicator, steps_of(channel)) for channel in instruction.channels]

    def once(run: Callable[[Sequence[Tensor]], list[Tensor]]) -> Callable[[Sequence[Tensor]], list[Tensor]]:
        return carried_once(run) if kept else run

    def cooperate(*args: Any) -> Tensor:
        place = recorder.cells[PLACE]
        return function([partial(_sent, link, place) for link in links], once, [args])[0]

    cooperate.__name__ = cooperate.__qualname__ = instruction.target.partition(".")[2]
    cooperate.__module__ = "cooperate"
    return cooperate


def _link(communicator: Communicator, paths: Sequence[tuple[Step, ...]]) -> Link:
    launch = communicator.launcher(paths) if paths else None

    def link(tensors: Sequence[Sequence[Tensor]]) -> Landing:
        assert launch is not None, "a channel that sends"
        landing = launch(tensors[0])
        return lambda: [landing()]

    return link


def _sent(link: Link, place: int, tensors: Sequence[Sequence[Tensor]]) -> Landing:
    """Sends for the operator at `place`, also in backward."""
    recorder.cells[PLACE] = place
    return link(tensors)
