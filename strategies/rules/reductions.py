"""Reductions that are no line of notation: quantiles, whose number stands in front of the result, and histograms;
running sums, which can be sliced along their own dim too, given the totals of the slices before; extremes, which every
rank finds among those of all slices; variances, norms and others, to which every slice adds its part; and distances
between the vectors of two tensors, whose own dim stays replicated.

An extreme of all (amax, max without dim) has the gradient of torch: it is divided evenly among all elements that are
equal to it, on whatever ranks. Where its place is returned too (max with dim, argmax), it is the first one, which alone
has the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from strategies.core.graph import Operator, Ref, TensorSpec, wide
from strategies.rules.notation import notation
from strategies.rules.registry import arguments, dim_of, local_function, rule
from strategies.rules.sharding import Local, Sharding, numbered, sharding
from strategies.rules.table import line

MATRIX_PRODUCT, ONE_BY_ONE, FEW = 1, 2, 25
"""How torch computes distances (`compute_mode`), one by one up to so many vectors on both sides."""


@rule("quantile", "nanquantile")
def quantile(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x over one dim, or over all; several quantiles [q] stand in front of the result."""
    options = arguments(operator)
    rank, front = len(specs[0].shape), [None for spec in specs[1:] for _ in spec.shape]
    if options["dim"] is None or not rank:
        return None
    dim = options["dim"] % rank
    operand = numbered(rank, [dim])
    result = operand if options["keepdim"] else (*operand[:dim], *operand[dim + 1 :])
    return sharding(operator, specs, [operand, *[tuple(front)] * (len(specs) - 1)], [(*front, *result)])


@rule("histc")
def histogram(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """Counts of the elements in bins of a given range: those of slices add up. None for the range of the elements."""
    options, dims = arguments(operator), numbered(len(specs[0].shape))
    return None if options["min"] == options["max"] else sharding(operator, specs, [dims], [(None,)], sums=dims)


@local_function
def after_slices(own: Tensor, totals: Tensor, before: int) -> Tensor:
    """A slice's running sums plus the totals [slices, ...] of the first `before` slices, shaped like one entry."""
    return own + totals[:before].sum(0).to(own.dtype)


def _running_sum(operator: Operator, local: Local) -> Ref:
    own = local.itself()
    shape = list(local.operand_shape(0))
    dim = dim_of(operator, len(shape))
    if local.slices(f"d{dim}") == 1:
        return own
    last = local.call("aten.slice.Tensor", own, dim, shape[dim] - 1, shape[dim])
    totals = local.gather_over(last, f"d{dim}", shape=(*shape[:dim], 1, *shape[dim + 1 :]))
    return local.call("local.after_slices", own, totals, local.position(f"d{dim}"))


# padding stands behind everything else, so that it reaches only padding
line("d0 ... -> d0 ...", "cumsum", padded=True, local=_running_sum)


def _extreme(x: Tensor, largest: bool, dims: tuple[int, ...]) -> Tensor:
    return x.amax(dims, keepdim=True) if largest else x.amin(dims, keepdim=True)


@local_function
def slice_extreme(x: Tensor, largest: bool, dims: tuple[int, ...]) -> Tensor:
    """The largest (or smallest) elements of one slice over `dims`, and how many elements equal them: [2, ...] with
    size 1 in place of `dims`, without gradient. In float32, int64 or wider: numbers are counted."""
    x = x.detach()
    extreme = _extreme(x, largest, dims)
    ties = (x == extreme).sum(tuple(dims), keepdim=True)
    dtype = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else torch.int64
    return torch.stack((extreme.to(dtype), ties.to(dtype)))


class _DividedAmongTies(torch.autograd.Function):
    """`extreme`, whose gradient x gets where it equals it, divided by the number of `ties` of all slices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, extreme: Tensor, ties: Tensor) -> Tensor:
        ctx.save_for_backward(x, extreme, ties)
        return extreme.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, extreme, ties = ctx.saved_tensors
        return (gradient / ties).to(x.dtype) * (x == extreme), None, None


@local_function
def extreme_of_slices(x: Tensor, slices: Tensor, largest: bool, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """The largest (or smallest) elements of all slices, of which x is one, from every slice's `slice_extreme` [slices,
    2, ...]."""
    extremes, ties = slices.unbind(1)
    extreme = _extreme(extremes, largest, (0,))[0]
    ties = ties.where(extremes == extreme, 0).sum(0)
    result: Tensor = _DividedAmongTies.apply(x, extreme.to(x.dtype), ties)  # type: ignore[no-untyped-call]
    return result if keepdim else result.squeeze(tuple(dims))


@local_function
def slice_first(
    x: Tensor, largest: bool, dim: int | None, starts: Sequence[int], sizes: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The largest (or smallest) elements of one slice over `dim` (None: over all), and the first place of each among
    all `sizes`, of which the slice begins at `starts`: with size 1 in place of what was reduced."""
    if dim is not None:
        value, place = x.max(dim, keepdim=True) if largest else x.min(dim, keepdim=True)
        return value, place + starts[dim]
    value, index = x.reshape(-1).max(0) if largest else x.reshape(-1).min(0)
    place = torch.zeros_like(index)
    for one, start, size in zip(torch.unravel_index(index, x.shape), starts, sizes, strict=True):
        place = place * size + one + start
    shape = (1,) * x.dim()
    return value.view(shape), place.view(shape)


