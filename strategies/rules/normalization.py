"""Normalization. Layer norm and RMS norm keep their last dims replicated; group norm is sliced by groups of channels,
weight norm by the vectors that have a norm each.

Batch norm is synchronized: the statistics of the global batch, as one device would compute them, for any sharding.
Every rank computes mean and variance of its slice (two passes over the data), the slices' statistics are gathered, and
each rank combines them: the mean of the means, and the mean of the variances plus the variance of the means. Where
slices have different lengths, each sends its share of the elements too, by which these means are weighted. The
all-gather is differentiable and the only communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from strategies.core.graph import Operator, Ref, TensorSpec, wide
from strategies.rules.notation import notation
from strategies.rules.registry import arguments, local_function, rule
from strategies.rules.sharding import Dims, Local, LocalProgram, Sharding, numbered, sharding, unsliced


@rule("layer_norm", "rms_norm")
def layer_norm(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x [..., n...] normalised over its last dims, which stay replicated, and so do weight and bias [n...]."""
    rank = len(specs[0].shape)
    dims = numbered(rank, range(rank - len(operator.args[1]), rank))
    padded = dims if arguments(operator)["eps"] != 0 else ()  # padding of equal elements would be divided by zero
    return sharding(operator, specs, [dims, *unsliced(specs[1:])], [dims], padded=padded)


