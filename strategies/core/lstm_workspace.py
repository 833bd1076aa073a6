"""The workspace that a layer of an LSTM keeps for backward on a CPU, where oneDNN computes it.

torch's fake tensors give it no bytes, and it is most of what the layer keeps (1.27 of 1.57 MB for 8 rows of 40 steps at
width 64). Its size depends on the kernel that oneDNN takes for the CPU, so it is read from calls on zeros. More steps
and rows than `MOST` are extrapolated: the size is a sum of products of steps and rows, each rounded up to pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes

LAYER = torch.ops.aten.mkldnn_rnn_layer.default
FEW, MOST = 8, 32
"""Steps and rows of the calls."""


def with_workspace(results: tuple[Tensor, ...], args: Sequence[Any]) -> tuple[Tensor, ...]:
    """The results of a call of `LAYER` on fake tensors, with the workspace that a real one returns."""
    given, weight, recurrent = args[:3]
    steps, rows, width = map(int, given.shape)
    shapes = tuple(weight.shape), tuple(recurrent.shape)
    size = _workspace(steps, rows, width, given.dtype, weight.dtype, shapes, (args[7], *args[9:]))
    *others, workspace = results
    return *others, workspace.new_empty(size, dtype=torch.uint8)


@cache
def _workspace(
    steps: int,
    rows: int,
    width: int,
    dtype: torch.dtype,
    weights: torch.dtype,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    rest: tuple[Any, ...],
) -> int:
    """Its bytes; `shapes` are those of the weights of inputs and of states, `rest` the other arguments."""
    (gates, _), (_, hidden), (reverse, *others) = *shapes, rest

    def called(steps: int, rows: int) -> int:
        with _disable_current_modes(), no_dispatch():
            x, state = (torch.zeros(shape, dtype=dtype) for shape in ((steps, rows, width), (rows, hidden)))
            parameters = (torch.zeros(shape, dtype=weights) for shape in (*shapes, (gates,), (gates,)))
            return int(LAYER(x, *parameters, state, state, reverse, [], *others)[-1].nbytes)

    def of_rows(rows: int) -> float:
        return _extrapolated(lambda steps: called(steps, rows), steps)

    return round(_extrapolated(of_rows, rows))


def _extrapolated(size: Callable[[int], float], count: int) -> float:
    if count <= MOST:
        return size(count)
    few, most = size(FEW), size(MOST)
    return most + (most - few) / (MOST - FEW) * (count - MOST)
