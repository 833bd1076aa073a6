"""Losses of elements, of rows and over classes, with every reduction. Sliced elements or rows leave partial sums.

A mean is the sum over slices of their means, each divided by the number of slices of its size. The dim over which a
row's own loss is taken stays replicated, except for classes (cross-entropy and negative log likelihood), which are a
padded factor: a slice of the classes needs one thing from the others, the logarithm of the sum of all exponentials;
each slice sends its largest score and its sum of exponentials relative to that. Then it adds up its own classes' part
of the loss, so that the losses of the slices are summands. `mean` divides by the weight of the targets that count
(ignore_index, class weights), added up over all predictions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from strategies.core.graph import Operator, Ref, TensorSpec, wide
from strategies.rules.indexing import check_inside
from strategies.rules.notation import mean_of
from strategies.rules.registry import arguments, local_function, rule
from strategies.rules.sharding import Dims, Local, Sharding, broadcast_dims, numbered, sharding, unsliced

NONE, MEAN, SUM = 0, 1, 2
"""torch's codes for `reduction`."""


def _elements_or_rows(operator: Operator, specs: Sequence[TensorSpec], operands: Sequence[Dims], rank: int) -> Sharding:
    """Losses [d0, d1, ...] of `rank` dims, or reduced."""
    names, reduction = [f"d{i}" for i in range(rank)], arguments(operator)["reduction"]
    results, sums = [tuple(names)] if reduction == NONE else [()], names if reduction != NONE else ()
    local = mean_of(names) if reduction == MEAN else None
    return sharding(operator, specs, operands, results, sums=sums, local=local)


