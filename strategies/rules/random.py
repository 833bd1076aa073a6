"""Random operators draw from stateless keys, so that replicas of one slice draw the same numbers and different slices
different ones.

A key is an argument of the program, made from (seed, step, micro-batch); an operator adds its ordinal among the random
operators of the graph. `fast`: each slice draws its own numbers from key, ordinal and the slice's position. `exact`:
the numbers of the global tensor are generated and the rank's block is kept, so that a sharded run repeats those of one
device. For that the slices of the operands are put in their places in global tensors of ones: how many numbers an
element takes depends on no value in any of the operators here. Others (poisson, binomial, randperm ...) have no rule:
every rank draws the global tensor from replicated operands. There is no generator state that could go wrong under
recompute or interleaved micro-batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from strategies.core.graph import Operator, Ref, TensorSpec, rewrite
from strategies.rules.registry import arguments, changed, local_function, resolve, rule
from strategies.rules.sharding import Dims, Local, Sharding, broadcast_dims, numbered, sharding
from strategies.rules.table import line
from strategies.rules.traits import TRAITS, traits

FILLING = sorted(name for name, row in TRAITS.items() if row.fills)
Block = tuple[Sequence[int], Sequence[Any]]
"""The global shape of a tensor, and where the rank's block begins in it."""
Rows = tuple[int, int, int, int]
"""The rows of a random tensor that belong to one batch split: dim, rows, number of splits, index of the split."""


def mix(*numbers: int) -> int:
    """A 63-bit key from numbers, the same on every machine and in every process."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def uniform(shape: Sequence[int], key: int, device: torch.device | str) -> Tensor:
    """Numbers in [0, 1) of `shape`, from `key` alone."""
    generator = torch.Generator(device).manual_seed(key)
    return torch.rand(tuple(shape), generator=generator, device=device)


def kept_block(
    x: Tensor,
    probability: float,
    key: int,
    ordinal: int,
    shape: Sequence[int],
    starts: Sequence[int],
    rows: Rows | None = None,
) -> Tensor:
    """Which elements of `x`, the block at `starts` of a tensor, a dropout keeps: those of `rows` among the numbers of
    global `shape`. On the CPU."""
    mask = uniform(shape, mix(key, ordinal), "cpu") >= probability
    if rows is not None:
        dim, own, count, number = rows
        inner = mask.shape[dim] // (own * count)
        mask = mask.reshape(*mask.shape[:dim], own, count, inner, *mask.shape[dim + 1 :])
        mask = mask.select(dim + 1, number).flatten(dim, dim + 1)
    return _cut(mask, starts, x.shape)


def _cut(tensor: Tensor, starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    for dim, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        tensor = tensor.narrow(dim, start, length)
    return tensor


def random_rows(operator: Operator, shape: Sequence[int]) -> tuple[tuple[int, ...], Rows | None]:
    """The random tensor of an exact operator for its `shape`: the shape over all batch splits, and its rows."""
    batch = operator.batch_slice
    if batch is None:
        return tuple(shape), None
    every = tuple(size * batch.count if dim == batch.dim else size for dim, size in enumerate(shape))
    return every, (batch.dim, batch.rows, batch.count, batch.index)


def in_row_major(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with their tensors contiguous: torch draws in the order of memory, ranks and one device must agree."""
    return rewrite(args, lambda leaf: leaf.contiguous() if isinstance(leaf, Tensor) else leaf)  # type: ignore[no-any-return]


