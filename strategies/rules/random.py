"""Random operators draw from stateless keys, so that replicas of one slice draw the same numbers and different slices
different ones.

A key is an argument of the program, made from (seed, step, micro-batch); an operator adds its ordinal among the random
operators of the graph. `fast`: each slice draws its own numbers from key, ordinal and the slice's position. `exact`:
the numbers of the global tensor are drawn and the rank's block is kept, so that a sharded run repeats those of one
device. There is no generator state that could go wrong under recompute or interleaved micro-batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from strategies.core.graph import Operator, Ref, TensorSpec, rewrite
from strategies.rules.arguments import named
from strategies.rules.notation import notation
from strategies.rules.registry import local_function, resolve, rule
from strategies.rules.sharding import Local, Sharding


def mix(*numbers: int) -> int:
    """A 63-bit key from numbers, the same on every machine and in every process."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def uniform(shape: Sequence[int], key: int, device: torch.device | str) -> Tensor:
    """Numbers in [0, 1) of `shape`, from `key` alone."""
    generator = torch.Generator(device).manual_seed(key)
    return torch.rand(tuple(shape), generator=generator, device=device)


def kept(shape: Sequence[int], probability: float, key: int, device: torch.device | str) -> Tensor:
    """A boolean mask of `shape`: False with `probability`, from `key` alone."""
    return uniform(shape, key, device) >= probability


def in_row_major(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with their tensors contiguous: torch draws in the order of memory, ranks and one device must agree."""
    return rewrite(args, lambda leaf: leaf.contiguous() if isinstance(leaf, Tensor) else leaf)  # type: ignore[no-any-return]


@local_function
def dropout_slice(x: Tensor, probability: float, key: int, ordinal: int, position: int) -> Tensor:
    """Dropout of one slice with per-slice random numbers, from (key, ordinal, position of the slice)."""
    mask = kept(x.shape, probability, mix(key, ordinal, position), x.device)
    return x * mask / (1 - probability) if probability < 1 else x * 0


Rows = tuple[int, int, int, int]
"""The rows of a random tensor that belong to one batch split: dim, rows, number of splits, index of the split."""


def of_rows(numbers: Tensor, rows: Rows | None) -> Tensor:
    """Select the random numbers of one split's rows."""
    if rows is None:
        return numbers
    dim, own, count, number = rows
    inner = numbers.shape[dim] // (own * count)
    shape = (*numbers.shape[:dim], own, count, inner, *numbers.shape[dim + 1 :])
    return numbers.reshape(shape).select(dim + 1, number).flatten(dim, dim + 1)


def drawn_rows(operator: Operator, shape: Sequence[int]) -> tuple[tuple[int, ...], Rows | None]:
    """The random tensor of an exact operator for its `shape`: the shape over all batch splits, and its rows."""
    share = operator.batch_slice
    if share is None:
        return tuple(shape), None
    whole = tuple(size * share.count if dim == share.dim else size for dim, size in enumerate(shape))
    return whole, (share.dim, share.rows, share.count, share.index)


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
    """Dropout of the block at `starts` of a tensor, with the numbers of the global tensor: those of `rows` among the
    numbers of global `shape`."""
    mask = of_rows(kept(shape, probability, mix(key, ordinal), "cpu"), rows)
    for dim, start in enumerate(starts):
        mask = mask.narrow(dim, start, x.shape[dim])
    return x * mask.to(x.device) / (1 - probability) if probability < 1 else x * 0


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


def draws(operator: Operator) -> bool:
    """Whether an operator reads torch's generators; attention does not where it drops nothing."""
    if torch.Tag.nondeterministic_seeded not in getattr(resolve(operator.target), "tags", ()):
        return False
    return named(operator.target, operator.args, operator.keywords).get("dropout_p") != 0


def draw_whole(operator: Operator, local: Local) -> Ref:
    """The local program of random operators without a rule: every rank draws the same global tensors."""
    return local.call("local.seeded", operator.target, local.key, local.ordinal, *local.args, **local.kwargs)


def _dropout(operator: Operator, local: Local) -> Ref:
    x, probability, training = local.args
    if not training or probability == 0:
        return local.call("aten.alias.default", x)
    shape = operator.results[0].shape
    if local.exact:
        sizes = local.operand_shape(0)
        starts = tuple(local.position(f"d{i}", size) for i, size in enumerate(sizes))
        drawn = drawn_rows(operator, shape)
        return local.call("local.dropout_block", x, probability, local.key, local.ordinal, drawn[0], starts, drawn[1])
    factors = tuple(f"d{i}" for i in range(len(shape)))
    return local.call("local.dropout_slice", x, probability, local.key, local.ordinal, local.position(factors))


@rule("dropout")
def dropout(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding | None:
    """dropout(x [...], probability, training) -> [...]."""
    return notation("... -> ...", operator, specs, local=_dropout)
