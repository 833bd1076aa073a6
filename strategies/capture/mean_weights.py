"""Means over classes that count by weights, further inputs of a step: where micro-batches of one optimizer step hold
different numbers of classes that count, a mean is that of all micro-batches only if each of them counts by its share.
Other terms of the loss, as those that balance experts, count by rows; so the weights belong to the means.

Invariant: the n-th mean over classes that a forward computes takes the n-th weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import _reduction, functional
from torch.overrides import TorchFunctionMode

ARGUMENTS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
"""Of both functions."""


class WeighedMean(nn.Module):
    """A module, so that its operators have names of their own, and those of the model keep theirs."""

    def forward(self, mean: Tensor, weight: Tensor) -> Tensor:
        """`mean` times `weight`, both scalars; 0 for the weight 0, as the mean of nothing is not a number."""
        return (mean * weight).masked_fill(weight == 0, 0.0).to(mean.dtype)


class MeanWeights(TorchFunctionMode):
    """Multiplies the means over classes that are computed inside of the block by `weights`, scalars; those for which
    there are none stay.

    Attributes:
        means: the means, without weights, with the arguments by name of the calls.
    """

    def __init__(self, weighed: WeighedMean, weights: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._weighed, self._weights = weighed, weights
        self.means: list[tuple[Tensor, dict[str, Any]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (functional.cross_entropy, functional.nll_loss):
            return result
        given = dict(zip(ARGUMENTS, args, strict=False)) | (kwargs or {})
        if _reduction_of(given) != "mean":
            return result
        number = len(self.means)
        self.means.append((result, given))
        return self._weighed(result, self._weights[number]) if number < len(self._weights) else result


def _reduction_of(given: dict[str, Any]) -> str:
    """What a loss with these arguments, some of which may be left out, does with its rows."""
    older = given.get("size_average"), given.get("reduce")
    if older != (None, None):
        return _reduction.legacy_get_string(*older, emit_warning=False)
    reduction: str = given.get("reduction", "mean")
    return reduction