@local_function
def first_of_slices(
    value: Tensor, place: Tensor, values: Tensor, places: Tensor, largest: bool, dims: tuple[int, ...], keepdim: bool
) -> tuple[Tensor, Tensor]:
    """The largest (or smallest) of the `values` [slices, ...] of all slices and the first of their `places`; the
    gradient belongs to the slice whose own `value` it is."""
    best = _extreme(values, largest, (0,))
    attained = (values == best) | (values.isnan() & best.isnan())
    first = places.where(attained, torch.iinfo(places.dtype).max).amin(0)
    results = value.where(place == first, best[0]), first
    return results if keepdim else (results[0].squeeze(tuple(dims)), first.squeeze(tuple(dims)))


LARGEST = frozenset({"amax", "argmax", "max"})


def _reduced(operator: Operator, rank: int) -> tuple[int, ...]:
    """The dims that are reduced."""
    dims = arguments(operator).get("dim")
    each = [dims] if isinstance(dims, int) else dims or range(rank)
    return tuple(sorted(dim % rank for dim in each)) if rank else ()


def _among_slices(operator: Operator, local: Local) -> Ref:
    shape = local.operand_shape()
    dims = _reduced(operator, len(shape))
    factors = [f"d{dim}" for dim in dims]
    if local.parts(*factors) == 1:
        return local.itself()
    largest, spec = operator.op in LARGEST, operator.results[0]
    own = local.call("local.slice_extreme", local.args[0], largest, dims)
    left = tuple(1 if dim in dims else size for dim, size in enumerate(shape))
    dtype = wide(spec.dtype) if spec.floating else "int64"
    slices = local.gather_over(own, *factors, shape=(2, *left), dtype=dtype, differentiable=False)
    keepdim = bool(local.arguments.get("keepdim"))
    return local.call("local.extreme_of_slices", local.args[0], slices, largest, dims, keepdim)


def _with_place(dtype: str, operator: Operator, local: Local) -> Ref | tuple[Ref, ...]:
    shape = local.operand_shape()
    dims = _reduced(operator, len(shape))
    factors = [f"d{dim}" for dim in dims]
    if local.parts(*factors) == 1:
        return local.itself()
    largest, dim = operator.op in LARGEST, arguments(operator)["dim"]
    starts = tuple(local.position(f"d{at}", size) if at in dims else 0 for at, size in enumerate(shape))
    sizes = tuple(local.size(f"d{at}") if at in dims else size for at, size in enumerate(shape))
    own = local.several(
        "local.slice_first", local.args[0], largest, dim if dim is None else dim % len(shape), starts, sizes
    )
    value, place = Ref(own.id, 0), Ref(own.id, 1)
    left = tuple(1 if at in dims else size for at, size in enumerate(shape))
    values = local.gather_over(value, *factors, shape=left, dtype=dtype, differentiable=False)
    places = local.gather_over(place, *factors, shape=left, dtype="int64", differentiable=False)
    keepdim = bool(local.arguments["keepdim"])
    first = local.several("local.first_of_slices", value, place, values, places, largest, dims, keepdim)
    return tuple(Ref(first.id, at) for at in ((0, 1) if operator.multiple else (1,)))


