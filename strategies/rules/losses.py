"""Losses with every reduction. Sliced batch or element dims leave partial sums; classes stay whole.

`mean` over slices: element losses divide the local mean by the number of slices; cross-entropy and nll sum locally and divide by
the weight of the targets that count (ignore_index, class weights), added up over all slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from strategies.graph import Operator, Ref, TensorSpec
from strategies.rules.pointwise import broadcast_dims
from strategies.rules.registry import local_function, rule
from strategies.rules.sharding import Dims, Local, Sharding, sharding

NONE, MEAN, SUM = 0, 1, 2
"""torch's codes for `reduction`."""

CLASS_ARGUMENTS = {
    "cross_entropy_loss": ("weight", "reduction", "ignore_index", "label_smoothing"),
    "nll_loss_nd": ("weight", "reduction", "ignore_index"),
    "nll_loss": ("weight", "reduction", "ignore_index"),
    "nll_loss2d": ("weight", "reduction", "ignore_index"),
}
ELEMENT_REDUCTION = {"mse_loss": 2, "l1_loss": 2, "smooth_l1_loss": 2, "huber_loss": 2, "soft_margin_loss": 2, "binary_cross_entropy": 3,
                     "binary_cross_entropy_with_logits": 4, "kl_div": 2}  # fmt: skip
"""Position of `reduction` among the arguments of element-wise losses."""


def _element_reduction(operator: Operator) -> int:
    position = ELEMENT_REDUCTION[operator.op]
    code = operator.keywords.get("reduction", operator.args[position] if len(operator.args) > position else MEAN)
    return int(code)


def _element(operator: Operator, local: Local) -> Ref:
    value = local.call(operator.target, *local.args, **local.kwargs)
    rank = max(len(local.operand_shape(i)) for i in range(len(operator.operands)))
    slices = local.slices(*(f"d{i}" for i in range(rank)))
    return local.call("aten.div.Tensor", value, slices) if _element_reduction(operator) == MEAN and slices > 1 else value


@rule(*ELEMENT_REDUCTION)
def element_loss(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    reduction = _element_reduction(operator)
    rank = max(len(spec.shape) for spec in specs)
    shape = tuple(max((spec.shape[len(spec.shape) - rank + i] for spec in specs if len(spec.shape) - rank + i >= 0), default=1) for i in range(rank))
    operands = broadcast_dims(specs, shape)
    names: Dims = tuple(f"d{i}" for i in range(rank))
    result: Dims = names if reduction == NONE else ()
    sums = [] if reduction == NONE else [name for name in names if name is not None]
    found = sharding(operands, [result], specs, operator.results, sums=sums, local=_element)
    return found


def _class_options(operator: Operator, args: Sequence[Any], keywords: dict[str, Any]) -> dict[str, Any]:
    defaults = {"weight": None, "reduction": MEAN, "ignore_index": -100, "label_smoothing": 0.0}
    return defaults | dict(zip(CLASS_ARGUMENTS[operator.op], args[2:], strict=False)) | keywords


@local_function
def target_weight(scores: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """What a mean divides by: the number (or class weight) of the targets that count, as a scalar of the scores' dtype."""
    counted = target != ignore_index
    if weight is None:
        return counted.sum().to(scores.dtype)
    return torch.where(counted, weight[torch.where(counted, target, 0)], 0).sum().to(scores.dtype)


def _class(operator: Operator, local: Local) -> Ref:
    options = _class_options(operator, local.args, local.kwargs)
    dims = [factor for factor in _class_dims(local.operand_shape(0))[0] if factor is not None]
    slices = local.slices(*dims)
    if options["reduction"] != MEAN or slices == 1:
        return local.call(operator.target, *local.args, **local.kwargs)
    scores, target = local.args[:2]
    arguments = [options[name] if name != "reduction" else SUM for name in CLASS_ARGUMENTS[operator.op]]
    total = local.call(operator.target, scores, target, *arguments)
    if len(local.operand_shape(0)) == len(local.operand_shape(1)):  # class probabilities: torch divides by the batch size
        count = int(operator_batch(local.operand_shape(0))) * slices
        return local.call("aten.div.Tensor", total, count)
    counted = local.call("local.target_weight", scores, target, options["weight"], options["ignore_index"])
    return local.call("aten.div.Tensor", total, local.sum_over(counted, *dims))


def operator_batch(shape: Sequence[int]) -> int:
    """Predictions in scores of shape [n, classes, ...]."""
    count = 1
    for dim, size in enumerate(shape):
        count *= 1 if dim == (1 if len(shape) > 1 else 0) else size
    return count


def _class_dims(shape: Sequence[int]) -> tuple[Dims, Dims]:
    """Factors of scores [classes], [n, classes] or [n, classes, d...], and of a target of class indices."""
    if len(shape) == 1:
        return (None,), ()
    names = ["d0", *(f"d{i}" for i in range(2, len(shape)))]
    return (names[0], None, *names[1:]), tuple(names)


@rule(*CLASS_ARGUMENTS)
def class_loss(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """scores [n, classes, ...] and a target of class indices [n, ...] or class probabilities (shaped like the scores)."""
    options = _class_options(operator, operator.args, operator.keywords)
    scores, indices = _class_dims(specs[0].shape)
    probabilities = specs[1].floating
    if probabilities and options["reduction"] == MEAN and len(specs[0].shape) < 2:
        return None
    target = scores if probabilities else indices
    weight: list[Dims] = [(None,) * len(spec.shape) for spec in specs[2:]]
    names = [name for name in scores if name is not None]
    result: Dims = tuple(names) if options["reduction"] == NONE else ()
    sums = [] if options["reduction"] == NONE else names
    return sharding([scores, target, *weight], [result], specs, operator.results, sums=sums, local=_class)