@rule(
    *"""
binary_cross_entropy binary_cross_entropy_with_logits hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss
mse_loss poisson_nll_loss smooth_l1_loss soft_margin_loss
""".split()
)
def element_loss(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """Operands that broadcast to one shape; the mean is over that shape."""
    rank = max(len(spec.shape) for spec in specs)
    shapes = [(1,) * (rank - len(spec.shape)) + spec.shape for spec in specs]
    return _elements_or_rows(operator, specs, broadcast_dims(specs, tuple(map(max, zip(*shapes, strict=True)))), rank)


@rule("cosine_embedding_loss", "multi_margin_loss", "multilabel_margin_loss", "triplet_margin_loss")
def row_loss(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x [n, d] (or more leading dims), others like it, and targets [n]; a single row has nothing to slice."""
    shape = specs[0].shape
    names = numbered(len(shape) - 1)
    of_shape: dict[tuple[int, ...], Dims] = {shape: (*names, None), shape[:-1]: names} if names else {}
    rows = [of_shape.get(spec.shape) for spec in specs]
    if operator.op == "multi_margin_loss":
        rows[2:3] = unsliced(specs[2:3])  # a weight per class
    known = [dims for dims in rows if dims is not None]
    return _elements_or_rows(operator, specs, known, len(names)) if len(known) == len(rows) else None


def _wide(dtype: torch.dtype) -> torch.dtype:
    """float32 or wider: bfloat16 cannot count beyond 256, and is too coarse for sums over many classes."""
    return torch.promote_types(dtype, torch.float32)


def _class_dim(scores: Tensor) -> int:
    return min(1, scores.dim() - 1)


def _padding(scores: Tensor, start: int, total: int) -> Tensor | None:
    """The mask of the slice's padding classes, shaped to broadcast against `scores`; None if there are none."""
    classes = scores.shape[_class_dim(scores)]
    if start + classes <= total:
        return None
    past = torch.arange(start, start + classes, device=scores.device) >= total
    return past.view(-1, *(1,) * (scores.dim() - 1 - _class_dim(scores)))


@local_function
def target_weight(scores: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """The divisor of a mean: the number (or class weight) of the targets that count. A scalar, float32 or wider."""
    counted = target != ignore_index
    if weight is None:
        return counted.sum(dtype=_wide(scores.dtype))
    return torch.where(counted, weight[target.where(counted, 0)], 0).sum(dtype=_wide(scores.dtype))


@local_function
def divided(total: Tensor, count: Tensor) -> Tensor:
    """`total / count` in the dtype of `total`."""
    return (total / count).to(total.dtype)


@local_function
def exponentials(scores: Tensor, start: int, total: int) -> Tensor:
    """The largest score m of the classes of one slice, and the sum of exp(score - m): [2, ...] without the class dim.

    m is no smaller than the smallest finite number, so that a slice with no class at all, or whose scores are all -inf,
    has the sum 0 and gradients of 0.
    """
    past = _padding(scores, start, total)
    if past is not None:
        scores = scores.masked_fill(past, -math.inf)
    scores, dim = scores.to(_wide(scores.dtype)), _class_dim(scores)
    peak = scores.detach().amax(dim, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    return torch.stack((peak.squeeze(dim), (scores - peak).exp().sum(dim)))


def _logarithm(slices: Tensor) -> Tensor:
    """log(sum(exp(scores))) over all classes, from every slice's `exponentials` [slices, 2, ...]."""
    peaks, sums = slices.unbind(1)
    peak = peaks.amax(0)
    return (sums * (peaks - peak).exp()).sum(0).log() + peak


@local_function
def class_slice_loss(
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None,
    slices: Tensor | None,
    start: int,
    total: int,
    ignore_index: int,
    smoothing: float,
    reduced: bool,
) -> Tensor:
    """The part of the loss that one slice of the classes adds: per prediction, or `reduced` to their sum.

    `scores` [n, classes of the slice, ...]; `target` global class indices [n, ...], or probabilities like `scores`;
    `slices` the exponentials of all slices (None: scores are log probabilities already). Raises IndexError on the CPU
    for a target outside the `total` classes, as the unsliced operator would (a GPU would have to wait for it).
    """
    exact = scores.to(_wide(scores.dtype))
    logarithm = torch.zeros((), dtype=exact.dtype, device=exact.device) if slices is None else _logarithm(slices)
    if target.dim() == scores.dim():
        spread = target.to(exact.dtype) * (1 - smoothing) + smoothing / total
        losses = _spread_loss(exact, spread * _class_weights(exact, weight, start, total), logarithm)
    else:
        losses = (1 - smoothing) * _index_loss(exact, target, weight, logarithm, start, total, ignore_index)
        if smoothing:
            spread = _class_weights(exact, weight, start, total) * (smoothing / total)
            ignored = target == ignore_index
            losses = losses + _spread_loss(exact, spread, logarithm).masked_fill(ignored, 0)
    return (losses.sum() if reduced else losses).to(scores.dtype)


def _index_loss(
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None,
    logarithm: Tensor,
    start: int,
    total: int,
    ignore_index: int,
) -> Tensor:
    """weight * (logarithm - score) of the target's class where that class is in this slice, else 0."""
    counted, dim = target != ignore_index, _class_dim(scores)
    check_inside(target, 0, total, f"cross-entropy: a target is outside the {total} classes", counted)
    own = target - start
    inside = counted & (own >= 0) & (own < scores.shape[dim])
    own = own.where(inside, 0)
    losses = logarithm - scores.gather(dim, own.unsqueeze(dim)).squeeze(dim)
    if weight is not None:
        losses = losses * weight[target.where(inside, 0)]
    return losses.where(inside, 0)


def _class_weights(scores: Tensor, weight: Tensor | None, start: int, total: int) -> Tensor:
    """The weights of the slice's classes (1 without weights, 0 past the last class), to broadcast against `scores`."""
    dim = _class_dim(scores)
    classes = torch.arange(start, start + scores.shape[dim], device=scores.device)
    inside = classes < total
    own = inside.to(scores.dtype) if weight is None else weight[classes.clamp(max=total - 1)] * inside
    return own.view(-1, *(1,) * (scores.dim() - 1 - dim))


def _spread_loss(scores: Tensor, spread: Tensor, logarithm: Tensor) -> Tensor:
    """sum over classes of spread * (logarithm - score)."""
    dim = _class_dim(scores)
    return logarithm * spread.expand_as(scores).sum(dim) - (scores * spread).sum(dim)


def _sliced(operator: Operator, local: Local, options: dict[str, Any], dim: int) -> Ref:
    """Classes in slices: the sum over this slice's classes, per prediction or over the predictions."""
    shape = local.operand_shape(0)
    start, total = local.position("c", shape[dim]), local.size("c")
    slices, counting = None, wide(operator.results[0].dtype)
    if operator.op == "cross_entropy_loss":
        own = local.call("local.exponentials", local.args[0], start, total)
        slices = local.gather_over(own, "c", shape=(2, *shape[:dim], *shape[dim + 1 :]), dtype=counting)
    rest = options["ignore_index"], options.get("label_smoothing", 0.0), options["reduction"] != NONE
    return local.call("local.class_slice_loss", *local.args[:2], options["weight"], slices, start, total, *rest)


def _class(operator: Operator, local: Local) -> Ref:
    options, shape = local.arguments, local.operand_shape(0)
    scores_dims, predictions = _dims(len(shape))
    parts, cut = local.parts(*predictions), local.slices("c") > 1
    if not cut and (options["reduction"] != MEAN or parts == 1):
        return local.itself()
    scores, target = local.args[:2]
    total = _sliced(operator, local, options, scores_dims.index("c")) if cut else local.itself(reduction=SUM)
    if options["reduction"] != MEAN:
        return total
    if len(local.operand_shape(1)) == len(shape):  # class probabilities: torch divides by the number of predictions
        return local.call("aten.div.Tensor", total, math.prod(local.size(factor) for factor in predictions))
    counted = local.call("local.target_weight", scores, target, options["weight"], options["ignore_index"])
    if parts > 1:
        counted = local.sum_over(counted, *predictions, dtype=wide(operator.results[0].dtype))
    return local.call("local.divided", total, counted)


def _dims(rank: int) -> tuple[Dims, tuple[str, ...]]:
    """Factors of scores [classes], [n, classes] or [n, classes, d...], and of the predictions."""
    predictions = tuple(f"d{i}" for i in range(rank) if i != 1 and rank > 1)
    return (*predictions[:1], "c", *predictions[1:]), predictions


@rule("cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d")
def class_loss(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """scores [n, classes, ...], a target of class indices [n, ...] or of probabilities (shaped like the scores)."""
    scores, predictions = _dims(len(specs[0].shape))
    target = scores if len(specs[1].shape) == len(specs[0].shape) else predictions
    reduced = arguments(operator)["reduction"] != NONE
    return sharding(
        operator,
        specs,
        [scores, target, *unsliced(specs[2:])],
        [() if reduced else predictions],
        sums=("c", *predictions) if reduced else ("c",),
        local=_class,
        padded=("c",),
    )
