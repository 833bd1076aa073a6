"""Which elements of its slices a rank keeps in fp32 under ZeRO: DeepSpeed's arithmetic as pure functions.

Stages 1 and 2 lay all parameters of a group one behind the other and cut that into equal parts, one per replica; stage
3 cuts every parameter by itself. Invariant: over all replicas every element is in one range; a test holds both to
DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from strategies.core.program import Program
from strategies.optimizer.updates import local_elements

ALIGNMENT = 2
"""Parts of stages 1 and 2 are multiples of as many elements."""


@dataclass(frozen=True)
class Range:
    """`count` elements of the `member`-th parameter from element `first` on, from `position` on in the rank's part."""

    member: int
    first: int
    position: int
    count: int

    def of(self, flat: Tensor) -> Tensor:
        """This range of the rank's part."""
        return flat[self.position : self.position + self.count]


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


def elements_of_part(sizes: Sequence[int], replicas: int, stage: int) -> int:
    """Elements of a rank's part of a flat tensor, padding included."""
    return sum(-(-size // replicas) for size in sizes) if stage == 3 else part_of_flat(sizes, replicas)


def ranges_of_each(sizes: Sequence[int], replicas: int, index: int) -> Iterator[Range]:
    """The ranges of parameters in the parts of the `index`-th replica at stage 3, concatenated."""
    position = 0
    for member, size in enumerate(sizes):
        part = -(-size // replicas)
        first = index * part
        if (count := min(part, size - first)) > 0:
            yield Range(member, first, position, count)
        position += part


def parts(program: Program, rank: int, stage: int, names: Sequence[str]) -> tuple[list[tuple[str, Range]], int]:
    """What `rank` keeps in fp32 of the slices of parameters that have one replica group, and the size of the flat
    tensor for it, padding included."""
    mesh, by_name = program.mesh, {source.name: source for source in program.parameters}
    replicas = program.layouts[by_name[names[0]].id].replica_axes(mesh)
    count, index = mesh.product(replicas), mesh.index(rank, replicas)
    sizes = [local_elements(program, by_name[name]) for name in names]
    ranges = (ranges_of_each if stage == 3 else ranges_of_flat)(sizes, count, index)
    return [(names[one.member], one) for one in ranges], elements_of_part(sizes, count, stage)
