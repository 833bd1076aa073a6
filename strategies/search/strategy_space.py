"""The strategy space: the candidate strategies of every operator, with their layouts, seconds and bytes.

A candidate says which factor every mesh axis slices. Operators with the same rule, shapes and gradients share one
entry, so repeated layers are evaluated once. A parameter with several uses has candidates, too: it is stored in one
layout, each use reshards it and returns its own gradient.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import numpy as np

from strategies.core.graph import Operator, Ref, Source, TensorSpec
from strategies.core.layout import Layout
from strategies.cost.collectives import resharding_seconds
from strategies.cost.node_cost import NodeCost
from strategies.cost.problem import Problem
from strategies.cost.resharding_matrix import (
    PARTIAL,
    REPLICATED,
    UNREDUCED,
    Integers,
    LayoutTable,
    ReshardingCosts,
    Seconds,
)
from strategies.cost.roofline import operator_work, roofline
from strategies.lowering.lowering import left_axes
from strategies.memory.estimate import parameter_bytes
from strategies.rules.sharding import DEFERRED, Assignment, Dims, Sharding
from strategies.search.elimination import FactorTable

MOST_COMBINATIONS = 256
"""Of uses of a parameter and axes of its gradient, up to which each is a candidate."""


@dataclass(frozen=True, eq=False)
class Layouts:
    """Layouts of an operand or a result: each once, and which of them every candidate has."""

    table: LayoutTable
    of_candidate: Integers


@dataclass(frozen=True, eq=False)
class Candidates:
    """The candidate strategies of one operator.

    Attributes:
        assignments: what each slices.
        seconds: of the operator by itself.
        bytes: that a rank keeps of its results, and of parameters that it alone uses.
        wanted: per operand, the layouts in which it comes in.
        returned: per operand, the layouts in which its gradient goes out.
        given: the layouts of the results.
    """

    assignments: Sequence[Assignment]
    seconds: Seconds
    bytes: Seconds
    wanted: tuple[Layouts, ...]
    returned: tuple[Layouts, ...]
    given: tuple[Layouts, ...]

    def __len__(self) -> int:
        return len(self.assignments)


class _SlicedAssignments(Sequence[Assignment]):
    """Assignments from the factor that every one of `axes` slices (`sliced` [candidates, axes]), made when needed."""

    def __init__(self, axes: Sequence[str], factors: Sequence[str], sliced: Integers) -> None:
        self.axes, self.factors, self.sliced = axes, factors, sliced
        self.made: dict[int, Assignment] = {}

    def __len__(self) -> int:
        return len(self.sliced)

    def __getitem__(self, candidate: Any) -> Any:
        if candidate not in self.made:
            row = self.sliced[candidate].tolist()
            self.made[candidate] = {
                factor: tuple([axis for axis, place in zip(self.axes, row, strict=True) if place == number])
                for number, factor in enumerate(self.factors)
                if number in row
            }
        return self.made[candidate]


class StrategySpace:
    """The candidates of all operators of a problem."""

    def __init__(self, problem: Problem, resharding: ReshardingCosts) -> None:
        self.problem, self.resharding = problem, resharding
        self.axes = resharding.axes
        self.sizes = [problem.mesh.sizes[axis] for axis in self.axes]
        self.cluster = resharding.cluster if problem.relaxation is None else problem.relaxation.cluster
        self.node_cost = NodeCost(problem, resharding.cluster)
        users, parameters = problem.graph.users, problem.graph.of_kind("parameter")
        self.single_use = frozenset(ref for one in parameters if len(users[ref := Ref(one.id)]) == 1)
        """Parameters with one use: they have the layout that it wants."""
        self.multiplier = 0.0
        """Seconds that a byte of memory costs at the moment."""
        self._known: dict[Hashable, Candidates] = {}
        self._layouts: dict[tuple[int, bytes], Layouts] = {}

    def of(self, operator: Operator) -> Candidates:
        """The candidates of one operator."""
        key = self.problem.kinds[operator.id], tuple(self.problem.saved[operator.id])
        if key not in self._known:
            fixed = self.problem.fixed.get(operator.id)
            self._known[key] = self._free(operator) if fixed is None else self._fixed(operator, fixed)
        return self._known[key]

    def _counted(self, operator: Operator) -> tuple[float, float]:
        """Shares of forward and backward that cost time."""
        relaxation = self.problem.relaxation
        forward = float(relaxation is None or operator.id not in relaxation.free)
        backward = (1.0 if relaxation is None else relaxation.backward) * (operator.id in self.problem.graph.returning)
        return forward, forward * backward

    def _fixed(self, operator: Operator, fixed: Assignment) -> Candidates:
        """The one candidate of a configured operator."""
        sharding = self.problem.shardings[operator.id]
        one = np.zeros(1, dtype=np.int64)
        wanted, returned, given = (
            tuple(Layouts(self.resharding.table_of([layout]), one) for layout in layouts)
            for layouts in (
                sharding.operand_layouts(fixed),
                sharding.gradient_layouts(fixed),
                self.problem.outputs.get(operator.id) or sharding.result_layouts(fixed),
            )
        )
        work = operator_work(sharding, fixed, operator, self.problem.graph, self.problem.mesh, self.cluster)
        forward, backward = self._counted(operator)
        seconds = np.array([forward * work.forward + backward * work.backward])
        seconds = self._seconds(operator, seconds, (fixed,), returned)
        return Candidates((fixed,), seconds, self._bytes(operator, wanted, given), wanted, returned, given)

    def _free(self, operator: Operator) -> Candidates:
        """Every legal candidate."""
        sharding = self.problem.shardings[operator.id]
        sliced = self._sliced(operator, sharding)
        gathered = np.zeros(len(sliced), dtype=bool)
        if (styled := self.problem.styled) is not None:
            kept, hands = styled.gathered(operator, sliced, self.axes)
            gathered = np.repeat([False, True], [kept.sum(), hands.sum()])
            sliced = np.concatenate([sliced[kept], sliced[hands]])
        wanted, returned, natural, given = [], [], list[Layouts](), []
        for dims in sharding.operands:
            of_axis = self._dims_of_axes(sharding, dims, sliced)
            wanted.append(self._side(of_axis, len(dims)))
            partial = (sliced >= 0) & (of_axis == REPLICATED)
            returned.append(self._side(np.where(partial, PARTIAL, of_axis), len(dims)))
        summed = np.array([factor in sharding.sums for factor in sharding.factors] + [False])[sliced]
        deferred = np.array([factor == DEFERRED for factor in sharding.factors] + [False])[sliced]
        for dims in sharding.results:
            of_axis = self._dims_of_axes(sharding, dims, sliced)
            of_axis = np.where(summed & (of_axis == REPLICATED), PARTIAL, of_axis)
            of_axis = np.where(deferred, UNREDUCED, of_axis)
            natural.append(self._side(of_axis, len(dims)))
            if styled is not None and gathered.any():
                own = np.array([axis in styled.axes for axis in self.axes])
                of_axis = np.where(gathered[:, None] & own, REPLICATED, of_axis)
            given.append(self._side(of_axis, len(dims)))
        shares = self._shares(sharding, sliced)
        ahead, behind, _ = roofline(sharding, shares, operator, self.problem.graph, self.cluster, np.maximum)
        forward, backward = self._counted(operator)
        assignments = _SlicedAssignments(self.axes, tuple(sharding.factors), sliced)
        work = np.zeros(len(sliced)) + forward * ahead + backward * behind
        seconds = self._seconds(operator, work, assignments, returned)
        if gathered.any() and self.problem.resharding_counts(Ref(operator.id)):
            seconds = seconds + np.where(gathered, self._gathering(operator, natural[0], given[0]), 0.0)
        size = self._bytes(operator, wanted, given)
        return Candidates(assignments, seconds, size, tuple(wanted), tuple(returned), tuple(given))

    def _gathering(self, operator: Operator, natural: Layouts, given: Layouts) -> Seconds:
        """Seconds in which every candidate hands on its result in another layout, and slices its gradient."""
        spec, mesh, cluster = operator.results[0], self.problem.mesh, self.resharding.cluster
        trained = operator.id in self.problem.graph.returning
        have, then = self.every(natural.table), self.every(given.table)
        seconds = np.zeros(len(natural.of_candidate))
        for candidate, pair in enumerate(zip(natural.of_candidate, given.of_candidate, strict=True)):
            before, after = have[pair[0]], then[pair[1]]
            seconds[candidate] = resharding_seconds(before, after, spec.shape, spec.item_bytes, mesh, cluster)
            if trained:
                seconds[candidate] += resharding_seconds(after, before, spec.shape, spec.item_bytes, mesh, cluster)
        return seconds

    def _sliced(self, operator: Operator, sharding: Sharding) -> Integers:
        """[candidates, axes]: the factor that every axis slices, by number, or REPLICATED; only equal shards."""
        if not self.axes:  # one device
            return np.zeros((1, 0), dtype=np.int64)
        options = np.array([REPLICATED, *range(len(sharding.factors))])
        grid = options[np.indices([len(options)] * len(self.axes)).reshape(len(self.axes), -1).T]
        legal = np.ones(len(grid), dtype=bool)
        for number, factor in enumerate(sharding.factors):
            count = np.where(grid == number, self.sizes, 1).prod(1)
            legal &= factor == DEFERRED or sharding.sizes[factor] % count == 0
        if self.problem.styled is not None:
            legal &= self.problem.styled.legal(operator, grid, self.axes)
        return np.asarray(grid[legal], dtype=np.int64)

    def _shares(self, sharding: Sharding, sliced: Integers) -> dict[str, Seconds]:
        """Per factor the share of it that a rank has, by candidate."""
        shares = {}
        for number, factor in enumerate(sharding.sizes):
            count, size = np.where(sliced == number, self.sizes, 1).prod(1), sharding.sizes[factor]
            shares[factor] = -(-size // count) / size if size else np.ones(len(sliced))
        return shares

    def _dims_of_axes(self, sharding: Sharding, dims: Dims, sliced: Integers) -> Integers:
        """[candidates, axes]: which dim every axis slices, or REPLICATED."""
        lookup = np.array([*(dims.index(f) if f in dims else REPLICATED for f in sharding.factors), REPLICATED])
        return np.asarray(lookup[sliced])

    def _side(self, of_axis: Integers, dims: int) -> Layouts:
        """The layouts of [candidates, axes]; equal ones are one object."""
        key = dims, of_axis.tobytes()
        if key not in self._layouts:
            base = of_axis.max(initial=0) + 4
            numbers = ((of_axis + 3) * base ** np.arange(of_axis.shape[1])).sum(1)
            _, first, inverse = np.unique(numbers, return_index=True, return_inverse=True)
            self._layouts[key] = Layouts(self.resharding.table(of_axis[first], dims), inverse)
        return self._layouts[key]

    def _seconds(
        self, operator: Operator, work: Seconds, assignments: Sequence[Assignment], returned: Sequence[Layouts]
    ) -> Seconds:
        """Seconds of an operator whatever its neighbours do: its `work`, what its local program sends, the update of
        parameters that it alone uses, and results that it hands on in another layout."""
        problem, graph, sharding, total = self.problem, self.problem.graph, self.problem.shardings[operator.id], work
        trained = operator.id in graph.returning
        if self.node_cost.communicates(operator, sharding):
            total = total + [self.node_cost.local_communication(operator, sharding, one) for one in assignments]
        for side, ref in zip(returned, operator.operands, strict=True):
            if trained and ref in self.single_use and ref in graph.trained:
                update = [self.node_cost.parameter_seconds(one, graph.specs[ref]) for one in self.every(side.table)]
                total = total + np.array(update)[side.of_candidate]
        after = problem.outputs.get(operator.id)
        if after is not None and problem.resharding_counts(Ref(operator.id)):
            natural = sharding.result_layouts(assignments[0])
            for index, (have, then, spec) in enumerate(zip(natural, after, operator.results, strict=True)):
                tensor = spec.shape, spec.item_bytes, problem.mesh, self.resharding.cluster
                total = total + resharding_seconds(have, then, *tensor)
                if trained and Ref(operator.id, index) in graph.trained:
                    total = total + resharding_seconds(then.reduced, have.reduced, *tensor)
        return total

    def _bytes(self, operator: Operator, wanted: Sequence[Layouts], given: Sequence[Layouts]) -> Seconds:
        """What a rank keeps: shares of what autograd saves, and the parameters that this operator alone uses."""
        graph, total = self.problem.graph, np.zeros(len(given[0].of_candidate) if given else 1)
        specs = (*operator.results, *(graph.specs[ref] for ref in operator.operands))
        for side, spec, share in zip((*given, *wanted), specs, self.problem.saved[operator.id], strict=True):
            if share:
                total = total + (share * spec.item_bytes * self.elements(side.table, spec))[side.of_candidate]
        for side, ref in zip(wanted, operator.operands, strict=True):
            if ref in self.single_use:
                per_element = np.array([parameter_bytes(self.problem, one, ref) for one in self.every(side.table)])
                total = total + (self.elements(side.table, graph.specs[ref]) * per_element)[side.of_candidate]
        return total

    def every(self, table: LayoutTable) -> list[Layout]:
        """The layouts of a table."""
        return [self.resharding.layout(table, index) for index in range(len(table))]

    def elements(self, table: LayoutTable, spec: TensorSpec) -> Seconds:
        """Elements of a rank's shard, per layout."""
        counts = self.resharding.counts[table.dims]
        return np.asarray(np.ceil(np.array(spec.shape, dtype=np.float64) / counts).prod(1))


