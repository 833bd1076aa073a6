"""What the means of a loss divide by, seen while it runs: the targets that count, their class weights, or a sum.

Batches of an evaluation hold different numbers of them, as where documents end or rows are padded. The mean over all
tokens is that of the batches by their divisors, whatever their size. `runner.planning.counted` finds the same in a
graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from strategies.capture.mean_weights import MeanWeights, are_scalars

CLASS_LOSSES = frozenset({torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default})
MEAN = 1
IN_PLACE = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"})
SUMS = frozenset({torch.sum, torch.count_nonzero, Tensor.sum, Tensor.count_nonzero})


def values(classes: Tensor, ignored: int, weight: Tensor | None) -> Tensor:
    """What each target counts in a mean over classes: 1 or the weight of its class, 0 if it is ignored; float64. Labels
    of any dtype, which a loss casts (as bytes they would be a mask)."""
    classes = classes.long()
    counts = classes != ignored
    if weight is None:
        return counts.double()
    return counts * weight.double()[classes.where(counts, 0)]


@dataclass(frozen=True)
class Total:
    """A sum over the rows of a batch, and the functions through which a mean divides by it, as `clamp(min=1)`."""

    sum: float
    functions: tuple[Callable[[Tensor], Tensor], ...] = ()

    def divisor(self, sum: float) -> float:
        """What a mean divides by where all batches have this sum."""
        value = torch.tensor(sum, dtype=torch.float64)
        for function in self.functions:
            value = function(value)
        return float(value)


class EvaluatedMeans(MeanWeights):
    """The means of a loss that is computed without gradients: those that are written out are known by their divisors,
    functions of a sum. Sums of `constants`, as of weights of tasks, and of values computed from these alone, count
    nothing of a batch.

    Attributes:
        written: by the number of a mean that is written out, what it divides by.
    """

    trained = False

    def __init__(self, *given: Any, constants: Iterable[Tensor] = ()) -> None:
        super().__init__(*given)
        self._constants = {id(one): one for one in constants}
        self.written: dict[int, Total] = {}
        self._totals: dict[int, tuple[Tensor, Total]] = {}
        """Scalars by their ids; they live as long as this does, so that ids stay theirs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number = len(self.means)
        result = super().__torch_function__(func, types, args, kwargs)
        self._note_constants(getattr(func, "__name__", ""), args, kwargs, result)
        if len(self.means) > number and not self.means[number][1]:
            known = self._totals.get(id(args[-1]))
            self.written[number] = Total(float(args[0].numel())) if known is None else known[1]
        elif isinstance(result, Tensor) and not result.dim() and (total := self._total(func, args, kwargs, result)):
            self._totals[id(result)] = result, total
        return result

    def _note_constants(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if self._constants.keys() >= {id(one) for one in tensors}:
            if isinstance(result, Tensor):
                self._constants[id(result)] = result
        elif args and (name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))):
            self._constants.pop(id(args[0]), None)  # it holds something of the batch now

    def _total(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> Total | None:
        """What a scalar result is of a sum; None where it is not known."""
        tensors = [one for one in (*args, *(kwargs or {}).values()) if isinstance(one, Tensor)]
        if len(tensors) != 1 or tensors[0] is not args[0] or id(result) in self._constants:
            return None
        if func in SUMS and tensors[0].dim():
            return Total(float(result))
        if id(args[0]) not in self._totals:
            return None
        _, total = self._totals[id(args[0])]
        return replace(total, functions=(*total.functions, lambda value: func(value, *args[1:], **(kwargs or {}))))

    def is_mean(self, args: tuple[Any, ...]) -> bool:
        return are_scalars(args) and id(args[1]) in self._totals


def total(given: Mapping[str, Any], rows: int) -> Total:
    """What the mean of a call of cross_entropy or nll_loss with these arguments divides by; `rows` where targets are
    probabilities, which all count."""
    target = given["target"]
    if target.is_floating_point():
        return Total(float(rows))
    return Total(float(values(target, given.get("ignore_index", -100), given.get("weight")).sum()))


class Divisors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the divisors of all means over classes that are computed inside of the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found: set[float] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in CLASS_LOSSES and args[3] == MEAN:
            _, classes, weight, _, ignored = args
            self._found.add(float(values(classes, ignored, weight).sum()))
        return func(*args, **(kwargs or {}))

    @property
    def only(self) -> float | None:
        """The divisor, if all means have the same one; None without means, or where they differ."""
        return next(iter(self._found)) if len(self._found) == 1 else None