@rule("amax", "amin", "argmax", "argmin", "max", "min")
def extreme(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """The extreme of all elements, or over some dims; or of two operands, element by element."""
    if len(specs) == 2:
        return notation("..., ... -> ...", operator, specs)
    placed = operator.multiple or operator.op.startswith("arg")
    local = partial(_with_place, specs[0].dtype) if placed else _among_slices
    return notation("... -> ...* ; ^dim", operator, specs, padded=True, local=local)


REDUCING: dict[str, Callable[[Tensor, tuple[int, ...], Any], Tensor]] = {
    "all": lambda x, dims, _: x.all(dims, keepdim=True),
    "any": lambda x, dims, _: x.any(dims, keepdim=True),
    "logsumexp": lambda x, dims, _: x.logsumexp(dims, keepdim=True),
    "prod": lambda x, dims, _: reduce(lambda product, dim: product.prod(dim, keepdim=True), dims, x),
    "linalg_vector_norm": lambda x, dims, order: torch.linalg.vector_norm(x, order, dims, keepdim=True),
}
"""Reductions that of the results of all slices make the result of all: x, dims, the order of a norm."""


@local_function
def reduced_slice(x: Tensor, how: str, dims: tuple[int, ...], order: Any, dtype: str) -> Tensor:
    """Of one slice the reduction `how` over `dims`, in front [1, ...]; of a variance how many elements there are, their
    mean, and the sum of their squared distances from it [3, ...]."""
    x = x if how in ("all", "any") else x.to(getattr(torch, dtype))
    if how in REDUCING:
        return REDUCING[how](x, dims, order)[None]
    mean = x.mean(dims, keepdim=True)
    count = torch.full_like(mean, math.prod(x.shape[dim] for dim in dims))
    return torch.stack((count, mean, (x - mean).square().sum(dims, keepdim=True)))


@local_function
def reduction_of_slices(
    own: Tensor,
    slices: Tensor,
    place: int,
    how: str,
    dims: tuple[int, ...],
    order: Any,
    keepdim: bool,
    dtype: str,
) -> tuple[Tensor, ...]:
    """The reduction of all from that of every slice, `slices` [slices, parts, ...], of which `own` is the one at
    `place`, which alone has a gradient. `order` is the correction of a variance."""
    every = torch.cat((slices[:place], own[None], slices[place + 1 :]))
    if how in REDUCING:
        results: tuple[Tensor, ...] = (REDUCING[how](every, (0,), order)[0, 0],)
    else:
        counts, means, squares = every.unbind(1)
        mean = (counts * means).sum(0) / counts.sum(0)
        squares = (squares + counts * (means - mean).square()).sum(0)
        variance = squares / (counts.sum(0) - order).clamp(min=0)
        if how.startswith("std"):  # whose gradient is 0 where it is 0
            variance = variance.where(variance == 0, variance.where(variance != 0, 1).sqrt())
        results = (variance, mean) if how.endswith("_mean") else (variance,)
    return tuple((one if keepdim else one.squeeze(dims)).to(getattr(torch, dtype)) for one in results)


def _from_slices(operator: Operator, local: Local) -> Ref | tuple[Ref, ...]:
    shape, spec = local.operand_shape(), operator.results[0]
    dims = _reduced(operator, len(shape))
    factors = [f"d{dim}" for dim in dims]
    if local.parts(*factors) == 1:
        return local.itself()
    given, how = arguments(operator), operator.op
    order = given["ord"] if how == "linalg_vector_norm" else _correction(given)
    dtype = wide(spec.dtype) if spec.floating else spec.dtype
    own = local.call("local.reduced_slice", local.args[0], how, dims, order, dtype)
    left = tuple(1 if dim in dims else size for dim, size in enumerate(shape))
    parts = 1 if how in REDUCING else 3
    slices = local.gather_over(own, *factors, shape=(parts, *left), dtype=dtype, differentiable=False)
    place = local.position(tuple(factors))
    keepdim = bool(given.get("keepdim"))
    found = local.several("local.reduction_of_slices", own, slices, place, how, dims, order, keepdim, spec.dtype)
    results = tuple(Ref(found.id, at) for at in range(len(operator.results)))
    return results if operator.multiple else results[0]


def _correction(given: Mapping[str, Any]) -> float:
    """What a variance subtracts from the number of elements."""
    unbiased, correction = given.get("unbiased", True), given.get("correction")
    return int(unbiased) if correction is None else correction


@rule("all", "any", "linalg_vector_norm", "logsumexp", "prod", "std", "std_mean", "var", "var_mean")
def reduction(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """Reductions of which slices have parts. Those of complex numbers, and norms that count elements which are not 0 or
    divide their gradient among equal extremes, have dims that stay replicated."""
    even = operator.op in ("linalg_vector_norm", "prod", "std", "std_mean")
    parts = "complex" not in specs[0].dtype and arguments(operator).get("ord") not in (0, math.inf, -math.inf)
    line, local = ("... -> ...* ; ^dim", _from_slices) if parts else ("... -> ...* ; !dim", None)
    return notation(line, operator, specs, padded=not even, local=local)


def _distances(operator: Operator, local: Local) -> Ref:
    """The distances as torch would compute all of them."""
    mode = MATRIX_PRODUCT if max(local.size("p"), local.size("r")) > FEW else ONE_BY_ONE
    return local.itself(compute_mode=int(arguments(operator)["compute_mode"] or mode))


@rule("cdist")
def cdist(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x [..., p, v], y [..., r, v] -> distances [..., p, r]."""
    flops = 2.0 * operator.results[0].elements * specs[0].shape[-1]
    return notation("... p !v, ... r !v -> ... p r", operator, specs, local=_distances, flops=flops)
