"""What a sharding rule says about one operator: its factors, and how a slice of it is computed.

A factor is a loop of the operator, written like an einsum index. A dim carries one factor or none (then it is
replicated). From the factors and an assignment (factor -> mesh axes) follow the layouts of operands and results and of
the gradients: with U all assigned axes, the gradient of an operand has the operand's layout and is partial over U minus
the operand's own axes. Backward is linear in the gradients of the results, so these may be partial over more axes,
those of `DEFERRED`: then the operands' are, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Protocol

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh

Dims = tuple[str | None, ...]
Assignment = Mapping[str, tuple[str, ...]]
"""Factor -> mesh axes that slice it, major to minor. Factors that are missing stay replicated."""
DEFERRED = "deferred"
"""The factor of no dim: over its axes ranks compute the same, each for a part of the results' gradients alone."""


class Local(Protocol):
    """What a rule's local program may do. Arguments and results are `Ref`s to the rank's own slices.

    `args`, `kwargs` and `arguments` (all of them, by name) are the operator's, with the operands' slices in place;
    `itself` calls the operator with these, some of them changed; `several` calls what returns a tuple (result i is
    `Ref(ref.id, i)`). `position` stands for a number that differs from rank to rank: the index of the rank's slice of
    the factors, or with its length `stride` where it begins; `size` is a factor's global size. Random operators read
    `key` (the program's), `ordinal` (theirs) and `exact`. `parts` is how many slices like the rank's own the factors
    have, `slices` the same where these are `equal`: it refuses slices of different sizes.

    `sum_over` adds a value of local shape `shape` over the slices of factors; with `differentiable` the ranks'
    gradients of the sum are added in backward. `gather_over` stacks the slices' values on a new dim 0,
    [slices, *shape], or joins them along an existing `dim`; in backward each slice gets the sum of the ranks' gradients
    of its own part, or nothing where it is not `differentiable`. `windows_over` fetches, of the first operand's slice
    `value`, the `windows` of other slices: dim -> (factor, the global (start, stop) that each slice of the factor
    gets); in backward, overlapping gradients are added.
    `dtype` is that of the value (the operator's, if none is given). Both are collectives in backward
    too, so every rank must use a differentiable result in a way that autograd sees (times zero, if need be). `ring`
    says whether keys and values shall not be gathered. `cooperate` calls a local function that communicates itself,
    through channels: a `channel` sends tensors of local `shapes` together, in a step of one kind (`rotate`, `mirror`)
    over the slices of a factor, `forward` times in forward and `backward` times in backward.
    """

    @property
    def args(self) -> tuple[Any, ...]: ...
    @property
    def kwargs(self) -> dict[str, Any]: ...
    @property
    def arguments(self) -> dict[str, Any]: ...
    @property
    def exact(self) -> bool: ...
    @property
    def key(self) -> Any: ...
    @property
    def ordinal(self) -> int: ...
    @property
    def ring(self) -> bool: ...
    def itself(self, /, **changes: Any) -> Ref: ...
    def call(self, target: str, *args: Any, **kwargs: Any) -> Ref: ...
    def several(self, target: str, *args: Any, **kwargs: Any) -> Ref: ...
    def slices(self, *factors: str) -> int: ...
    def parts(self, *factors: str) -> float: ...
    def equal(self, *factors: str) -> bool: ...
    def size(self, factor: str) -> int: ...
    def position(self, factors: str | Dims, stride: int | None = None) -> Any: ...
    def sum_over(
        self,
        value: Ref,
        *factors: str,
        shape: Sequence[int] = (),
        differentiable: bool = False,
        dtype: str | None = None,
    ) -> Ref: ...
    def gather_over(
        self,
        value: Ref,
        *factors: str,
        shape: Sequence[int] = (),
        dtype: str | None = None,
        dim: int | None = None,
        differentiable: bool | None = None,
    ) -> Ref: ...
    def windows_over(self, value: Ref, windows: Mapping[int, tuple[str, Sequence[tuple[int, int]]]]) -> Ref: ...
    def channel(
        self, kind: str, factor: str, shapes: Sequence[Sequence[int]], dtype: str, forward: int, backward: int
    ) -> Any: ...
    def cooperate(self, target: str, channels: Sequence[Any], *args: Any) -> Ref: ...
    def operand_shape(self, index: int = 0) -> tuple[int, ...]: ...
    def result_shape(self, index: int = 0) -> tuple[int, ...]: ...


