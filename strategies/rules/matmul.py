"""Products: factors b (batch), m (rows), k (contraction), n (columns). A sliced contraction leaves a partial sum.

A bias is added by the first slice of the contraction alone, so that the sum over the slices adds it once; the gradient rule
then holds for it unchanged (the other slices return zeros).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

from strategies.graph import Operator, Ref, TensorSpec
from strategies.rules.registry import local_function, rule
from strategies.rules.sharding import Dims, Local, Sharding, notation, sharding


@local_function
def first_slice_only(bias: Tensor, position: int) -> Tensor:
    """`bias` on the rank that holds slice 0 of the contraction, zeros elsewhere (still connected, so that its gradient is zeros)."""
    return bias if position == 0 else bias * 0


def _linear(operator: Operator, local: Local) -> Ref:
    if len(operator.operands) < 3 or local.slices("k") == 1:
        return local.call(operator.target, *local.args)
    x, weight, bias = local.args
    return local.call(operator.target, x, weight, local.call("local.first_slice_only", bias, local.position("k")))


@rule("linear")
def linear(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    flops = 2.0 * specs[0].elements * specs[1].shape[0]
    return notation("... k, n k, n -> ... n", specs, operator.results, local=_linear, flops=flops)


@rule("mm")
def mm(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    return notation("m k, k n -> m n", specs, operator.results, flops=2.0 * specs[0].elements * specs[1].shape[1])


@rule("bmm")
def bmm(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    return notation("b m k, b k n -> b m n", specs, operator.results, flops=2.0 * specs[0].elements * specs[1].shape[2])


@rule("matmul")
def matmul(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """torch.matmul with broadcasting of leading dims; a one-dimensional operand has no m (left) or no n (right)."""
    left, right = (spec.shape for spec in specs)
    batch = operator.results[0].shape[: max(len(left), len(right)) - 2]

    def leading(shape: tuple[int, ...]) -> Dims:
        own = shape[:-2]
        skip = len(batch) - len(own)
        return tuple(f"b{skip + i}" if size == batch[skip + i] else None for i, size in enumerate(own))

    x: Dims = (*leading(left), "m", "k") if len(left) > 1 else ("k",)
    y: Dims = (*leading(right), "k", "n") if len(right) > 1 else ("k",)
    out: Dims = tuple(f"b{i}" for i in range(len(batch))) if len(batch) else ()
    out = (*out, *(("m",) if len(left) > 1 else ()), *(("n",) if len(right) > 1 else ()))
    flops = 2.0 * prod(operator.results[0].shape) * left[-1]
    return sharding([x, y], [out], specs, operator.results, sums=["k"], flops=flops)


def _addmm(operator: Operator, local: Local) -> Ref:
    if local.slices("k") == 1:
        return local.call(operator.target, *local.args, **local.kwargs)
    bias, *rest = local.args
    return local.call(operator.target, local.call("local.first_slice_only", bias, local.position("k")), *rest, **local.kwargs)


@rule("addmm", "baddbmm")
def addmm(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """beta * bias + alpha * (x @ y); the bias is broadcast to the result."""
    out: Dims = ("b", "m", "n") if operator.op == "baddbmm" else ("m", "n")
    shape = operator.results[0].shape
    own = specs[0].shape
    skip = len(shape) - len(own)
    bias: Dims = tuple(out[skip + i] if size == shape[skip + i] else None for i, size in enumerate(own))
    x: Dims = (*out[:-1], "k")
    y: Dims = (*out[:-2], "k", "n")
    flops = 2.0 * specs[1].elements * shape[-1]
    return sharding([bias, x, y], [out], specs, operator.results, sums=["k"], local=_addmm, flops=flops)
