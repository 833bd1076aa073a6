"""Which elements of its slices a rank keeps in fp32 under ZeRO: DeepSpeed's arithmetic as pure functions.

Stages 1 and 2 lay all parameters of a group one behind the other and cut that into equal parts, one per replica; stage
3 cuts every parameter by itself. Invariant: over all replicas every element is in one range; a test holds both to
DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

ALIGNMENT = 2
"""Parts of stages 1 and 2 are multiples of as many elements."""


@dataclass(frozen=True)
class Range:
    """`count` elements of the `member`-th parameter from element `first` on, from `position` on in the rank's part."""

    member: int
    first: int
    position: int
    count: int


def part_of_flat(sizes: Sequence[int], replicas: int) -> int:
    """Elements of a rank's part at stages 1 and 2, padding included; `sizes` are those of the parameters' slices."""
    aligned = ALIGNMENT * replicas
    return -(-sum(sizes) // aligned) * aligned // replicas


def ranges_of_flat(sizes: Sequence[int], replicas: int, index: int) -> Iterator[Range]:
    """The ranges of parameters in the part of the `index`-th replica at stages 1 and 2."""
    part = part_of_flat(sizes, replicas)
    start, stop = index * part, (index + 1) * part
    for member, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        first, last = max(end - size, start), min(end, stop)
        if first < last:
            yield Range(member, first - (end - size), first - start, last - first)


def part_of_one(size: int, replicas: int) -> int:
    """Elements of a rank's part of one parameter at stage 3, padding included."""
    return -(-size // replicas)


def ranges_of_each(sizes: Sequence[int], replicas: int, index: int) -> Iterator[Range]:
    """The ranges of parameters in the parts of the `index`-th replica at stage 3, concatenated."""
    position = 0
    for member, size in enumerate(sizes):
        part = part_of_one(size, replicas)
        first = index * part
        if (count := min(part, size - first)) > 0:
            yield Range(member, first, position, count)
        position += part