Use = tuple[Operator, int, bool]
"""A user, the position of the operand, and whether a gradient comes back."""


class SharedParameter:
    """A parameter with several uses.

    A candidate is a layout and a set of replica axes over which the gradient is added once per step; every use must
    leave its gradient partial over such axes only (lowering derives the remaining reductions in the same way). For axes
    without which it would cost more, as those within nodes may, it also says which use leaves each. Where that makes
    too many candidates, a candidate is a lower bound: the update of a solution is over the axes that its uses leave.

    Attributes:
        layouts: per candidate.
        seconds: of the update, per candidate.
        bytes: per candidate.
        own: the factor table over the parameter.
        uses: per use, the factor table [candidates, candidates of the user]; none where resharding has no cost.
    """

    def __init__(
        self, space: StrategySpace, source: Source, uses: Sequence[Use], candidates: Mapping[str, Candidates]
    ) -> None:
        resharding, spec, mesh = space.resharding, source.spec, space.problem.mesh
        trained = any(gradient for _, _, gradient in uses)
        wanted = [(candidates[user.id].wanted[place].table, user.id in space.problem.fixed) for user, place, _ in uses]
        tables = [one for one, fixed in wanted if fixed] or [one for one, _ in wanted]
        layouts = dict.fromkeys(resharding.layout(one, i) for one in tables for i in range(len(one)))
        update, ref = space.node_cost.parameter_seconds, Ref(source.id)
        seconds = {
            (layout, frozenset(added)): update(Layout(layout.dims, frozenset(added)), spec) if trained else 0.0
            for layout in layouts
            for replicas in [layout.replica_axes(mesh) if trained else ()]
            for size in range(len(replicas) + 1)
            for added in combinations(replicas, size)
        }
        gradients = [number for number, use in enumerate(uses) if use[2] and space.problem.resharding_counts(ref)]
        every = [(*name, leaving) for name in seconds for leaving in _leaving(seconds, *name, gradients)]
        self.update, self.layouts = seconds, [layout for layout, _, _ in every]
        self.seconds: Seconds = np.array([seconds[layout, added] for layout, added, _ in every])
        per_element = np.array([parameter_bytes(space.problem, layout, ref) for layout in self.layouts])
        self.bytes: Seconds = space.elements(resharding.table_of(self.layouts), spec) * per_element
        self.own = FactorTable(lambda: self.seconds + space.multiplier * self.bytes)
        share = max(sum(not gradient for _, _, gradient in uses), 1)
        self.uses = [
            _ParameterUse(space, spec, every, candidates[user.id], (user, place, gradient), share, number)
            for number, (user, place, gradient) in enumerate(uses)
            if space.problem.resharding_counts(ref)
        ]

    def evaluate(self, index: int, users: Sequence[int]) -> None:
        """Makes exact what a solution uses: the candidate of the parameter, and those of its users."""
        for use, user in zip(self.uses, users, strict=False):
            use.evaluate(index, user)

    def cost(self, index: int, users: Sequence[int]) -> float:
        """Seconds of a solution whose entries are exact: uses without a gradient pay once for what they share."""
        total, left, shared = 0.0, frozenset[str](), {}
        for use, user in zip(self.uses, users, strict=False):
            seconds = float(use.seconds[index, user])
            if use.returned is None:
                wanted = use.wanted.table
                shared[wanted.dims[use.wanted.of_candidate[user]].tobytes()] = seconds * use.share
            else:
                total += seconds
                left |= use.left[use.returned.of_candidate[user]][use.of_candidate[index]]
        update = self.update[self.layouts[index], left] if self.uses else float(self.seconds[index])
        return total + update + sum(shared.values())

    def refresh(self) -> None:
        for table in self.uses:
            table.refresh()