def _group_norm(operator: Operator, local: Local) -> Ref:
    return local.itself(num_groups=local.args[1] // local.slices("g"))


@rule("group_norm")
def group_norm(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x [n, c, ...], weight [c], bias [c]: the batch, and the channels by groups."""
    sizes = {"g": operator.args[1]}
    return notation("n g !..., g* -> n g !...", operator, specs, sizes=sizes, local=_group_norm)


@rule("_weight_norm")
def weight_norm(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """v [...] and g, the norms that v shall have over all dims but one (of size 1 in g): that one passes. None for one
    norm of everything."""
    rank, dim = len(specs[0].shape), arguments(operator)["dim"]
    if len(specs[1].shape) != rank or dim < 0:
        return None
    dims: Dims = tuple(f"d{i}" if i == dim else None for i in range(rank))
    return sharding(operator, specs, [dims, dims], [dims])


def _with_statistics(
    norm: Callable[..., Tensor],
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    mean, variance = running_mean.detach().clone(), running_var.detach().clone()
    output = norm(input, weight, bias, mean, variance, True, momentum, eps, torch.backends.cudnn.enabled)
    return output, mean, variance


@local_function
def batch_norm_training(input: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    """torch's batch norm of `input` [n, c, ...] in training, and the running statistics [c] that follow it (without
    gradient); the given ones are not written. The settings are weight, bias, running mean, running variance, momentum
    and eps."""
    return _with_statistics(torch.batch_norm, input, *settings)


@local_function
def instance_norm_training(input: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    """torch's instance norm in training: as `batch_norm_training`, but the statistics are those of the samples,
    averaged."""
    return _with_statistics(torch.instance_norm, input, *settings)


@local_function
def slice_statistics(x: Tensor, share: float | None = None) -> Tensor:
    """Variance (of the slice, not corrected) and mean of each channel of x [n, c, ...], and the slice's share of all
    elements, if it is given: [2 or 3, c], float32 or wider."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    variance, mean = torch.var_mean(exact, _all_but_channels(x), correction=0)
    return torch.stack((variance, mean) if share is None else (variance, mean, torch.full_like(mean, share)))


def _mean_of_slices(values: Tensor, shares: Sequence[Tensor]) -> Tensor:
    """[slices, c] -> [c], weighted by shares [slices, c], if there are any."""
    return (values * shares[0]).sum(0) if shares else values.mean(0)


@local_function
def normalised(
    x: Tensor, gathered: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """x [n, c, ...] normalised by the statistics `gathered` [slices, 2 or 3, c]; mean and variance [c] of the global
    batch, without gradient."""
    variances, means, *shares = gathered.unbind(1)
    mean = _mean_of_slices(means, shares)
    variance = _mean_of_slices(variances + (means - mean).square(), shares)
    scale = torch.rsqrt(variance + eps)
    if weight is not None:
        scale = scale * weight
    shape = (1, -1, *(1,) * (x.dim() - 2))
    result = (x - mean.view(shape)) * scale.view(shape)
    if bias is not None:
        result = result + bias.view(shape)
    return result.to(x.dtype), mean.detach(), variance.detach()


@local_function
def running(
    mean: Tensor, variance: Tensor, running_mean: Tensor, running_var: Tensor, momentum: float, count: int
) -> tuple[Tensor, Tensor]:
    """The running statistics after a batch of `count` elements per channel; the variance is the unbiased one."""
    unbiased = variance * (count / (count - 1))
    return (
        (running_mean.detach() * (1 - momentum) + mean * momentum).to(running_mean.dtype),
        (running_var.detach() * (1 - momentum) + unbiased * momentum).to(running_var.dtype),
    )


def _all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _dims(shape: Sequence[int]) -> tuple[Dims, tuple[str, ...]]:
    """Factors of x [n, c, ...], and those of them over which statistics are taken."""
    spatial = tuple(f"s{i}" for i in range(len(shape) - 2))
    return ("n", "c", *spatial), ("n", *spatial)


def _statistics(operator: Operator, local: Local, *, weight: Ref | None, bias: Ref | None, eps: float) -> Ref:
    """Several results: the normalised slice, mean and variance of the global batch."""
    shape = local.operand_shape(0)
    averaged, dtype = _dims(shape)[1], wide(operator.results[0].dtype)
    share = () if local.equal(*averaged) else (1 / local.parts(*averaged),)
    own = local.call("local.slice_statistics", local.args[0], *share)
    gathered = local.gather_over(own, *averaged, shape=(2 + len(share), shape[1]), dtype=dtype)
    return local.several("local.normalised", local.args[0], gathered, weight, bias, eps)


def _training(operator: Operator, local: Local) -> Ref | tuple[Ref, ...]:
    if local.parts(*_dims(local.operand_shape())[1]) == 1:
        return local.itself()
    _, weight, bias, running_mean, running_var, momentum, eps = local.args
    normed = _statistics(operator, local, weight=weight, bias=bias, eps=eps)
    shape = operator.results[0].shape
    count = prod(shape) // shape[1]
    mean, variance = Ref(normed.id, 1), Ref(normed.id, 2)
    after = local.several("local.running", mean, variance, running_mean, running_var, momentum, count)
    return normed, after, Ref(after.id, 1)


def _without_history(operator: Operator, local: Local) -> Ref | tuple[Ref, ...]:
    if local.parts(*_dims(local.operand_shape())[1]) == 1:
        return local.itself()
    given = local.arguments
    return (_statistics(operator, local, weight=given["weight"], bias=given["bias"], eps=given["eps"]),)


def _per_channel(
    operator: Operator, specs: Sequence[TensorSpec], dims: Dims, local: LocalProgram | None = None
) -> Sharding:
    """x as `dims`; weight, bias and statistics [c], the further results too."""
    vectors: list[Dims] = [("c",) for _ in specs[1:]]
    more: list[Dims] = [("c",) for _ in operator.results[1:]]
    return sharding(operator, specs, [dims, *vectors], [dims, *more], local=local)


@rule("batch_norm_training")
def training(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x [n, c, ...], weight [c], bias [c], running mean [c], running variance [c] -> x, new mean, new variance."""
    return _per_channel(operator, specs, _dims(specs[0].shape)[0], _training)


@rule("batch_norm")
def batch_norm(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """Batch norm by running statistics: every dim passes. In training without running ones: by those of the batch.
    (With both, torch writes its operands, which a graph does not have.)"""
    given, dims = arguments(operator), _dims(specs[0].shape)[0]
    if not given["training"]:
        return _per_channel(operator, specs, dims)
    return _per_channel(operator, specs, dims, _without_history) if given["running_mean"] is None else None


def _instances(operator: Operator, local: Local) -> Ref | tuple[Ref, ...]:
    """The statistics of the samples are averaged, over the slices too."""
    normed, parts = local.itself(), local.parts("n")
    if parts == 1:
        return normed
    shape = local.result_shape(1)
    means = [local.call("aten.div.Tensor", Ref(normed.id, i), parts) for i in (1, 2)]
    dtypes = [result.dtype for result in operator.results[1:]]
    return normed, *(local.sum_over(m, "n", shape=shape, dtype=d) for m, d in zip(means, dtypes, strict=True))


@rule("instance_norm_training")
def instance_training(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """Instance norm in training, as batch_norm_training, but per sample: n and c pass, the other dims stay
    replicated."""
    return _per_channel(operator, specs, ("n", "c", *(None,) * (len(specs[0].shape) - 2)), _instances)


@rule("instance_norm")
def instance_norm(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """x [n, c, ...]: n and c pass; the other dims too where running statistics are used. (With both, torch writes its
    operands.)"""
    given, dims = arguments(operator), _dims(specs[0].shape)[0]
    if not given["use_input_stats"]:
        return _per_channel(operator, specs, dims)
    own: Dims = ("n", "c", *(None,) * (len(dims) - 2))
    return _per_channel(operator, specs, own) if given["running_mean"] is None else None
