"""Counterparts of slices, tiles, images, reductions, losses and casts: what they compute, and who gets the strategy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from strategies.core.request import OperatorStrategy
from tests.conformance.forms import (
    Args,
    Attrs,
    Counterpart,
    Form,
    NotMapped,
    Recorded,
    follow,
    option,
    wanted,
)

# selections


def strided_slice(args: Args, attrs: Attrs) -> Tensor:
    """Bit i of a mask speaks of entry i of begin, end and strides: `...`, a new dim, a dropped one, or an end that is
    left open, in this order."""
    x, begin, end, strides = args[:4]
    mask = {name: attrs.get(f"{name}_mask", 0) for name in ("ellipsis", "new_axis", "shrink_axis", "begin", "end")}
    covered = sum(not (mask["ellipsis"] | mask["new_axis"]) >> i & 1 for i in range(len(begin)))
    passed, dim = args[0].dim() - covered, 0
    for i, (start, stop, step) in enumerate(zip(begin, end, strides, strict=True)):
        if mask["ellipsis"] >> i & 1:
            dim += passed
            continue
        if mask["new_axis"] >> i & 1:
            x = x.unsqueeze(dim)
        elif mask["shrink_axis"] >> i & 1:
            x = x.select(dim, start)
            continue
        else:
            part = slice(None if mask["begin"] >> i & 1 else start, None if mask["end"] >> i & 1 else stop, step)
            if len(range(x.shape[dim])[part]) != x.shape[dim]:
                x = x[(slice(None),) * dim + (part,)]
        dim += 1
    return x.clone() if x is args[0] else x


def spread_strided_slice(record: Recorded) -> dict[str, OperatorStrategy]:
    """Every torch operator gets the strategy of the dims that remain before it."""
    (form,), found = record.inputs, {}
    for operator, shapes in zip(record.operators, record.shapes, strict=True):
        outputs = record.outputs if operator is record.operators[-1] else None
        found[operator.name] = wanted((form,), outputs)
        if len(form.entries) != len(shapes[0]):
            return {operator.name: wanted((form,))}
        dims: list[int | None] = list(range(len(form.entries)))
        if operator.op == "unsqueeze":
            dims.insert(operator.args[1], None)
        elif operator.op == "select":
            del dims[operator.args[1] if len(operator.args) > 2 else 0]
        form = form.pick(*dims)
    return found


def spread_tile(record: Recorded) -> dict[str, OperatorStrategy]:
    """Counts slice the dim where it is repeated once, else the repetitions; a layout speaks of the tensor itself."""
    form, name = record.inputs[0], record.operators[-1].name
    repeats, rank = record.args[1], record.args[0].dim()
    if form.layout is not None or record.outputs is not None:
        return {name: wanted(record.inputs, record.outputs)}
    if len(form.entries) == rank < len(repeats):
        form = form.pick(*(None,) * (len(repeats) - rank), *range(rank))
    if len(form.entries) != len(repeats):
        return {name: wanted(record.inputs)}
    lead = len(repeats) - rank
    own = form.pick(*(lead + i if repeats[lead + i] == 1 else None for i in range(rank)))
    return {name: wanted((own,), (form,))}


def one_hot(args: Args, attrs: Attrs) -> Tensor:
    """`axis` is where the classes go; on and off are the values."""
    indices, depth, on, off = args[:4]
    axis = attrs.get("axis", -1)
    classes = torch.arange(depth, device=indices.device)
    hit = indices.unsqueeze(axis) == (classes.unsqueeze(-1) if axis == 0 else classes)
    return torch.where(hit, on, off)


def spread_one_hot(record: Recorded) -> dict[str, OperatorStrategy]:
    """The recorded strategy speaks of the result; with one entry, of the indices alone."""
    form = record.inputs[0]
    if len(form.entries) == record.args[0].dim():
        form = form.pick(*range(len(form.entries)), None)
    flipped = record.attrs.get("axis", -1) == 0
    found = {}
    for operator, shapes in zip(record.operators, record.shapes, strict=True):
        if operator.op in ("eq", "where"):
            full, turned = operator.results[0].shape, form.swapped() if flipped else form
            found[operator.name] = wanted([follow(turned, full, shape) for shape in shapes])
    return found


# images


def convolution(args: Args, attrs: Attrs) -> Tensor:
    """`same` gives one result per stride; an odd remainder of its padding goes to the end."""
    x, weight = args[:2]
    stride, dilation = pair(attrs.get("stride", 1)), pair(attrs.get("dilation", 1))
    mode, groups = attrs.get("pad_mode", "valid"), attrs.get("group", 1)
    padding = pair(attrs.get("pad", 0)) if mode == "pad" else (0, 0)
    if mode == "same":
        spans = [d * (k - 1) + 1 for d, k in zip(dilation, weight.shape[2:], strict=True)]
        sizes = zip(x.shape[2:], stride, spans, strict=True)
        total = [max((-(-size // step) - 1) * step + span - size, 0) for size, step, span in sizes]
        padding = (total[0] // 2, total[1] // 2)
        if total[0] % 2 or total[1] % 2:
            x = F.pad(x, (0, total[1] % 2, 0, total[0] % 2))
    return F.conv2d(x, weight, None, stride, padding, dilation, groups)


def pair(value: Any) -> tuple[int, int]:
    numbers = value if isinstance(value, list) else [value]
    return (numbers[-1], numbers[-1]) if len(numbers) != 2 else (numbers[0], numbers[1])


def pool(function: Callable[..., Tensor]) -> Counterpart:
    """Without padding, as `valid` is the default."""

    def compute(args: Args, attrs: Attrs) -> Tensor:
        if attrs.get("pad_mode", "valid").lower() != "valid":
            raise NotMapped("a pool with pad_mode same")
        return function(args[0], pair(attrs.get("kernel_size", 1)), pair(attrs.get("strides", 1)))

    return Counterpart(compute)


# reductions and losses


def reduction(function: Callable[..., Any]) -> Counterpart:
    """Over the recorded dims; none, or an empty list, means all of them."""

    def compute(args: Args, attrs: Attrs) -> Any:
        dims, keep = option(args, attrs, 1, "axis", None), option(args, attrs, 2, "keep_dims", False)
        dims = list(range(args[0].dim())) if dims is None or dims == [] else dims
        return function(args[0], dims, keepdim=bool(keep))

    return Counterpart(compute)


def arg_max(args: Args, attrs: Attrs) -> tuple[Tensor, Tensor]:
    values, indices = args[0].max(attrs.get("axis", 0), keepdim=attrs.get("keep_dims", False))
    return indices, values


def cross_entropy(args: Args, attrs: Attrs) -> tuple[Tensor, Tensor]:
    """The loss per row, and its gradient with regard to the scores."""
    scores, target = args[:2]
    return F.cross_entropy(scores, target, reduction="none"), scores.softmax(-1) - target


def spread_cross_entropy(record: Recorded) -> dict[str, OperatorStrategy]:
    return {o.name: wanted(record.inputs) for o in record.operators if o.op == "cross_entropy_loss"}


def sparse_loss(args: Args, attrs: Attrs) -> Tensor:
    scores, target = args[:2]
    if attrs.get("sparse"):
        target = torch.where(target.unsqueeze(-1) == torch.arange(scores.shape[-1], device=scores.device), 1.0, 0.0)
        target = target.to(scores.dtype)
    return F.cross_entropy(scores, target, reduction=attrs.get("reduction", "none"))


def spread_sparse_loss(record: Recorded) -> dict[str, OperatorStrategy]:
    """Strategies of its two parts are attributes."""
    found = {}
    for operator, shapes in zip(record.operators, record.shapes, strict=True):
        loss, hot = (record.attrs.get(f"shard.{part}") for part in ("softmax_cross_entropy", "one_hot"))
        if operator.op == "cross_entropy_loss" and loss:
            found[operator.name] = wanted([Form(tuple(entry)) for entry in loss])
        elif operator.op in ("eq", "where") and hot:
            full = tuple(record.args[0].shape)
            found[operator.name] = wanted([follow(Form(tuple(hot[0])), full, shape) for shape in shapes])
    return found


def cast(args: Args, attrs: Attrs) -> Tensor:
    """To another kind of numbers; among floating types a copy: precision is not compared."""
    name = str(option(args, attrs, 1, "dtype", "float32")).removeprefix("dtype.")
    dtype = getattr(torch, {"bool_": "bool"}.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        raise NotMapped(f"Cast to {name}")
    return args[0].to(args[0].dtype if dtype.is_floating_point and args[0].is_floating_point() else dtype, copy=True)


def element(args: Args, attrs: Attrs) -> Tensor:
    """One of several results, or one row."""
    chosen: Tensor = args[0][attrs.get("index", 0)]
    return chosen


def normalised(args: Args, attrs: Attrs) -> Tensor:
    return F.normalize(args[0], dim=attrs.get("axis", 0))


def softmax(args: Args, attrs: Attrs) -> Tensor:
    axis = attrs.get("axis", attrs.get("arg0", -1))
    return F.softmax(args[0], axis[0] if isinstance(axis, list) else axis)


def reshape(args: Args, attrs: Attrs) -> Tensor:
    if 0 < math.prod(args[1]) != args[0].numel() and -1 not in args[1]:
        raise NotMapped(f"Reshape of {tuple(args[0].shape)} to {args[1]}, which has another number of elements")
    return args[0].reshape(args[1])
