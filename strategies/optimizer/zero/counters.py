"""Counts the bytes that DeepSpeed sends for one engine, in the way in which plans predict them, and notes in which call
this rank is.

DeepSpeed's collectives all pass through one backend object. Invariant: what it computes is untouched, and
`stop` leaves the object as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from strategies.core.steps import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from strategies.optimizer.buckets import all_reduce_elements
from strategies.runtime.communicator import Communicator
from strategies.runtime.flight_recorder import GATHER, PLACE, SCATTER, SUM, recorder


def count_on(backend: Any, communicator: Communicator) -> Callable[[], None]:
    """Count the collectives of `backend` in `communicator` from now on. Returns `stop`."""

    def all_reduce(tensor: Tensor, *args: Any, **named: Any) -> Any:
        group = args[1] if len(args) > 1 else named.get("group")
        communicator.count(ALL_REDUCE, all_reduce_elements([tensor.numel()], dist.get_world_size(group)), tensor)
        return _noted(SUM, group, plain["all_reduce"], tensor, *args, **named)

    def all_gather(output_tensor: Tensor, input_tensor: Tensor, group: Any = None, **named: Any) -> Any:
        elements = input_tensor.numel() * (dist.get_world_size(group) - 1)
        communicator.count(ALL_GATHER, elements, input_tensor)
        gather = plain["all_gather_into_tensor"]
        return _noted(GATHER, group, gather, output_tensor, input_tensor, group=group, **named)

    def reduce_scatter(output_tensor: Tensor, input_tensor: Tensor, **named: Any) -> Any:
        elements = output_tensor.numel() * (dist.get_world_size(named.get("group")) - 1)
        communicator.count(REDUCE_SCATTER, elements, output_tensor)
        scatter = plain["reduce_scatter_tensor"]
        return _noted(SCATTER, named.get("group"), scatter, output_tensor, input_tensor, **named)

    counting = {
        "all_reduce": all_reduce, "all_gather_into_tensor": all_gather, "reduce_scatter_tensor": reduce_scatter
    }  # fmt: skip
    plain = {name: getattr(backend, name) for name in counting}
    for name, function in counting.items():
        setattr(backend, name, function)

    def stop() -> None:
        for name in counting:
            delattr(backend, name)

    return stop


def _noted(kind: int, over: Any, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """The result of a call over a group, which the flight recorder shows while it runs."""
    group = dist.group.WORLD if over is None else over
    recorder.know(group, dist.get_process_group_ranks(group), "the ranks of ZeRO")
    recorder.cells[PLACE] = 0
    recorder.enter(group, kind)
    result = call(*args, **named)
    recorder.leave()
    return result
