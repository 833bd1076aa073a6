"""The device mesh: named axes, outermost (slowest link) first; rank = row-major coordinate. Pure arithmetic.

Invariant: a rank's coordinate along every axis is unique, so a set of axes cuts the ranks into equal groups. Slices are
equal, except along the one axis of a `Share`: a mesh with a share is the mesh as the ranks of one coordinate see it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise, product

from strategies.core.errors import StrategyError


@dataclass(frozen=True)
class Share:
    """What the ranks of one coordinate along `axis` have of a dim that the axis slices: `start` to `stop` of `total`
    equal parts."""

    axis: str
    start: int
    stop: int
    total: int

    @property
    def fraction(self) -> Fraction:
        return Fraction(self.stop - self.start, self.total)


@dataclass(frozen=True)
class Mesh:
    """`axes` are (name, size) pairs, outermost first. Size-1 axes are allowed and never matter. Without a `share` all
    slices are equal."""

    axes: tuple[tuple[str, int], ...]
    share: Share | None = None

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names):
            raise StrategyError("MW407", f"The mesh names an axis twice: {', '.join(names)}.")
        for name, size in self.axes:
            if size < 1:
                raise StrategyError("MW407", f"Mesh axis {name!r} has size {size}; a size is at least 1.")

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @cached_property
    def sizes(self) -> dict[str, int]:
        return dict(self.axes)

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)

    @cached_property
    def strides(self) -> dict[str, int]:
        """The distance of two neighbours along an axis, in ranks."""
        strides, step = {}, self.size
        for name, size in self.axes:
            step //= size
            strides[name] = step
        return strides

    def product(self, axes: Iterable[str]) -> int:
        """Number of slices that `axes` make together."""
        return math.prod(map(self.sizes.__getitem__, axes))

    @cached_property
    def even(self) -> Mesh:
        """The mesh with equal slices."""
        return self if self.share is None else Mesh(self.axes)

    def parts(self, axes: Iterable[str]) -> Fraction:
        """The number of slices as long as a rank's that `axes` make together: `product`, where slices are equal."""
        names = tuple(axes)
        if self.share is None or self.share.axis not in names:
            return Fraction(self.product(names))
        return Fraction(self.product(names), self.sizes[self.share.axis]) / self.share.fraction

    def length(self, size: int, axes: Sequence[str]) -> int:
        """The length of one slice that `axes` (major to minor) make of a dim of `size`, padding included.

        Raises StrategyError where the share has no integer number of elements.
        """
        if self.share is None or self.share.axis not in axes:
            return -(-size // self.product(axes)) if axes else size
        length = size / self.parts(axes)
        if length.denominator > 1 or axes[0] != self.share.axis or size % self.share.total:
            raise StrategyError(
                "MW414",
                f"A dim of {size} elements over {'*'.join(axes)} has no slice for {self.share.stop - self.share.start} "
                f"of {self.share.total} rows.",
            )
        return length.numerator

    def start(self, rank: int, size: int, axes: Sequence[str]) -> int:
        """The first element of the slice of `rank` of a dim of `size`. Raises StrategyError as `length`."""
        length = self.length(size, axes)
        if self.share is None or self.share.axis not in axes:
            return self.index(rank, axes) * length
        return size * self.share.start // self.share.total + self.index(rank, axes[1:]) * length

    def coordinate(self, rank: int, axis: str) -> int:
        return rank // self.strides[axis] % self.sizes[axis]

    def index(self, rank: int, axes: Sequence[str]) -> int:
        """Position of `rank` among the slices that `axes` (major to minor) make: a mixed-radix number."""
        position = 0
        for axis in axes:
            position = position * self.sizes[axis] + self.coordinate(rank, axis)
        return position

    def group(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axes` only, in the order of `index(_, axes)`."""
        base = rank - sum(self.coordinate(rank, axis) * self.strides[axis] for axis in axes)
        steps = [[i * self.strides[axis] for i in range(self.sizes[axis])] for axis in axes]
        return tuple(base + sum(offsets) for offsets in product(*steps))

    def groups(self, axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Every group along `axes`, each once, by its lowest rank."""
        return tuple(dict.fromkeys(self.group(rank, axes) for rank in range(self.size)))

    def sorted(self, axes: Iterable[str]) -> tuple[str, ...]:
        """`axes` in mesh order, without axes of size 1."""
        wanted = set(axes)
        return tuple(name for name, size in self.axes if name in wanted and size > 1)

    def others(self, axes: Iterable[str]) -> tuple[str, ...]:
        """The axes of the mesh that are not in `axes`, in mesh order, without axes of size 1."""
        return self.sorted(set(self.names) - set(axes))


def accumulate(matrix: Sequence[int]) -> tuple[int, ...]:
    """Products from the left: (2, 8, 32) -> (2, 16, 512)."""
    return tuple(math.prod(matrix[: i + 1]) for i in range(len(matrix)))


def differences(points: Sequence[int]) -> tuple[int, ...]:
    """The inverse of `accumulate`: (2, 16, 512) -> (2, 8, 32)."""
    return tuple(b // a for a, b in pairwise((1, *points)))


def common_refinement(*matrices: Sequence[int]) -> tuple[int, ...] | None:
    """The coarsest device matrix of which every given one is a merging of neighbours: (8, 4), (2, 16) -> (2, 4, 4).

    It consists of the union of the accumulated products; None where one of these does not divide the next. All matrices
    have the same product. Axes of size 1 disappear.
    """
    points = sorted({point for matrix in matrices for point in accumulate(matrix)} - {1})
    if any(b % a for a, b in pairwise(points)):
        return None
    return differences(points)


def primes(number: int) -> tuple[int, ...]:
    """Prime factors, smallest first: 24 -> (2, 2, 2, 3)."""
    factors, candidate = [], 2
    while number > 1:
        while number % candidate == 0:
            factors.append(candidate)
            number //= candidate
        candidate += 1
    return tuple(factors)