@contextmanager
def seeding(*numbers: int) -> Iterator[None]:
    """torch's generators set from `numbers` inside, and put back afterwards."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices):
        torch.manual_seed(mix(*numbers))
        yield


@local_function
def seeded(target: str, key: int, ordinal: int, /, *args: Any, **kwargs: Any) -> Any:
    """Any random operator, with the generators set from (key, ordinal) for this call."""
    with seeding(key, ordinal):
        return resolve(target)(*in_row_major(args), **kwargs)


@local_function
def seeded_slice(target: str, key: int, ordinal: int, position: int, /, *args: Any, **kwargs: Any) -> Any:
    """Any random operator on one slice with per-slice random numbers, from (key, ordinal, position of the slice)."""
    with seeding(key, ordinal, position):
        return resolve(target)(*args, **kwargs)


@local_function
def random_block(
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
    placed = tuple(_placed(arg, *next(blocks)) if isinstance(arg, Tensor) else arg for arg in args)
    with seeding(key, ordinal):
        results = resolve(target)(*in_row_major(placed), **kwargs)
    if isinstance(results, Tensor):
        return _cut(results, starts, lengths).contiguous()
    return tuple(_cut(result, starts, lengths).contiguous() for result in results)


def _placed(x: Tensor, shape: Sequence[int], starts: Sequence[int]) -> Tensor:
    """A tensor of ones of the global shape that holds `x` where its block is."""
    if tuple(shape) == tuple(x.shape):
        return x
    ones = x.new_ones(tuple(shape))
    _cut(ones, starts, x.shape).copy_(x)
    return ones


def draws(operator: Operator) -> bool:
    """Whether an operator draws random numbers; attention does not where it drops nothing."""
    function = resolve(operator.target)
    if torch.Tag.nondeterministic_seeded not in getattr(function, "tags", ()):
        return False
    return not isinstance(function, torch._ops.OpOverload) or arguments(operator).get("dropout_p") != 0


def draw_replicated(operator: Operator, local: Local) -> Ref:
    """The local program of random operators without a rule: every rank draws the same global tensors."""
    return local.call("local.seeded", operator.target, local.key, local.ordinal, *local.args, **local.kwargs)


def starts_of(local: Local, dims: Dims, lengths: Sequence[int]) -> tuple[Any, ...]:
    """The start of a rank's block, per dim."""
    return tuple(0 if name is None else local.position(name, n) for name, n in zip(dims, lengths, strict=True))


def _draw(operator: Operator, local: Local, *, dims: Sequence[Dims], result: Dims, shared: Dims = ()) -> Ref:
    """The operator on its slices, or of their size (`fast`), or the block of the global draw (`exact`). Slices of
    `shared` factors have the same numbers."""
    call, args, kwargs = local.several if operator.multiple else local.call, local.args, local.kwargs
    if traits(operator.op).fills:  # numbers have no gradient, and some of these operators refuse it
        args = tuple(local.call("aten.detach.default", arg) if isinstance(arg, Ref) else arg for arg in args)
    seeds, lengths = (operator.target, local.key, local.ordinal), local.result_shape()
    if not local.exact:
        if not dims:
            args, kwargs = changed(operator.target, args, kwargs, size=lengths)
        where = local.position(tuple(name for name in result if name not in shared))
        return call("local.seeded_slice", *seeds, where, *args, **kwargs)
    blocks = []
    for position, own in enumerate(dims):
        sizes = local.operand_shape(position)
        shape = tuple(round(n * local.parts(name)) if name else n for name, n in zip(own, sizes, strict=True))
        blocks.append((shape, starts_of(local, own, sizes)))
    starts = starts_of(local, result, lengths)
    return call("local.random_block", *seeds, tuple(blocks), starts, lengths, *args, **kwargs)


