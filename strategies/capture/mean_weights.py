"""Means of a loss that count by weights, further inputs of a step: where micro-batches of one optimizer step hold
different numbers of classes that count, a mean is that of all micro-batches only if each of them counts by its share.
Other terms of the loss, as those that balance experts, count by rows; so the weights belong to the means. A mean that
is written out is a scalar divided by one without a gradient.

Invariant: the n-th mean that a forward computes takes the n-th weight.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import _reduction, functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from strategies.capture.masked import JOINING, LOSSES, joins_rows, merged_dims

ARGUMENTS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
"""Of both functions."""
DIVISIONS = frozenset({"__truediv__", "div", "div_", "divide", "true_divide"})
SELECTIONS = frozenset({"__getitem__", "masked_select"})


class SafeDivisor(nn.Module):
    """What a mean divides by, and 1 where it has the weight 0, since gradients of a division by 0 are no numbers."""

    def forward(self, divisor: Tensor, weight: Tensor) -> Tensor:
        """Both are scalars."""
        return divisor.masked_fill(weight == 0, 1)


class WeighedMean(nn.Module):
    """A module, so that its operators have names of their own, and those of the model keep theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.divisor = SafeDivisor()

    def forward(self, mean: Tensor, weight: Tensor) -> Tensor:
        """`mean` times `weight`, both scalars; 0 for the weight 0, as the mean of nothing is not a number."""
        return (mean * weight).masked_fill(weight == 0, 0.0).to(mean.dtype)


class MeanWeights(TorchFunctionMode):
    """Multiplies the means that are computed inside of the block by `weights`, scalars; those for which there are none
    stay.

    Attributes:
        means: the means, without weights, with the arguments by name of the calls; none of those that are written out.
    """

    trained = True
    """Whether only means with a gradient are written out."""

    def __init__(self, weighed: WeighedMean, weights: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._weighed, self._weights = weighed, weights
        self.means: list[tuple[Tensor, dict[str, Any]]] = []
        self._selected: dict[int, weakref.ref[Tensor]] = {}
        """By masks, of which means divide by how many there are; by id, which another tensor takes after its death."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number, name = len(self.means), getattr(func, "__name__", "")
        divides = not kwargs and name in DIVISIONS and self.is_mean(args)
        if divides and number < len(self._weights) and isinstance(args[1], Tensor):
            args = args[0], self._weighed.divisor(args[1], self._weights[number])
        result = func(*args, **(kwargs or {}))
        if func in (functional.cross_entropy, functional.nll_loss):
            given = dict(zip(ARGUMENTS, args, strict=False)) | (kwargs or {})
            if _reduction_of(given) != "mean":
                return result
        elif divides or self._is_of_selected(func, name, args, kwargs or {}, result):
            given = {}
        else:
            return result
        self.means.append((result, given))
        if number >= len(self._weights):
            return result
        weighed = self._weighed(result, self._weights[number])
        return result.copy_(weighed) if name == "div_" else weighed

    def _is_of_selected(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
        """Whether a call is the mean of elements that a mask has selected, or of a function of each."""
        if name in SELECTIONS and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            self._selected[id(result)] = weakref.ref(result)
            return False
        operands = tree_leaves(args[:1]) if name in JOINING else args
        known = next((one for one in operands if (at := self._selected.get(id(one))) is not None and at() is one), None)
        if known is None or not known.dim():
            return False
        if not isinstance(result, Tensor) or result.dim():
            joins = joins_rows(name, args, kwargs) or (args[0] is known and merged_dims(name, args, kwargs) > 1)
            for one in tree_leaves(result):  # largest elements come with their places
                # sizes may be symbols that cannot be compared
                if isinstance(one, Tensor) and one.dim() and (joins or str(one.shape[0]) == str(known.shape[0])):
                    self._selected[id(one)] = weakref.ref(one)
            return False
        if inspect.unwrap(func) in LOSSES:
            bound = inspect.signature(func).bind(*args, **kwargs)
            bound.apply_defaults()
            means = _reduction_of(bound.arguments) in ("mean", "batchmean")
        else:
            means = name == "mean" and len(args) == 1 and not kwargs
        return means and (result.requires_grad or not self.trained)

    def is_mean(self, args: tuple[Any, ...]) -> bool:
        """Whether a division is a mean: of a scalar with a gradient by one without, or by a number that a tensor holds,
        which is a symbol where the forward is captured."""
        if len(args) == 2 and isinstance(args[1], torch.SymInt | torch.SymFloat):
            return isinstance(args[0], Tensor) and not args[0].dim() and args[0].requires_grad
        return are_scalars(args) and args[0].requires_grad and not args[1].requires_grad


def are_scalars(args: tuple[Any, ...]) -> bool:
    """Whether these are two tensors without dims."""
    return len(args) == 2 and all(isinstance(one, Tensor) and not one.dim() for one in args)


def _reduction_of(given: dict[str, Any]) -> str:
    """What a loss with these arguments, some of which may be left out, does with its rows."""
    older = given.get("size_average"), given.get("reduce")
    if older != (None, None):
        return _reduction.legacy_get_string(*older, emit_warning=False)
    reduction: str = given.get("reduction", "mean")
    return reduction
