"""Which gradients are added by one call: buckets, in the order in which backward completes them.

A gradient is complete when backward has passed the first use of its parameter, so the order follows from the program
alone and is the same on all ranks. Invariant: every open gradient is in exactly one bucket, and the bytes sent do not
depend on how the buckets are cut.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from strategies.core.errors import StrategyError
from strategies.core.graph import ITEM_BYTES
from strategies.core.program import Program
from strategies.core.steps import ALL_REDUCE
from strategies.optimizer.updates import DEFAULT_BUCKETS, BucketLimits, local_elements, parameters

SMALLEST, LARGEST = 2**20, 25 * 2**20
"""Bytes between which a bucket is chosen: below the first a call costs the same however little it carries."""
PARTS = 8
"""How many buckets there are at best: the last one has nothing left to hide behind."""


@dataclass(frozen=True)
class Bucket:
    """Gradients that are added over `axes` by one all-reduce; `dtype` is that of the sum."""

    axes: tuple[str, ...]
    dtype: str
    names: tuple[str, ...]
    elements: int


def completed(program: Program) -> tuple[str, ...]:
    """The parameters whose gradients are added after backward, in the order in which backward completes them."""
    first: dict[str, int] = {}
    for position, instruction in enumerate(program.instructions):
        for ref in instruction.operands:
            first.setdefault(ref.id, position)
    place = {source.name: first.get(source.id, 0) for source in parameters(program)}
    names = [name for name in reversed(program.trainable_names) if program.reductions[name]]
    return tuple(sorted(names, key=lambda name: -place[name]))


def buckets(program: Program, cut: BucketLimits = DEFAULT_BUCKETS) -> tuple[Bucket, ...]:
    """The buckets of `program` in the order in which they are complete. Raises StrategyError for a position behind the
    last gradient."""
    order = completed(program)
    if cut.at is not None and cut.at and cut.at[-1] >= len(order):
        raise StrategyError(
            "MW442",
            f"parallel.comm_fusion.all_reduce.config = {list(cut.at)} cuts behind gradient {cut.at[-1]}, but there are "
            f"{len(order)} gradients to add; choose positions below {len(order)}, or mode: auto.",
        )
    elements = {source.name: local_elements(program, source) for source in parameters(program)}
    dtypes = {source.name: _summed_in(source.spec.dtype) for source in parameters(program)}
    if cut.size is None:
        total = sum(elements[name] * ITEM_BYTES[dtypes[name]] for name in order)
        size = min(max(total // PARTS, SMALLEST), LARGEST)
    else:
        size = cut.size
    open_: dict[tuple[tuple[str, ...], str, int], list[str]] = {}
    closed: list[tuple[int, Bucket]] = []

    def close(key: tuple[tuple[str, ...], str, int]) -> None:
        names = open_.pop(key)
        whole = Bucket(key[0], key[1], tuple(names), sum(elements[name] for name in names))
        closed.append((order.index(names[-1]), whole))

    for position, name in enumerate(order):
        segment = 0 if cut.at is None else bisect_right(cut.at, position)
        key = (program.reductions[name], dtypes[name], segment)
        elements_so_far = sum(elements[other] for other in open_.get(key, ()))
        if key in open_ and cut.at is None and (elements_so_far + elements[name]) * ITEM_BYTES[key[1]] > size:
            close(key)
        open_.setdefault(key, []).append(name)
    for key in list(open_):
        close(key)
    return tuple(bucket for _, bucket in sorted(closed, key=lambda one: one[0]))


def _summed_in(dtype: str) -> str:
    return dtype if ITEM_BYTES[dtype] >= 4 else "float32"


def predicted(program: Program, *, measure: bool = True) -> dict[str, int]:
    """Bytes that one rank sends per optimizer step for gradients, by collective; `measure` adds the norm (a double)."""
    mesh, sources = program.mesh, {source.name: source for source in parameters(program)}
    total = sum(
        all_reduce_elements([local_elements(program, sources[name])], mesh.product(program.reductions[name]))
        * ITEM_BYTES[_summed_in(sources[name].spec.dtype)]
        for name in completed(program)
    )
    norm = all_reduce_elements([1], mesh.size) * 8 if measure and mesh.size > 1 else 0
    return {ALL_REDUCE: total + norm} if total + norm else {}


def all_reduce_elements(elements: Iterable[int], ranks: int) -> int:
    """Elements that a rank sends in an all-reduce of tensors with `elements` elements each, however they are joined."""
    return sum(-(-2 * (ranks - 1) * count // ranks) for count in elements)