@rule("rand", "randn", "randint", "native_dropout", *FILLING)
def elements(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """Numbers of a given size, or like (and perhaps by) operands that broadcast: every dim passes."""
    shape = operator.results[0].shape
    result, dims = numbered(len(shape)), broadcast_dims(specs, shape)
    local = partial(_draw, dims=dims, result=result)
    return sharding(operator, specs, dims, [result] * len(operator.results), local=local)


@rule("alpha_dropout", "feature_dropout", "feature_alpha_dropout")
def dropouts(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """x [...]; of features [n, c, ...] complete channels are dropped."""
    dims = numbered(len(specs[0].shape))
    shared = dims[2:] if operator.op.startswith("feature") else ()

    def program(operator: Operator, local: Local) -> Ref:
        x, probability, training = local.args
        if not training or probability == 0:
            return local.call("aten.alias.default", x)
        return _draw(operator, local, dims=[dims], result=dims, shared=shared)

    return sharding(operator, specs, [dims], [dims], local=program)


@rule("multinomial")
def multinomial(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """weights [(rows,) categories] -> categories [(rows,) samples]: rows pass."""
    dims: Dims = (*("d0",) * (len(specs[0].shape) - 1), None)
    return sharding(operator, specs, [dims], [dims], local=partial(_draw, dims=[dims], result=dims))


def _dropped(x: Tensor, probability: float, mask: Tensor) -> Tensor:
    return x * mask.to(x.device) / (1 - probability) if probability < 1 else x * 0


@local_function
def dropout_slice(x: Tensor, probability: float, key: int, ordinal: int, position: int) -> Tensor:
    """Dropout of one slice with per-slice random numbers, from (key, ordinal, position of the slice)."""
    return _dropped(x, probability, uniform(x.shape, mix(key, ordinal, position), x.device) >= probability)


@local_function
def dropout_block(
    x: Tensor,
    probability: float,
    key: int,
    ordinal: int,
    shape: Sequence[int],
    starts: Sequence[int],
    rows: Rows | None = None,
) -> Tensor:
    """Dropout of a block with the numbers of the global tensor, see `kept_block`."""
    return _dropped(x, probability, kept_block(x, probability, key, ordinal, shape, starts, rows))


def _leaky(x: Tensor, lower: float, upper: float, numbers: Tensor) -> Tensor:
    slopes = (lower + (upper - lower) * numbers).to(x.device, x.dtype)
    return torch.where(x > 0, x, x * slopes)


@local_function
def rrelu_slice(x: Tensor, lower: float, upper: float, key: int, ordinal: int, position: int) -> Tensor:
    """Leaky relu of one slice with per-slice random slopes."""
    return _leaky(x, lower, upper, uniform(x.shape, mix(key, ordinal, position), x.device))


@local_function
def rrelu_block(
    x: Tensor, lower: float, upper: float, key: int, ordinal: int, shape: Sequence[int], starts: Sequence[int]
) -> Tensor:
    """Leaky relu of the block at `starts` of a tensor of global `shape`, with the slopes of the global tensor."""
    return _leaky(x, lower, upper, _cut(uniform(shape, mix(key, ordinal), "cpu"), starts, x.shape).contiguous())


def _dropout(operator: Operator, local: Local) -> Ref:
    x, probability, training = local.args
    if not training or probability == 0:
        return local.call("aten.alias.default", x)
    sizes = local.operand_shape(0)
    dims, common = numbered(len(sizes)), (x, probability, local.key, local.ordinal)
    if not local.exact:
        return local.call("local.dropout_slice", *common, local.position(dims))
    shape, rows = random_rows(operator, operator.results[0].shape)
    return local.call("local.dropout_block", *common, shape, starts_of(local, dims, sizes), rows)


def _rrelu(operator: Operator, local: Local) -> Ref:
    """Leaky relu with a random slope per element (torch draws for negative ones alone, which slices cannot repeat)."""
    given = local.arguments
    if not given["training"]:
        return local.itself()
    sizes, common = local.operand_shape(), (given["self"], given["lower"], given["upper"], local.key, local.ordinal)
    dims = numbered(len(sizes))
    if not local.exact:
        return local.call("local.rrelu_slice", *common, local.position(dims))
    return local.call("local.rrelu_block", *common, operator.results[0].shape, starts_of(local, dims, sizes))


line("... -> ...", "dropout", local=_dropout)
line("... -> ...", "rrelu", local=_rrelu)
