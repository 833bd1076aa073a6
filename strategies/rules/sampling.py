"""Random operators beyond dropout, sliced like what they fill.

`fast`: each slice draws its own numbers. `exact`: the operator draws for the global tensor, and the block is kept. For
that the slices of its operands are put in their places in global tensors of ones: how many numbers an element takes
depends on no value in any of the operators here, so the block's numbers are those of one device. Others (poisson,
binomial, randperm ...) have no rule: every rank draws the global tensor from replicated operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.rules.arguments import changed, named
from strategies.rules.notation import broadcast_dims, notation
from strategies.rules.random import in_row_major, mix, seeding, uniform
from strategies.rules.registry import local_function, resolve, rule
from strategies.rules.sharding import Dims, Local, Sharding, sharding
from strategies.rules.traits import TRAITS, traits

FILLING = sorted(name for name, row in TRAITS.items() if row.fills)
Block = tuple[Sequence[int], Sequence[Any]]
"""The global shape of a tensor, and where the rank's block begins in it."""


def _cut(whole: Tensor, starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    for dim, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        whole = whole.narrow(dim, start, length)
    return whole.contiguous()


def _placed(x: Tensor, block: Block) -> Tensor:
    """A tensor of ones of the global shape that holds `x` where its block is."""
    shape, starts = block
    if tuple(shape) == tuple(x.shape):
        return x
    whole = x.new_ones(tuple(shape))
    whole[tuple(slice(start, start + size) for start, size in zip(starts, x.shape, strict=True))] = x
    return whole


@local_function
def drawn_block(
    target: str,
    key: int,
    ordinal: int,
    operands: Sequence[Block],
    starts: Sequence[int],
    lengths: Sequence[int],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The block at `starts` (`lengths` long) of what random operator `target` draws for global tensors; `operands` say
    where the tensors among the arguments have their places."""
    blocks = iter(operands)
    placed = tuple(_placed(arg, next(blocks)) if isinstance(arg, Tensor) else arg for arg in args)
    with seeding(key, ordinal):
        found = resolve(target)(*in_row_major(placed), **kwargs)
    if isinstance(found, Tensor):
        return _cut(found, starts, lengths)
    return tuple(_cut(result, starts, lengths) for result in found)


@local_function
def rrelu_slice(x: Tensor, lower: float, upper: float, key: int, ordinal: int, position: int) -> Tensor:
    """Leaky relu of one slice with per-slice random slopes."""
    return _leaky(x, lower, upper, uniform(x.shape, mix(key, ordinal, position), x.device))


@local_function
def rrelu_block(
    x: Tensor, lower: float, upper: float, key: int, ordinal: int, shape: Sequence[int], starts: Sequence[int]
) -> Tensor:
    """Leaky relu of the block at `starts` of a tensor of global `shape`, with the slopes of the global tensor."""
    return _leaky(x, lower, upper, _cut(uniform(shape, mix(key, ordinal), "cpu"), starts, x.shape))


def _leaky(x: Tensor, lower: float, upper: float, numbers: Tensor) -> Tensor:
    slopes = (lower + (upper - lower) * numbers).to(x.device, x.dtype)
    return torch.where(x > 0, x, x * slopes)


def _names(shape: Sequence[int]) -> tuple[str, ...]:
    return tuple(f"d{i}" for i in range(len(shape)))


def _starts(local: Local, dims: Dims, lengths: Sequence[int]) -> tuple[Any, ...]:
    """The start of a rank's block, per dim."""
    return tuple(0 if name is None else local.position(name, n) for name, n in zip(dims, lengths, strict=True))


def _draw(operator: Operator, local: Local, *, dims: Sequence[Dims], result: Dims, shared: Sequence[str] = ()) -> Ref:
    """The operator on its slices (`fast`), or the block of the global draw (`exact`). Slices of `shared` factors have
    the same numbers."""
    given = local.args
    if traits(operator.op).fills:  # numbers have no gradient, and some of these operators refuse to be asked for one
        given = tuple(local.call("aten.detach.default", arg) if isinstance(arg, Ref) else arg for arg in given)
    if not local.exact:
        factors = tuple(name for name in result if name is not None and name not in shared)
        where = local.position(factors)
        args = "local.seeded_slice", operator.target, local.key, local.ordinal, where, *given
        return local.several(*args, **local.kwargs) if operator.multiple else local.call(*args, **local.kwargs)
    local_shapes = [local.operand_shape(i) for i in range(len(dims))]
    lengths = local.result_shape()
    blocks = tuple(
        (shape, _starts(local, own, sizes))
        for shape, own, sizes in zip(_global_shapes(local, dims, local_shapes), dims, local_shapes, strict=True)
    )
    starts = _starts(local, result, lengths)
    args = "local.drawn_block", operator.target, local.key, local.ordinal, blocks, starts, lengths, *given
    return local.several(*args, **local.kwargs) if operator.multiple else local.call(*args, **local.kwargs)


def _global_shapes(local: Local, dims: Sequence[Dims], shapes: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    return [
        tuple(size if name is None else size * local.slices(name) for name, size in zip(own, shape, strict=True))
        for own, shape in zip(dims, shapes, strict=True)
    ]


def _sized(operator: Operator, local: Local) -> Ref:
    lengths = local.result_shape()
    result = _names(lengths)
    if local.exact:
        starts = _starts(local, result, lengths)
        args = operator.target, local.key, local.ordinal, (), starts, lengths, *local.args
        return local.call("local.drawn_block", *args, **local.kwargs)
    given, more = changed(operator.target, local.args, local.kwargs, size=lengths)
    where = local.position(result)
    return local.call("local.seeded_slice", operator.target, local.key, local.ordinal, where, *given, **more)


@rule("rand", "randn", "randint", "native_dropout", *FILLING)
def elements(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """Numbers of a given size, or like (and perhaps by) operands that broadcast: every dim passes."""
    shape = operator.results[0].shape
    result = _names(shape)
    if not specs:
        return sharding([], [result], specs, operator.results, local=_sized)
    dims = broadcast_dims(specs, shape)
    results: list[Dims] = [result for _ in operator.results]
    return sharding(dims, results, specs, operator.results, local=partial(_draw, dims=dims, result=result))


@rule("alpha_dropout", "feature_dropout", "feature_alpha_dropout")
def dropouts(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x [...]; of features [n, c, ...] complete channels are dropped."""
    dims = _names(specs[0].shape)
    shared = dims[2:] if operator.op.startswith("feature") else ()

    def program(operator: Operator, local: Local) -> Ref:
        x, probability, training = local.args
        if not training or probability == 0:
            return local.call("aten.alias.default", x)
        return _draw(operator, local, dims=[dims], result=dims, shared=shared)

    return sharding([dims], [dims], specs, operator.results, local=program)


def _rrelu(operator: Operator, local: Local) -> Ref:
    given = named(operator.target, local.args, local.kwargs)
    x, lower, upper = given["self"], given["lower"], given["upper"]
    if not given["training"]:
        return local.call(operator.target, *local.args, **local.kwargs)
    lengths = local.operand_shape()
    dims = _names(lengths)
    if not local.exact:
        return local.call("local.rrelu_slice", x, lower, upper, local.key, local.ordinal, local.position(dims))
    shape, starts = operator.results[0].shape, _starts(local, dims, lengths)
    return local.call("local.rrelu_block", x, lower, upper, local.key, local.ordinal, shape, starts)


@rule("rrelu")
def rrelu(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """Leaky relu with a random slope per element (torch draws for negative ones alone, which slices cannot repeat)."""
    return notation("... -> ...", operator, specs, local=_rrelu)


@rule("multinomial")
def multinomial(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """weights [(rows,) categories] -> categories [(rows,) samples]: rows pass."""
    dims: Dims = (*("d0",) * (len(specs[0].shape) - 1), None)
    return sharding([dims], [dims], specs, operator.results, local=partial(_draw, dims=[dims], result=dims))
