"""The one mesh of a plan: the common refinement of every device matrix in it, in prime steps while planning, merged at
the end.

Names are local to where they are given: layouts, counts and `parallel.mesh` live together, and each name stands for a
run of the plan's axes. Counts say how many slices, not which ranks; explicit layouts fix ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import TypeVar

from strategies.core.errors import StrategyError
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh, accumulate, common_refinement, primes
from strategies.core.plan import OperatorPlan, Plan
from strategies.core.request import NamedMatrix

Axes = tuple[str, ...]
T = TypeVar("T")
UNNAMED = "#"
"""Between the letters and the number of an axis that nobody named (`d#0`), so that no user's name can be taken for
one."""


@dataclass(frozen=True)
class Meshing:
    """`mesh` has prime axes; `named[layout][axis]` is the run of axes that a name stands for (the mesh that the user
    named is `parallel.mesh`); `fixed` are the axes of that mesh, each as its run (empty while the mesh is open)."""

    mesh: Mesh
    named: Mapping[str, Mapping[str, Axes]]
    fixed: tuple[Axes, ...]

    def place(self, counts: Sequence[int], taken: Iterable[str] = (), where: str = "") -> tuple[Axes, ...]:
        """Axes for each count, not using `taken`.

        Mesh open: the row-major device matrix of the counts, if the mesh has its boundaries. Otherwise, and for a named
        mesh: the first contiguous run of unused (named) axes with that product, else the first axis that can be split,
        else any axes. Raises StrategyError if the mesh cannot give the counts.
        """
        used = set(taken)
        if not self.fixed and not used and (row_major := self._row_major(counts)) is not None:
            return row_major
        placed = []
        for count in counts:
            axes = self.run(count, used)
            if axes is None:
                sizes = " x ".join(str(size) for _, size in self.mesh.axes)
                raise StrategyError(
                    "MW403",
                    f"{where}: the mesh of {self.mesh.size} devices ({sizes}) has no unused axes that make {count} "
                    "slices.",
                )
            used |= set(axes)
            placed.append(axes)
        return tuple(placed)

    def boundaries(self) -> tuple[Axes, ...]:
        """The runs of axes that a user named."""
        return tuple(run for runs in self.named.values() for run in runs.values())

    def _row_major(self, counts: Sequence[int]) -> tuple[Axes, ...] | None:
        names, placed, start = self.mesh.names, [], 0
        for count in counts:
            end = start
            while self.mesh.product(names[start:end]) < count and end < len(names):
                end += 1
            if self.mesh.product(names[start:end]) != count:
                return None
            placed.append(names[start:end])
            start = end
        return tuple(placed)

    def run(self, count: int, used: Iterable[str]) -> Axes | None:
        """Axes that make `count` slices together, none of them `used`; None if there are none."""
        used = set(used)
        if count == 1:
            return ()
        runs = self.fixed or tuple((name,) for name in self.mesh.names)
        free = [name for name in self.mesh.names if name not in used]
        candidates: Iterable[Axes] = chain(
            (tuple(chain(*neighbours)) for neighbours in _contiguous(runs)),
            (part for run in self.fixed for part in _contiguous(run)),
            (axes for size in range(1, len(free) + 1) for axes in combinations(free, size)),
        )
        return next((axes for axes in candidates if self.mesh.product(axes) == count and used.isdisjoint(axes)), None)


def _contiguous(values: tuple[T, ...]) -> Iterator[tuple[T, ...]]:
    """Every run of neighbours among `values`, by its start, short ones first."""
    return (values[start:end] for start, end in combinations(range(len(values) + 1), 2))


def meshing(
    world_size: int,
    mesh: Sequence[tuple[str, int]] | None,
    layouts: Mapping[str, NamedMatrix],
    counts: Iterable[Sequence[int]],
    spare: str = "d",
) -> Meshing:
    """The mesh for the given named mesh, layouts and count matrices (each in row-major order, without the devices left
    over).

    Raises StrategyError where a device matrix does not multiply to `world_size` or does not name each of its axes once,
    and where two explicit ones have no common refinement.
    """
    explicit: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {}
    if mesh is not None:
        explicit["parallel.mesh"] = tuple(size for _, size in mesh), tuple(name for name, _ in mesh)
    explicit |= {f"parallel.layouts.{name}": (matrix.device_matrix, matrix.axes) for name, matrix in layouts.items()}
    for name, (matrix, axes) in explicit.items():
        if len(axes) != len(matrix) or len(set(axes)) != len(axes):
            raise StrategyError(
                "MW407",
                f"{name} must name each of the {len(matrix)} axes of {tuple(matrix)} once; it gives "
                f"{', '.join(axes) or 'no names'}.",
            )
        if min(matrix, default=1) < 1:
            raise StrategyError(
                "MW407", f"{name} {tuple(matrix)} has an axis of size {min(matrix)}; a size is at least 1."
            )
        if math.prod(matrix) != world_size:
            raise StrategyError(
                "MW407", f"{name} {tuple(matrix)} has {math.prod(matrix)} devices, but world_size is {world_size}."
            )
    refined: tuple[int, ...] = (world_size,)
    for name, (matrix, _) in explicit.items():
        finer = common_refinement(refined, matrix)
        if finer is None:
            other = next(o for o, (m, _) in explicit.items() if o != name and common_refinement(m, matrix) is None)
            raise StrategyError(
                "MW403",
                f"{other} {tuple(explicit[other][0])} and {name} {tuple(matrix)} have no common refinement: cut one "
                "axis so that the products "
                "from the left divide one another.",
            )
        refined = finer
    if mesh is None:
        for matrix_of_counts in counts:
            spread = (*matrix_of_counts, world_size // math.prod(matrix_of_counts))
            refined = common_refinement(refined, spread) or refined
    fine = tuple(prime for size in refined for prime in primes(size)) or (1,)
    first = next(iter(explicit.values()), None)
    names = _names(fine, *first) if first else tuple(f"{spare}{UNNAMED}{i}" for i in range(len(fine)))
    runs = {
        name: {axis: _run(fine, names, matrix, i) for i, axis in enumerate(axes)}
        for name, (matrix, axes) in explicit.items()
    }
    fixed = tuple(runs["parallel.mesh"].values()) if mesh is not None else ()
    named = {name.removeprefix("parallel.layouts."): spans for name, spans in runs.items()}
    return Meshing(Mesh(tuple(zip(names, fine, strict=True))), named, fixed)


def _run(fine: Sequence[int], names: Sequence[str], matrix: Sequence[int], index: int) -> Axes:
    """The fine axes that axis `index` of `matrix` consists of."""
    ends = accumulate(matrix)
    stop, start = ends[index], ends[index] // matrix[index]
    return tuple(
        name for name, end, size in zip(names, accumulate(fine), fine, strict=True) if start < end <= stop and size > 1
    )


def _names(fine: Sequence[int], matrix: Sequence[int], axes: Sequence[str]) -> tuple[str, ...]:
    """`tp` where the fine axis is the complete axis, `tp.0`, `tp.1`, ... where it is a part."""
    plain = [str(i) for i in range(len(fine))]
    axis_of = dict.fromkeys(plain, "")
    for index, axis in enumerate(axes):
        run = _run(fine, plain, matrix, index)
        axis_of |= {place: axis if len(run) == 1 else f"{axis}.{i}" for i, place in enumerate(run)}
    return tuple(axis_of[place] or f"d{UNNAMED}{place}" for place in plain)  # a mesh of one rank


def merged(plan: Plan, explicit: Iterable[Axes] = ()) -> Plan:
    """The same plan on the coarsest mesh: neighbouring axes that always occur side by side become one axis, except
    across the ends of `explicit` runs, the axes that a user named."""
    ends = {run[-1] for run in explicit if run}
    sequences = {tuple(axes) for operator in plan.operators.values() for axes in operator.assignment.values()}
    layouts = [
        *plan.inputs.values(),
        *plan.tensors.values(),
        *(o for p in plan.operators.values() for o in p.outputs or ()),
    ]
    sequences |= {dim for layout in layouts for dim in layout.dims}
    sequences |= {tuple(name for name in plan.mesh.names if name in layout.partial) for layout in layouts}
    groups = grouped(plan.mesh.names, sequences, ends)
    return _renamed(plan, groups, _merged_names(groups))


def grouped(names: Iterable[str], sequences: Iterable[Axes], ends: Container[str] = ()) -> list[Axes]:
    """Runs of neighbouring axes that always occur side by side.

    Args:
        names: The axes, outermost first.
        sequences: Axes in the order in which they occur.
        ends: Axes behind which a run ends.
    """
    groups: list[Axes] = []
    for name in names:
        last = groups[-1][-1] if groups else name
        if groups and last not in ends and all(_together(sequence, last, name) for sequence in sequences):
            groups[-1] += (name,)
        else:
            groups.append((name,))
    return groups


def _together(sequence: Axes, first: str, second: str) -> bool:
    if first not in sequence and second not in sequence:
        return True
    return first in sequence and sequence[sequence.index(first) + 1 :][:1] == (second,)


def _merged_names(groups: Sequence[Sequence[str]]) -> list[str]:
    """All the parts of `tp` together are `tp` again, else the groups are `tp.0`, `tp.1`, ...; unnamed axes are
    numbered anew."""
    plain = [re.split(rf"[.{UNNAMED}]", group[0])[0] for group in groups]
    if UNNAMED in groups[0][0]:
        return plain if plain == ["dp"] else [f"{name}{i}" for i, name in enumerate(plain)]
    return [name if plain.count(name) == 1 else f"{name}.{plain[:i].count(name)}" for i, name in enumerate(plain)]


def _renamed(plan: Plan, groups: Sequence[Sequence[str]], names: Sequence[str]) -> Plan:
    """The plan with the axes of each group as one of `names`; the group's first axis stands for all of it."""
    heads = {group[0]: name for group, name in zip(groups, names, strict=True)}

    def axes(old: Iterable[str]) -> Axes:
        return tuple(heads[axis] for axis in old if axis in heads)

    def layout(old: Layout) -> Layout:
        return Layout(tuple(axes(dim) for dim in old.dims), frozenset(axes(old.partial)))

    def operator(old: OperatorPlan) -> OperatorPlan:
        outputs = None if old.outputs is None else tuple(map(layout, old.outputs))
        return replace(old, assignment={factor: axes(run) for factor, run in old.assignment.items()}, outputs=outputs)

    mesh = Mesh(tuple((name, plan.mesh.product(group)) for name, group in zip(names, groups, strict=True)))
    return replace(
        plan,
        mesh=mesh,
        operators={name: operator(old) for name, old in plan.operators.items()},
        inputs={name: layout(old) for name, old in plan.inputs.items()},
        tensors={name: layout(old) for name, old in plan.tensors.items()},
    )
