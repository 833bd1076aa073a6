"""A random graph while it grows: sources, operators and the values that they have on one device.

Operators are emitted as an exported model would call them and run at once, so that the next draw sees shapes and
values. Invariant: every value is finite and of moderate size, and a draw that is rejected leaves no trace.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from strategies.core.graph import Kind, Operator, OperatorGraph, Ref, Source, TensorSpec, refs, rewrite
from strategies.rules.registry import resolve

SIZES = (1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8, 8, 9, 11, 12, 12, 16)
"""Sizes of dims: powers of two and multiples of three divide by the meshes, primes do not, 1 is broadcast."""
MOST_ELEMENTS = 600
LARGEST = 60.0
"""Results with greater values are rejected: rounding would hide errors."""
NEAR = 1e-6
"""Values closer than this count as equal where their order or sign decides."""


class Rejected(Exception):
    """This call does not suit the available values; another one is tried."""


class Pool:
    """Uses `rng` as its only source of randomness: the same seed gives the same graph."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.generator = torch.Generator().manual_seed(rng.getrandbits(40))
        self.sources: list[Source] = []
        self.operators: list[Operator] = []
        self.values: dict[Ref, Tensor] = {}
        self.unused: dict[Ref, None] = {}

    def graph(self, outputs: Sequence[Ref]) -> OperatorGraph:
        order = tuple(source.name for source in self.sources if source.kind in ("parameter", "buffer"))
        return OperatorGraph(tuple(self.sources), tuple(self.operators), tuple(outputs), order)

    def attempt(self, draw: Callable[[Pool], None]) -> bool:
        """Whether a generator succeeded; a rejected call is undone."""
        before = len(self.sources), len(self.operators), dict(self.values), dict(self.unused)
        try:
            draw(self)
        except Rejected:
            del self.sources[before[0] :], self.operators[before[1] :]
            self.values, self.unused = before[2:]
            return False
        return True

    # sources

    def source(self, value: Tensor, trainable: bool | None = None) -> Ref:
        """A new source that holds `value`: floating ones are mostly parameters, others batch entries or buffers."""
        kinds: tuple[Kind, ...] = ("input", "buffer", "constant")
        if trainable is None:
            trainable = value.is_floating_point() and self.rng.random() < 0.85
        if value.is_floating_point() and (trainable or self.rng.random() < 0.3):
            kinds = ("parameter",)
        id = f"x{len(self.sources)}"
        spec = _spec(value)
        self.sources.append(Source(id, self.rng.choice(kinds), id, spec, trainable))
        self.values[Ref(id)] = value
        return Ref(id)

    def floats(self, shape: Sequence[int], low: float | None = None, high: float = 1.0) -> Ref:
        """A new source of normal numbers, or of numbers between `low` and `high`."""
        if low is not None:
            return self.source(self._uniform(shape, low, high))
        return self.source(torch.randn(tuple(shape), dtype=torch.float64, generator=self.generator).clamp(-3, 3))

    def fixed(self, shape: Sequence[int], low: float, high: float) -> Ref:
        """A new source between `low` and `high` that is not trained, for arguments without a derivative."""
        return self.source(self._uniform(shape, low, high), trainable=False)

    def _uniform(self, shape: Sequence[int], low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(tuple(shape), dtype=torch.float64, generator=self.generator)

    def integers(self, shape: Sequence[int], high: int, low: int = 0) -> Ref:
        return self.source(torch.randint(low, high, tuple(shape), generator=self.generator))

    def booleans(self, shape: Sequence[int]) -> Ref:
        return self.source(torch.rand(tuple(shape), generator=self.generator) < 0.5)

    def shape(self, least: int = 0, most: int = 4, sizes: Sequence[int] = SIZES) -> tuple[int, ...]:
        """A random shape of `least` to `most` dims."""
        rank = self.rng.choice([rank for rank in (0, 1, 2, 2, 3, 3, 4, 5) if least <= rank <= most] or [least])
        dims: list[int] = []
        for _ in range(rank):
            fitting = [size for size in sizes if size * _product(dims) <= MOST_ELEMENTS] or [1]
            dims.append(self.rng.choice(fitting))
        return tuple(dims)

    # existing values

    def shape_of(self, ref: Ref) -> tuple[int, ...]:
        return tuple(self.values[ref].shape)

    def tensor(self, least: int = 0, most: int = 5, accept: Callable[[Tensor], bool] = lambda _: True) -> Ref:
        """A floating value with `least` to `most` dims: mostly one that is there, preferably unused, else a new one."""
        fitting = [
            ref
            for ref, value in self.values.items()
            if value.is_floating_point() and least <= value.dim() <= most and accept(value)
        ]
        fresh = [ref for ref in fitting if ref in self.unused]
        if fresh and self.rng.random() < 0.7:
            return self.rng.choice(fresh)
        if fitting and self.rng.random() < 0.8:
            return self.rng.choice(fitting)
        new = self.floats(self.shape(least, min(most, 4)))
        if not accept(self.values[new]):
            raise Rejected
        return new

    def like(self, shape: Sequence[int]) -> Ref:
        """A floating value of exactly this shape."""
        fitting = [ref for ref, v in self.values.items() if v.is_floating_point() and tuple(v.shape) == tuple(shape)]
        return self.rng.choice(fitting) if fitting and self.rng.random() < 0.7 else self.floats(shape)

    def within(self, ref: Ref, low: float, high: float) -> Ref:
        """A value of the same shape between `low` and `high`: `ref` itself if it fits, squeezed, or a new source."""
        value = self.values[ref]
        if value.numel() and low < value.min() and value.max() < high:
            return ref
        if self.rng.random() < 0.4:
            return self.floats(value.shape, low + (high - low) * 0.02, high - (high - low) * 0.02)
        squeezed = self.emit("aten.sigmoid.default", ref)
        return self.emit("aten.add.Tensor", self.emit("aten.mul.Tensor", squeezed, (high - low) * 0.96), low + 0.02)

    def broadcasting(self, shape: Sequence[int]) -> tuple[int, ...]:
        """A shape that broadcasts to `shape`: some dims of size 1, some leading ones left out."""
        rng = self.rng
        if rng.random() < 0.5:
            return tuple(shape)
        kept = shape[rng.randint(0, len(shape)) :]
        return tuple(1 if rng.random() < 0.25 else size for size in kept)

    def dim(self, ref: Ref) -> int:
        """One dim of a value, counted from either end."""
        rank = self.values[ref].dim()
        if not rank:
            raise Rejected
        return self.rng.randrange(-rank, rank)

    # conditions on values

    def away_from(self, ref: Ref, *points: float) -> None:
        """Rejects the call if an element is at one of the points, where a function has a kink or a jump."""
        value = self.values[ref]
        if value.numel() and any(float((value - point).abs().min()) < NEAR for point in points):
            raise Rejected

    def apart(self, ref: Ref, *others: Ref) -> None:
        """Rejects the call if two elements are (nearly) equal, so that their order could depend on rounding."""
        elements = torch.cat([self.values[r].flatten() for r in (ref, *others)]).sort().values
        if elements.numel() > 1 and float(elements.diff().min()) < NEAR:
            raise Rejected

    def different(self, left: Ref, right: Ref) -> None:
        """Rejects the call if the operands are equal in an element."""
        gap = (self.values[left] - self.values[right]).abs()
        if gap.numel() and float(gap.min()) < NEAR:
            raise Rejected

    # operators

    def call(self, target: str, *args: Any, **kwargs: Any) -> list[Ref]:
        """Emit an operator; its results. A call that torch does not run on these values (a view of strided ones) is
        rejected."""
        place = lambda leaf: self.values[leaf] if isinstance(leaf, Ref) else leaf  # noqa: E731
        with torch.no_grad(), torch.random.fork_rng([]):
            torch.manual_seed(0)
            try:
                found = resolve(target)(*rewrite(args, place), **rewrite(kwargs, place))
            except RuntimeError as problem:
                raise Rejected from problem
        multiple = isinstance(found, (tuple, list))
        results: Sequence[Tensor] = found if multiple else (found,)
        if any(v.numel() > 4 * MOST_ELEMENTS or not v.numel() or not _moderate(v) for v in results):
            raise Rejected
        op = target.split(".")[1]
        id = f"{op}_{len(self.operators)}"
        specs = tuple(map(_spec, results))
        items = tuple(kwargs.items())
        operator = Operator(id, id, "", op, target, args, items, specs, multiple, "", ())
        self.operators.append(operator)
        for ref in refs((args, tuple(kwargs.values()))):
            self.unused.pop(ref, None)
        made = [Ref(id, i) for i in range(len(results))]
        for ref, value in zip(made, results, strict=True):
            self.values[ref] = value
            self.unused[ref] = None
        return made

    def forget(self, ref: Ref) -> None:
        """Keep a value from being used by later draws, and from being an output."""
        del self.values[ref]
        self.unused.pop(ref, None)

    def emit(self, target: str, *args: Any, **kwargs: Any) -> Ref:
        """Emit an operator with one result."""
        (result,) = self.call(target, *args, **kwargs)
        return result


def _spec(value: Tensor) -> TensorSpec:
    return TensorSpec(tuple(value.shape), str(value.dtype).removeprefix("torch."))


def _product(sizes: Sequence[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product


def _moderate(value: Tensor) -> bool:
    if not (value.is_floating_point() or value.is_complex()):
        return True
    return bool(torch.isfinite(value.abs()).all()) and float(value.abs().max()) <= LARGEST
