"""What every operator may do: its legal assignments as numbers, the layouts that follow from each, and its own seconds.

Operators with the same rule, shapes and gradients share one entry, so repeated layers are priced once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from strategies.core.graph import Operator, Ref, TensorSpec
from strategies.core.layout import Layout
from strategies.cost.collectives import path_seconds
from strategies.cost.roofline import operator_work, roofline
from strategies.resharding.path import resharding_path
from strategies.rules.sharding import Assignment, Dims, Sharding
from strategies.search.kept import parameter_bytes
from strategies.search.own import Own
from strategies.search.problem import Problem
from strategies.search.transfers import PARTIAL, WHOLE, Integers, Rows, Seconds, Transfers


@dataclass(frozen=True, eq=False)
class Side:
    """Layouts of an operand or a result: each once, and which one every option has."""

    rows: Rows
    of_option: Integers


@dataclass(frozen=True, eq=False)
class Choices:
    """The options of one operator: `own` seconds, and `bytes` that a rank keeps of its results and of parameters that
    it alone uses. `wanted` and `returned` are, per operand, pairs of layouts: as the operand comes in, and as its
    gradient goes out; `given` are the results."""

    assignments: Assignments
    own: Seconds
    bytes: Seconds
    wanted: tuple[Side, ...]
    returned: tuple[Side, ...]
    given: tuple[Side, ...]

    def __len__(self) -> int:
        return len(self.assignments)


class Assignments(Protocol):
    """One per option."""

    def __len__(self) -> int: ...

    def __getitem__(self, option: int, /) -> Assignment: ...

    def __iter__(self) -> Iterator[Assignment]: ...


@dataclass(frozen=True, eq=False)
class Placed:
    """Assignments from the factor that every one of `axes` slices (`places` [options, axes]), made when they are asked
    for."""

    axes: tuple[str, ...]
    factors: tuple[str, ...]
    places: Integers
    made: dict[int, Assignment] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, option: int, /) -> Assignment:
        if option not in self.made:
            row = self.places[option].tolist()
            self.made[option] = {
                factor: tuple([axis for axis, place in zip(self.axes, row, strict=True) if place == number])
                for number, factor in enumerate(self.factors)
                if number in row
            }
        return self.made[option]

    def __iter__(self) -> Iterator[Assignment]:
        return map(self.__getitem__, range(len(self)))

    def taken(self, few: Integers) -> Placed:
        """Some of them."""
        return Placed(self.axes, self.factors, self.places[few])


class Menu:
    """The choices of all operators of a problem."""

    def __init__(self, problem: Problem, transfers: Transfers) -> None:
        self.problem, self.transfers = problem, transfers
        self.axes = transfers.axes
        self.sizes = [problem.mesh.sizes[axis] for axis in self.axes]
        self.known: dict[tuple[Any, ...], Choices] = {}
        self.sides: dict[tuple[int, bytes], Side] = {}
        self.cluster = transfers.cluster if problem.sure is None else problem.sure.cluster
        self.own = Own(problem, transfers.cluster)
        users = problem.graph.users
        self.lone = frozenset(ref for s in problem.graph.of_kind("parameter") if len(users[ref := Ref(s.id)]) == 1)
        """Parameters with one use: they lie as that use wants them."""
        self.pressure = 0.0
        """Seconds that a byte of memory costs at the moment (a Lagrange multiplier)."""

    def of(self, operator: Operator) -> Choices:
        key = self._signature(operator)
        if key not in self.known:
            self.known[key] = self._choices(operator)
        return self.known[key]

    def _signature(self, operator: Operator) -> tuple[Any, ...]:
        """All that choices depend on, with sources and values told by what they are."""
        fixed, sure = self.problem.fixed.get(operator.id), self.problem.sure
        return (
            self.problem.graph.looks[operator.id],
            self.stored.get(operator.id),
            None if fixed is None else tuple(fixed.items()),
            self.problem.outputs.get(operator.id),
            None if sure is None else (self.problem.counts(Ref(operator.id)), operator.id in sure.free),
        )

    @cached_property
    def stored(self) -> dict[str, frozenset[int]]:
        """Which results of operators stay for backward, by id."""
        found: dict[str, set[int]] = {}
        for ref in self.problem.stored:
            found.setdefault(ref.id, set()).add(ref.index)
        return {id: frozenset(indices) for id, indices in found.items()}

    def _choices(self, operator: Operator) -> Choices:
        sharding, fixed = self.problem.shardings[operator.id], self.problem.fixed.get(operator.id)
        graph, mesh, cluster = self.problem.graph, self.problem.mesh, self.cluster
        sure = self.problem.sure
        counted = (1.0 if sure is None else sure.backward) * (operator.id in graph.returning)
        whole = float(sure is None or operator.id not in sure.free)
        if fixed is not None:
            wanted = [[layout] for layout in sharding.operand_layouts(fixed)]
            returned = [[layout] for layout in sharding.gradient_layouts(fixed)]
            given = [[layout] for layout in self.problem.outputs.get(operator.id) or sharding.result_layouts(fixed)]
            one = np.zeros(1, dtype=np.int64)
            sides = [tuple(Side(self.transfers.rows_of(x), one) for x in group) for group in (wanted, returned, given)]
            one_way = operator_work(sharding, fixed, operator, graph, mesh, cluster)
            work = np.array([whole * (one_way.forward + counted * one_way.backward)])
            own = self._own(operator, sharding, work, (fixed,), sides[1])
            return Choices((fixed,), own, self._bytes(operator, sides[0], sides[2]), sides[0], sides[1], sides[2])
        places = self._places(sharding)
        assignments = Placed(self.axes, tuple(sharding.factors), places)
        back: list[Side] = []
        forward: list[Side] = []
        for dims in sharding.operands:
            lying = self._lying(sharding, dims, places)
            forward.append(self._side(lying, len(dims)))
            back.append(self._side(np.where((places >= 0) & (lying == WHOLE), PARTIAL, lying), len(dims)))
        results = []
        summed = np.array([factor in sharding.sums for factor in sharding.factors] + [False])[places]
        for dims in sharding.results:
            lying = self._lying(sharding, dims, places)
            results.append(self._side(np.where(summed & (lying == WHOLE), PARTIAL, lying), len(dims)))
        share = self._shares(sharding, places)
        ahead, behind, _ = roofline(sharding, share, operator, graph, cluster, np.maximum)
        work = whole * (ahead + counted * behind)
        own = self._own(operator, sharding, np.zeros(len(places)) + work, assignments, back)
        return Choices(
            assignments, own, self._bytes(operator, forward, results), tuple(forward), tuple(back), tuple(results)
        )

    def _places(self, sharding: Sharding) -> Integers:
        """[options, axes]: the factor that every axis slices, by number, or WHOLE; only equal slices."""
        if not self.axes:  # one device: nothing is sliced
            return np.zeros((1, 0), dtype=np.int64)
        options = [WHOLE, *range(len(sharding.factors))]
        counted = np.indices([len(options)] * len(self.axes)).reshape(len(self.axes), len(options) ** len(self.axes)).T
        grid = np.array(options)[counted]  # one device has no axes and one option
        legal = np.ones(len(grid), dtype=bool)
        for number, factor in enumerate(sharding.factors):
            count = np.where(grid == number, self.sizes, 1).prod(1)
            legal &= sharding.sizes[factor] % count == 0
        return np.asarray(grid[legal], dtype=np.int64)

    def _shares(self, sharding: Sharding, places: Integers) -> dict[str, Seconds]:
        """Per factor the share of it that a rank has, by option."""
        found = {}
        for number, factor in enumerate(sharding.factors):
            count, size = np.where(places == number, self.sizes, 1).prod(1), sharding.sizes[factor]
            found[factor] = -(-size // count) / size if size else np.ones(len(places))
        return found

    def _lying(self, sharding: Sharding, dims: Dims, places: Integers) -> Integers:
        lookup = np.array([*(dims.index(f) if f in dims else WHOLE for f in sharding.factors), WHOLE])
        return np.asarray(lookup[places])

    def _side(self, places: Integers, dims: int) -> Side:
        """From where the axes of every option lie; of operators that are told apart by others, the same one."""
        key = dims, places.tobytes()
        if key not in self.sides:
            base = places.max(initial=0) + 3
            names = ((places + 2) * base ** np.arange(places.shape[1])).sum(1)
            _, first, inverse = np.unique(names, return_index=True, return_inverse=True)
            self.sides[key] = Side(self.transfers.rows(places[first], dims), inverse)
        return self.sides[key]

    def _own(
        self,
        operator: Operator,
        sharding: Sharding,
        work: Seconds,
        assignments: Assignments,
        returned: Sequence[Side],
    ) -> Seconds:
        """Seconds that an option takes whatever its neighbours do: its `work` and more."""
        problem, graph, found = self.problem, self.problem.graph, work
        trained = operator.id in graph.returning
        if sharding.local is not None and self.own.talks(operator, sharding):
            found = found + self._inside(operator, sharding, assignments)
        for side, ref in zip(returned, operator.operands, strict=True):
            if trained and ref in self.lone and ref in graph.trained:
                found = found + self.parameters(side.rows, graph.specs[ref])[side.of_option]
        after = problem.outputs.get(operator.id)
        if after is not None and problem.counts(Ref(operator.id)):
            natural = sharding.result_layouts(assignments[0])
            for number, (have, then, spec) in enumerate(zip(natural, after, operator.results, strict=True)):
                found = found + self.path_seconds(have, then, spec)
                if trained and Ref(operator.id, number) in graph.trained:
                    found = found + self.path_seconds(then.whole, have.whole, spec)
        return found

    def _inside(self, operator: Operator, sharding: Sharding, assignments: Assignments) -> Seconds:
        """What the collectives of local programs take."""
        return np.array([self.own.inside(operator, sharding, one) for one in assignments])

    def _bytes(self, operator: Operator, wanted: Sequence[Side], given: Sequence[Side]) -> Seconds:
        """What a rank keeps: results that stay for backward, and the parameters that this operator alone uses."""
        graph, found = self.problem.graph, np.zeros(len(given[0].of_option) if given else 1)
        for index, (side, spec) in enumerate(zip(given, operator.results, strict=True)):
            if Ref(operator.id, index) in self.problem.stored:
                found = found + (self.elements(side.rows, spec) * spec.item_bytes)[side.of_option]
        for side, ref in zip(wanted, operator.operands, strict=True):
            if ref in self.lone:
                per_element = self.parameters_bytes(side.rows, ref)
                found = found + (self.elements(side.rows, graph.specs[ref]) * per_element)[side.of_option]
        return found

    def _layouts(self, rows: Rows) -> list[Layout]:
        return [self.transfers.layout(rows, index) for index in range(len(rows))]

    def elements(self, rows: Rows, spec: TensorSpec) -> Seconds:
        """Elements of a rank's slice, per layout."""
        counts = self.transfers.counts[rows.dims]
        return np.asarray(np.ceil(np.array(spec.shape, dtype=np.float64) / counts).prod(1))

    def parameter_bytes(self, layout: Layout, ref: Ref) -> float:
        """Bytes per element that a rank keeps of a parameter, its gradient and the optimizer's states."""
        return parameter_bytes(self.problem, layout, ref)

    def parameters_bytes(self, rows: Rows, ref: Ref) -> Seconds:
        """`parameter_bytes` of many layouts."""
        return np.array([self.parameter_bytes(layout, ref) for layout in self._layouts(rows)])

    def parameters(self, rows: Rows, spec: TensorSpec) -> Seconds:
        """`parameter_seconds` of many layouts."""
        return np.array([self.parameter_seconds(layout, spec) for layout in self._layouts(rows)])

    def parameter_seconds(self, layout: Layout, spec: TensorSpec) -> float:
        """Seconds of the update of a trained parameter whose gradient is partial as `layout` is."""
        return self.own.parameter_seconds(layout, spec)

    def path_seconds(self, before: Layout, after: Layout, spec: TensorSpec) -> float:
        """Seconds of one redistribution."""
        mesh = self.problem.mesh
        return path_seconds(
            resharding_path(before, after, spec.shape, mesh), spec.item_bytes, mesh, self.transfers.cluster
        )