LocalProgram = Callable[[Operator, Local], "Ref | tuple[Ref, ...]"]
"""Returns the operator's result: one reference (for several results, to what returns them all), or one per result."""


@dataclass(frozen=True)
class Sharding:
    """The factors of one operator. `sizes` holds, per factor, the number that a slice count must divide, in the order
    in which the operands name the factors; `sums` are the factors over which results are partial sums.

    `padded` are the factors that may also be cut into slices that do not divide: the last slices are then padded. For
    them the rule warrants that padding of operands reaches nothing but padding of results (forward values there are
    arbitrary but finite), and that where the gradient of a result's padding is zero, the operands' is. `lengths` are
    the sizes of a padded factor's dims where these are not all the same: rows and windows of a picture.

    `gathered` are the factors along which the local program gathers operands: a configured strategy may replicate
    these, which means the same.

    `defers`: whether a search may assign axes to `DEFERRED`, as it may for values computed from parameters alone.

    `local` computes one rank's slice; None calls the operator itself on the slices. `known` is False for operators
    without a rule.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: Mapping[str, int]
    sums: frozenset[str] = frozenset()
    local: LocalProgram | None = None
    flops: float = 0.0
    known: bool = True
    padded: frozenset[str] = frozenset()
    gathered: frozenset[str] = frozenset()
    lengths: Mapping[str, frozenset[int]] = field(default_factory=dict)
    defers: bool = False

    @cached_property
    def factors(self) -> tuple[str, ...]:
        """What a search may assign axes to."""
        return (*self.sizes, DEFERRED) if self.defers else tuple(self.sizes)

    def divides(self, factor: str, count: int) -> bool:
        """Whether a factor can be cut into `count` equal slices."""
        return factor == DEFERRED or self.sizes[factor] % count == 0

    def fits(self, factor: str, count: int) -> bool:
        """Whether a factor can be cut into `count` slices: equal ones, or padded ones of which none is empty."""
        if self.divides(factor, count):
            return True
        return factor in self.padded and all(-(-n // count) * (count - 1) < n for n in self.lengths_of(factor))

    def lengths_of(self, factor: str) -> frozenset[int]:
        """The sizes of its dims where it may be padded, else the number that a slice count must divide."""
        return self.lengths.get(factor) or frozenset((self.sizes[factor],))

    def size_of(self, factor: str) -> str:
        """The sizes of its dims, for a message."""
        return " and ".join(map(str, sorted(self.lengths_of(factor), reverse=True)))

    def legal(self, assignment: Assignment, mesh: Mesh) -> bool:
        """Whether every factor can be cut as `assignment` says."""
        return all(
            factor in self.factors and self.fits(factor, mesh.product(axes)) for factor, axes in assignment.items()
        )

    def used(self, assignment: Assignment) -> frozenset[str]:
        return self._layouts(assignment).used

    def operand_layouts(self, assignment: Assignment) -> tuple[Layout, ...]:
        return self._layouts(assignment).operands

    def gradient_layouts(self, assignment: Assignment) -> tuple[Layout, ...]:
        """How the gradient that the local program returns for each operand is laid out."""
        return self._layouts(assignment).gradients

    def result_layouts(self, assignment: Assignment) -> tuple[Layout, ...]:
        return self._layouts(assignment).results

    def _layouts(self, assignment: Assignment) -> _Layouts:
        return _layouts(self.operands, self.results, self.sums, tuple(assignment.items()))


@dataclass(frozen=True)
class _Layouts:
    """The layouts of everything of one operator, and all axes that slice some factor."""

    used: frozenset[str]
    operands: tuple[Layout, ...]
    gradients: tuple[Layout, ...]
    results: tuple[Layout, ...]


@lru_cache(maxsize=2**16)
def _layouts(
    operands: tuple[Dims, ...],
    results: tuple[Dims, ...],
    sums: frozenset[str],
    assignment: tuple[tuple[str, tuple[str, ...]], ...],
) -> _Layouts:
    """Computed once for all equal layers."""
    axes, named = dict(assignment), {factor for dims in (*operands, *results) for factor in dims}
    used = frozenset(axis for factor, some in assignment if factor in named for axis in some)
    partial = frozenset(axis for factor in sums for axis in axes.get(factor, ()))
    deferred = frozenset(axes.get(DEFERRED, ()))
    taken = tuple(_layout(dims, axes) for dims in operands)
    gradients = tuple(Layout(layout.dims, (used | deferred) - layout.axes) for layout in taken)
    made = [_layout(dims, axes, partial) for dims in results]
    return _Layouts(used, taken, gradients, tuple([replace(one, deferred=deferred) for one in made]))


def forget() -> None:
    """The layouts that are remembered."""
    _layouts.cache_clear()


def _layout(dims: Dims, assignment: Assignment, partial: frozenset[str] = frozenset()) -> Layout:
    return Layout(tuple(assignment.get(factor, ()) if factor is not None else () for factor in dims), partial)


def numbered(rank: int, without: Collection[int] = ()) -> Dims:
    """The factors d0, d1, ... of a tensor's dims, None for dims in `without`, which stay replicated."""
    return tuple(None if dim in without else f"d{dim}" for dim in range(rank))


