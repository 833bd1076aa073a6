"""Products: factors b (batch), m (rows), k (contraction), n (columns). A sliced contraction leaves a partial sum.

A bias is added by the first slice of the contraction alone, so that the sum over the slices adds it once; the gradient
rule then holds for it unchanged (the other slices return zeros).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.pointwise import broadcast_dims
from strategies.rules.registry import local_function, rule
from strategies.rules.sharding import Dims, Local, Sharding, notation, sharding


@local_function
def first_slice_only(bias: Tensor, position: int) -> Tensor:
    """`bias` on the ranks with slice 0 of the contraction, zeros elsewhere (still connected: zero gradient)."""
    if position == 0:
        return bias
    return bias.masked_fill(torch.ones((), dtype=torch.bool, device=bias.device), 0)  # inf * 0 would be no zero


def _linear(operator: Operator, local: Local) -> Ref:
    if len(operator.operands) < 3 or local.slices("k") == 1:
        return local.call(operator.target, *local.args)
    x, weight, bias = local.args
    return local.call(operator.target, x, weight, local.call("local.first_slice_only", bias, local.position("k")))


def _padding(product: Sharding) -> Sharding:
    """Every factor may have padded slices but those that are summed over."""
    return replace(product, uneven=frozenset(product.sizes) - product.sums)


@rule("linear")
def linear(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    flops = 2.0 * specs[0].elements * specs[1].shape[0]
    if len(specs[1].shape) == 1:  # a weight [in] without an out dim, as F.linear allows
        return _padding(notation("... k, k -> ...", specs, operator.results, flops=flops))
    return _padding(notation("... k, n k, n -> ... n", specs, operator.results, local=_linear, flops=flops))


PRODUCTS = {
    "mm": "m k, k n -> m n",
    "bmm": "b m k, b k n -> b m n",
    "mv": "m k, k -> m",
    "dot": "k, k -> ",
    "outer": "m, n -> m n",
}


@rule(*PRODUCTS)
def product(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    columns = specs[1].shape[-1] if operator.op in ("mm", "bmm", "outer") else 1
    return _padding(notation(PRODUCTS[operator.op], specs, operator.results, flops=2.0 * specs[0].elements * columns))


@rule("matmul")
def matmul(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """torch.matmul with broadcasting of leading dims; a one-dimensional operand has no m (left) or no n (right)."""
    left, right = (spec.shape for spec in specs)
    lead = max(len(left), len(right), 2) - 2
    batch = operator.results[0].shape[:lead]

    def leading(shape: tuple[int, ...]) -> Dims:
        skip = lead - max(len(shape) - 2, 0)
        return tuple(f"b{skip + i}" if size == batch[skip + i] else None for i, size in enumerate(shape[:-2]))

    x: Dims = (*leading(left), "m", "k") if len(left) > 1 else ("k",)
    y: Dims = (*leading(right), "k", "n") if len(right) > 1 else ("k",)
    rows, columns = ("m",) if len(left) > 1 else (), ("n",) if len(right) > 1 else ()
    out: Dims = (*(f"b{i}" for i in range(lead)), *rows, *columns)
    flops = 2.0 * prod(operator.results[0].shape) * left[-1]
    return _padding(sharding([x, y], [out], specs, operator.results, sums=["k"], flops=flops))


def _addmm(operator: Operator, local: Local) -> Ref:
    if local.slices("k") == 1:
        return local.call(operator.target, *local.args, **local.kwargs)
    bias, *rest = local.args
    first = local.call("local.first_slice_only", bias, local.position("k"))
    return local.call(operator.target, first, *rest, **local.kwargs)


@rule("addmm", "baddbmm")
def addmm(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """beta * bias + alpha * (x @ y), with the bias broadcast to the result [(b,) m, n]."""
    (aligned,) = broadcast_dims(specs[:1], operator.results[0].shape)
    out = ("b", "m", "n") if operator.op == "baddbmm" else ("m", "n")
    bias: Dims = tuple(out[int(dim[1:])] if dim is not None else None for dim in aligned)
    x: Dims = (*out[:-1], "k")
    y: Dims = (*out[:-2], "k", "n")
    flops = 2.0 * specs[1].elements * specs[2].shape[-1]
    return _padding(sharding([bias, x, y], [out], specs, operator.results, sums=["k"], local=_addmm, flops=flops))