def _leaving(
    seconds: Mapping[tuple[Layout, frozenset[str]], float], layout: Layout, added: frozenset[str], uses: Sequence[int]
) -> list[dict[str, int]]:
    """Which of some uses leaves each of the axes that a gradient must be added over so that fewer do not cost more, in
    all combinations; of fewer axes where these are too many."""
    sets = [frozenset(some) for count in range(len(added) + 1) for some in combinations(sorted(added), count)]
    costs = {some: seconds[layout, some] for some in sets}
    needed = sorted(next(x for x in sets if all(costs[y] <= costs[added] for y in sets if x <= y))) if uses else []
    while len(uses) ** len(needed) > MOST_COMBINATIONS:
        needed.pop()
    return [dict(zip(needed, one, strict=True)) for one in product(uses, repeat=len(needed))]


class _ParameterUse(FactorTable):
    """One use of a parameter [candidates of the parameter, candidates of the user]. Those without a gradient share what
    they want in common: each pays a part."""

    def __init__(
        self,
        space: StrategySpace,
        spec: TensorSpec,
        every: Sequence[tuple[Layout, frozenset[str], Mapping[str, int]]],
        candidates: Candidates,
        use: Use,
        share: int,
        number: int,
    ) -> None:
        super().__init__(self._total)
        resharding, mesh, (user, place, gradient) = space.resharding, space.problem.mesh, use
        self.resharding, self.spec, self.share = resharding, spec, share
        self.wanted, self.returned = candidates.wanted[place], candidates.returned[place] if gradient else None
        layouts = list(dict.fromkeys(layout for layout, _, _ in every))
        places = {layout: place for place, layout in enumerate(layouts)}
        self.stored, self.of_candidate = resharding.table_of(layouts), [places[layout] for layout, _, _ in every]
        styled = space.problem.styled
        self.penalty = (
            0.0 if styled is None else styled.penalty(layouts, space.every(self.wanted.table), styled.use(user, place))
        )
        self.back: list[tuple[LayoutTable, LayoutTable]] = []
        self.left: list[list[frozenset[str]]] = []
        self.illegal: list[list[bool]] = []
        needed = [({one for one in leaving if leaving[one] == number}, have, added) for have, added, leaving in every]
        for column in range(len(self.returned.table) if self.returned is not None else 0):
            assert self.returned is not None
            layout = resharding.layout(self.returned.table, column)
            left = [left_axes(have, layout, spec.shape, mesh) for have in layouts]
            after = resharding.table_of([Layout(have.dims, one) for have, one in zip(layouts, left, strict=True)])
            self.back.append((resharding.table_of([layout]), after))
            self.left.append(left)
            self.illegal.append([not own <= left[places[have]] <= added for own, have, added in needed])

    def _total(self) -> Seconds:
        total = self.resharding.seconds(self.stored, self.wanted.table, self.spec) + self.penalty
        total = total[np.array(self.of_candidate)[:, None], self.wanted.of_candidate]
        if self.returned is None:
            return np.asarray(total / self.share)
        columns = []
        for (before, after), illegal in zip(self.back, self.illegal, strict=True):
            seconds = self.resharding.seconds(before, after, self.spec, at_once=0)[0, self.of_candidate]
            columns.append(np.where(illegal, np.inf, seconds))
        return np.asarray(total + np.stack(columns, 1)[:, self.returned.of_candidate])

    def evaluate(self, index: int, user: int) -> None:
        wanted = int(self.wanted.of_candidate[user])
        self.resharding.evaluate(self.stored, self.wanted.table, self.spec, self.of_candidate[index], wanted)
        if self.returned is not None:
            before, after = self.back[int(self.returned.of_candidate[user])]
            self.resharding.evaluate(before, after, self.spec, 0, self.of_candidate[index])