def unsliced(specs: Iterable[TensorSpec]) -> list[Dims]:
    """The dims of replicated tensors."""
    return [(None,) * len(spec.shape) for spec in specs]


def broadcast_dims(specs: Sequence[TensorSpec], shape: Sequence[int]) -> list[Dims]:
    """Per operand: the result's dim that each of its dims is, None where it is broadcast."""
    skips = [len(shape) - len(spec.shape) for spec in specs]
    return [
        tuple(f"d{skip + i}" if size == shape[skip + i] else None for i, size in enumerate(spec.shape))
        for skip, spec in zip(skips, specs, strict=True)
    ]


def sharding(
    operator: Operator,
    specs: Sequence[TensorSpec],
    operands: Sequence[Dims],
    results: Sequence[Dims],
    *,
    sums: Iterable[str | None] = (),
    local: LocalProgram | None = None,
    flops: float | None = None,
    sizes: Mapping[str, int] | None = None,
    padded: Iterable[str | None] = (),
    gathered: Iterable[str] = (),
) -> Sharding:
    """A `Sharding` whose factor sizes are read from the shapes.

    Args:
        operator: the call.
        specs: shapes of its tensor operands.
        operands: factors of their dims.
        results: factors of the results' dims.
        sums: factors over which results are partial sums; None does not count, here and in `padded`.
        local: the local program; None: the operator itself.
        flops: of one forward; None: as many as the largest tensor has elements.
        sizes: sizes of factors whose dims are cut coarser.
        padded: factors that may be cut into slices that do not divide.
        gathered: factors along which the local program gathers operands.
    """
    known: dict[str, int] = {}
    every: dict[str, set[int]] = {}
    tensors = (*specs, *operator.results)
    for dims, spec in zip((*operands, *results), tensors, strict=True):
        for factor, size in zip(dims, spec.shape, strict=True):
            if factor is not None:
                known.setdefault(factor, size)
                every.setdefault(factor, set()).add(size)
    known |= {factor: size for factor, size in (sizes or {}).items() if factor in known}
    work = float(max((spec.elements for spec in tensors), default=0)) if flops is None else flops
    summed, cut = frozenset(filter(None, sums)), frozenset(factor for factor in padded if factor in known)
    lengths = {factor: frozenset(every[factor]) for factor in cut if len(every[factor]) > 1}
    named = frozenset(gathered)
    return Sharding(tuple(operands), tuple(results), known, summed, local, work, True, cut, named, lengths)


def replicated(operator: Operator, specs: Sequence[TensorSpec], local: LocalProgram | None = None) -> Sharding:
    """No factors: the operator (or its local program) runs on replicated tensors, on every rank."""
    return replace(sharding(operator, specs, unsliced(specs), unsliced(operator.results), local=local), known=False)
