"""Losses with every reduction. Sliced batch or element dims leave partial sums; classes stay whole.

`mean` over slices: element losses divide the local mean by the number of slices; cross-entropy and nll sum locally and
divide by the weight of the targets that count (ignore_index, class weights), added up over all slices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from strategies.graph import Operator, Ref, TensorSpec
from strategies.rules.pointwise import broadcast_dims
from strategies.rules.registry import local_function, rule
from strategies.rules.sharding import Dims, Local, Sharding, sharding

NONE, MEAN, SUM = 0, 1, 2
"""torch's codes for `reduction`."""

ELEMENT_REDUCTION = {
    "mse_loss": 2,
    "l1_loss": 2,
    "smooth_l1_loss": 2,
    "huber_loss": 2,
    "soft_margin_loss": 2,
    "kl_div": 2,
    "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4,
}
"""Position of `reduction` among the arguments of element-wise losses."""

CLASS_ARGUMENTS = {
    "cross_entropy_loss": ("weight", "reduction", "ignore_index", "label_smoothing"),
    "nll_loss_nd": ("weight", "reduction", "ignore_index"),
    "nll_loss": ("weight", "reduction", "ignore_index"),
    "nll_loss2d": ("weight", "reduction", "ignore_index"),
}
"""The arguments of class losses after scores and target."""
DEFAULTS = {"weight": None, "reduction": MEAN, "ignore_index": -100, "label_smoothing": 0.0}


def _element_reduction(operator: Operator) -> int:
    position = ELEMENT_REDUCTION[operator.op]
    return int(operator.args[position]) if len(operator.args) > position else MEAN


def _element(operator: Operator, local: Local) -> Ref:
    value = local.call(operator.target, *local.args, **local.kwargs)
    rank = max(len(local.operand_shape(i)) for i in range(len(operator.operands)))
    slices = local.slices(*(f"d{i}" for i in range(rank)))
    if _element_reduction(operator) != MEAN or slices == 1:
        return value
    return local.call("aten.div.Tensor", value, slices)


@rule(*ELEMENT_REDUCTION)
def element_loss(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """Operands that broadcast to one shape; the mean is over that shape."""
    rank = max(len(spec.shape) for spec in specs)
    padded = [(1,) * (rank - len(spec.shape)) + spec.shape for spec in specs]
    shape = tuple(map(max, zip(*padded, strict=True)))
    names = tuple(f"d{i}" for i in range(len(shape)))
    reduced = _element_reduction(operator) != NONE
    return sharding(
        broadcast_dims(specs, shape),
        [() if reduced else names],
        specs,
        operator.results,
        sums=names if reduced else (),
        local=_element,
    )


def _class_options(operator: Operator, args: Sequence[Any]) -> Mapping[str, Any]:
    return DEFAULTS | dict(zip(CLASS_ARGUMENTS[operator.op], args[2:], strict=False))


@local_function
def target_weight(scores: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """What a mean divides by: the number (or class weight) of the targets that count. A scalar, float32 or wider."""
    dtype = torch.promote_types(scores.dtype, torch.float32)  # bfloat16 cannot count beyond 256
    counted = target != ignore_index
    if weight is None:
        return counted.sum(dtype=dtype)
    return weight[target[counted]].sum(dtype=dtype)


@local_function
def divided(total: Tensor, count: Tensor) -> Tensor:
    """`total / count` in the dtype of `total`."""
    return (total / count).to(total.dtype)


def _class(operator: Operator, local: Local) -> Ref:
    options = _class_options(operator, local.args)
    shape = local.operand_shape(0)
    scores_dims, _ = _class_dims(len(shape))
    factors = [factor for factor in scores_dims if factor is not None]
    slices = local.slices(*factors)
    if options["reduction"] != MEAN or slices == 1:
        return local.call(operator.target, *local.args)
    scores, target = local.args[:2]
    arguments = [SUM if name == "reduction" else options[name] for name in CLASS_ARGUMENTS[operator.op]]
    total = local.call(operator.target, scores, target, *arguments)
    if len(local.operand_shape(1)) == len(shape):  # class probabilities: torch divides by the number of predictions
        predictions = math.prod(size for size, factor in zip(shape, scores_dims, strict=True) if factor is not None)
        return local.call("aten.div.Tensor", total, predictions * slices)
    counted = local.call("local.target_weight", scores, target, options["weight"], options["ignore_index"])
    return local.call("local.divided", total, local.sum_over(counted, *factors))


def _class_dims(rank: int) -> tuple[Dims, Dims]:
    """Factors of scores [classes], [n, classes] or [n, classes, d...], and of a target of class indices."""
    if rank == 1:
        return (None,), ()
    names = ("d0", *(f"d{i}" for i in range(2, rank)))
    return (names[0], None, *names[1:]), names


@rule(*CLASS_ARGUMENTS)
def class_loss(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """scores [n, classes, ...], a target of class indices [n, ...] or of probabilities (shaped like the scores)."""
    scores, indices = _class_dims(len(specs[0].shape))
    target = scores if len(specs[1].shape) == len(specs[0].shape) else indices
    weight: list[Dims] = [(None,) * len(spec.shape) for spec in specs[2:]]
    names = [name for name in indices if name is not None]
    reduced = _class_options(operator, operator.args)["reduction"] != NONE
    return sharding(
        [scores, target, *weight],
        [() if reduced else indices],
        specs,
        operator.results,
        sums=names if reduced else (),
        local=_class,
    )
