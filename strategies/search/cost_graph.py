"""The cost graph of a problem: a variable per operator, and factors for what its candidates cost and what resharding
values between them costs.

Per value and use there is a factor over the producer and the user. Entries are lower bounds at first: those that a
solution uses are evaluated exactly, and the graph is solved again. Uses of a value that want the same layout pay for it
once, as the engine does. The factors let each of the uses that may agree pay an equal part, which is a bound; where a
solution pays too little, the value's resharding is shared: it gets a variable for the target that uses share, or, in a
graph that is too wide to be eliminated, one factor over all of its uses.

Invariant: the sum of the factors is never above what the plan costs on the cluster, and equal where all entries are
exact and uses agree or share. Variables are in the order of the program, and equal tables are one object, so repeated
layers look the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from strategies.core.graph import Operator, Ref, Source, TensorSpec
from strategies.core.layout import Layout
from strategies.cost.problem import Problem
from strategies.cost.resharding_matrix import UNREACHABLE, LayoutTable, ReshardingCosts
from strategies.cost.styled_modules import FORBIDDEN
from strategies.rules.sharding import Assignment
from strategies.search.elimination import Factor, FactorGraph, FactorTable, Integers, Part, Seconds, constant, expanded
from strategies.search.strategy_space import Candidates, Layouts, SharedParameter, StrategySpace, Use

MOST_SHARING = 3
"""Uses of a value up to which a variable for one shared target is exact."""
MOST_JOINT = 4
"""Uses of a value up to which a factor over all of them is made."""
MOST_ENTRIES = 2**23
"""Of a factor of a value whose resharding is shared."""


@dataclass(eq=False)
class UseCost:
    """What one use of a value costs: `seconds` [layouts of the value, targets]. A target is the layout in which the
    value comes (`come`, a row of `wanted`) and the one in which its gradient goes back (`go`, a row of `returned`):
    partial over what the value's layout defers, at least. `of_candidate` is the target of every candidate of the user;
    `penalty` [layouts of the value, rows of `wanted`] is added where a value must not come so: uses with another one
    share no target."""

    resharding: ReshardingCosts
    spec: TensorSpec
    given: LayoutTable
    wanted: LayoutTable
    returned: LayoutTable | None
    come: Integers
    go: Integers
    of_candidate: Integers
    penalty: Seconds | None = None

    def __post_init__(self) -> None:
        self.back = self.resharding.gradients(self.given)
        there = [row.tobytes() for row in self.wanted.dims[self.come]]
        back = [b""] * len(there) if self.returned is None else [x.tobytes() for x in self.returned.partial[self.go]]
        apart = [b""] * len(there) if self.penalty is None else [x.tobytes() for x in self.penalty[:, self.come].T]
        self.targets = tuple(zip(there, back, apart, strict=True))
        self.changes = 0
        self._look_up()

    def refresh(self) -> bool:
        """Reads the matrices again if they were updated; whether they were."""
        changes = self.resharding.changes(self.given, self.wanted, self.spec)
        if self.returned is not None:
            changes += self.resharding.changes(self.returned, self.back, self.spec)
        if changes == self.changes:
            return False
        self.changes = changes
        self._look_up()
        return True

    def _look_up(self) -> None:
        self.seconds = self.resharding.seconds(self.given, self.wanted, self.spec)[:, self.come]
        if self.penalty is not None:
            self.seconds = self.seconds + self.penalty[:, self.come]
        if self.returned is not None:
            back = self.resharding.seconds(self.returned, self.back, self.spec)
            back[(self.back.partial & ~self.returned.partial[:, None]) != 0] = UNREACHABLE
            self.seconds = self.seconds + back[self.go].T

    def evaluate(self, row: int, target: int) -> None:
        """Makes one entry exact."""
        self.resharding.evaluate(self.given, self.wanted, self.spec, row, int(self.come[target]))
        if self.returned is not None:
            self.resharding.evaluate(self.returned, self.back, self.spec, int(self.go[target]), row)


@dataclass(frozen=True, eq=False)
class SharedResharding:
    """Factors of a value that has a variable for the target that its uses share.

    Attributes:
        first: cost of the shared target [candidates of the producer, targets]; target 0 is none.
        uses: remaining cost of each use [candidates of the producer, targets, candidates of the user].
    """

    first: FactorTable
    uses: tuple[FactorTable, ...]


def shared_resharding(given: Layouts, costs: Sequence[UseCost]) -> SharedResharding | None:
    """None where no two uses have a target in common."""
    count = Counter(target for cost in costs for target in cost.targets)
    shared = {one: next(cost for cost in costs if one in cost.targets) for one, uses in count.items() if uses > 1}
    if not shared:
        return None

    def first() -> Seconds:
        paid = [cost.seconds[:, cost.targets.index(one)] for one, cost in shared.items()]
        return np.asarray(np.stack([np.zeros(len(given.table)), *paid], 1)[given.of_candidate])

    def parts(cost: UseCost) -> tuple[Part, ...]:
        """A use pays for itself, or nothing where what it wants is shared."""
        wanted = [cost.targets.index(target) if target in cost.targets else -1 for target in shared]
        free = np.array([-2, *wanted])[:, None] == cost.of_candidate
        own = cost.seconds[np.ix_(given.of_candidate, cost.of_candidate)]
        return ((0, 2), own), ((1, 2), np.where(free, 0.0, np.inf))

    return SharedResharding(FactorTable(first), tuple(FactorTable(make_parts=partial(parts, cost)) for cost in costs))


class _LayoutGroups:
    """The layout index of every candidate of a variable, and the number of layouts."""

    def __init__(self, of_candidate: Integers, layouts: int) -> None:
        self.of_candidate, self.layouts = of_candidate, layouts
        self.order = np.argsort(of_candidate, kind="stable")
        self.names, self.starts = np.unique(of_candidate[self.order], return_index=True)

    def least(self, seconds: Seconds) -> Seconds:
        """The least over the candidates of every layout; infinite where there are none."""
        least = seconds[self.order]
        if len(self.names) < len(self.order):  # else every layout has one candidate
            least = np.minimum.reduceat(least, self.starts)
        if len(self.names) == self.layouts:
            return least
        every = np.full(self.layouts, np.inf)
        every[self.names] = least
        return every


class JointUses(FactorTable):
    """Seconds over the candidates of a producer and of all users of a value, where every layout that any of them wants
    is paid once.

    This is the minimum over all partitions of the uses into groups with one layout, where each group has the cost of
    its layout. Given the value's layout, groups are independent: the minimum over everything else costs as much as a
    table over the value and one use, not as one over all of them.

    Args:
        make_costs: makes the seconds of each target [layouts of the value, targets].
        given: the layout of every candidate of the producer; None where no operator produces the value.
        wanted: per use, the target of every candidate of the user.
    """

    def __init__(self, make_costs: Callable[[], Seconds], given: Integers | None, wanted: Sequence[Integers]) -> None:
        sizes = [len(one) for one in (given, *wanted) if one is not None]
        super().__init__(lambda: self.restricted([np.arange(size) for size in sizes]))
        self.make_costs, self.costs = make_costs, make_costs()
        self.given = None if given is None else _LayoutGroups(given, len(self.costs))
        self.wanted = [_LayoutGroups(one, self.costs.shape[1]) for one in wanted]

    @property
    def source(self) -> Seconds:
        return self.costs

    def refresh(self) -> None:
        super().refresh()
        self.costs = self.make_costs()

    def least(self, messages: Sequence[Seconds], kept: int | None = None) -> Seconds:
        first = 0 if self.given is None else 1
        own = None if kept is None or kept < first else kept - first
        gains = [
            one.least(-seconds)
            for use, (one, seconds) in enumerate(zip(self.wanted, messages[first:], strict=True))
            if use != own
        ]
        if own is None:
            paid = self._divided(gains)[0][-1] if len(gains) > 1 else (self.costs + gains[0]).min(1)
            if self.given is None:
                return np.asarray(paid.min())
            if kept == 0:
                return np.asarray(paid[self.given.of_candidate])
            return np.asarray((paid + self.given.least(-messages[0])).min())
        before = np.zeros(1) if self.given is None else self.given.least(-messages[0])
        if not gains:
            return np.asarray((self.costs + before[:, None]).min(0)[self.wanted[own].of_candidate])
        divided, together = self._divided(gains)
        rest = np.stack(divided[::-1]) + before  # the uses that are not in the group of this one
        paid = (self.costs + rest[:, :, None]).min(1) + together
        return np.asarray(paid.min(0)[self.wanted[own].of_candidate])

    def _divided(self, gains: Sequence[Seconds]) -> tuple[list[Seconds], Seconds]:
        """The least that every set of uses, numbered by its bits, pays, divided as is best: [layouts of the value]
        each; and [sets, targets], the sum of their gains."""
        together = np.zeros((1, self.costs.shape[1]))
        for gain in gains:
            together = np.concatenate((together, together + gain))
        grouped = (self.costs + together[1:, None]).min(2)
        divided = [np.zeros(len(self.costs))]
        for uses in range(1, len(together)):
            first = uses & -uses  # whose group is any of these, with any of the others
            best, group = grouped[uses - 1], uses
            while group := (group - 1) & uses:
                if group & first:
                    best = np.minimum(best, grouped[group - 1] + divided[uses ^ group])
            divided.append(best)
        return divided, together

    def restricted(self, candidates: Sequence[Integers]) -> Seconds:
        rows = self.costs if self.given is None else self.costs[self.given.of_candidate[candidates[0]]]
        users = candidates if self.given is None else candidates[1:]
        targets = [one.of_candidate[few] for one, few in zip(self.wanted, users, strict=True)]
        total = np.zeros((len(rows), *map(len, targets)))
        for use, one in enumerate(targets):
            pays = expanded(rows[:, one], (0, use + 1), total.ndim)
            for before in range(use):
                pays = pays * expanded(targets[before][:, None] != one, (before + 1, use + 1), total.ndim)
            total += pays
        return np.asarray(total[0] if self.given is None else total)


def joint_uses(given: Layouts, costs: Sequence[UseCost], share: int, produced: bool) -> JointUses:
    """What uses pay together, each one of `share` parts; `produced` by an operator, with candidates."""
    every = list(dict.fromkeys(target for cost in costs for target in cost.targets))
    places = {target: place for place, target in enumerate(every)}
    columns = [np.array([places[target] for target in cost.targets]) for cost in costs]

    def make_costs() -> Seconds:
        seconds = np.zeros((len(given.table), len(every)))
        for cost, column in zip(costs, columns, strict=True):
            seconds[:, column] = cost.seconds / share
        return seconds

    wanted = [column[cost.of_candidate] for cost, column in zip(costs, columns, strict=True)]
    return JointUses(make_costs, given.of_candidate if produced else None, wanted)


def _sharing(costs: Sequence[UseCost]) -> list[int]:
    """With how many uses of a value each may share what it pays, itself included: those with a target in common."""
    return [sum(not set(one.targets).isdisjoint(other.targets) for other in costs) for one in costs]


@dataclass(frozen=True)
class Value:
    """A value with its producer's variable (None: a source), how it is handed on, and its users' variables with what
    each pays."""

    ref: Ref
    producer: int | None
    given: Layouts
    uses: list[tuple[int, UseCost]]


Entry = tuple[UseCost, int, int]
"""A row and a target of a use's seconds."""


class CostGraph:
    """The cost graph of a problem, and what its solutions mean.

    Args:
        problem: the problem.
        space: its strategy space.
        shared: values whose resharding is shared.
        wide: whether the graph is too wide to be eliminated.
        like: another cost graph of the same problem and space, whose tables are reused.
    """

    def __init__(
        self,
        problem: Problem,
        space: StrategySpace,
        shared: frozenset[Ref] = frozenset(),
        *,
        wide: bool = False,
        like: CostGraph | None = None,
    ) -> None:
        self.problem, self.operators, self.space, self.shared, self.wide = problem, problem.graph, space, shared, wide
        self.resharding, self.factors = space.resharding, FactorGraph()
        self.known: dict[tuple[Any, ...], Any] = {}
        """Tables and what they are made of, by what they depend on."""
        self.exact: set[tuple[int, int, int]] = set()
        """Entries that were evaluated."""
        self.paying: dict[Ref, tuple[Layouts, list[UseCost], list[FactorTable]]] = {}
        if like is None:
            self.candidates = {one.id: space.of(one) for one in self.operators.operators}
        else:
            self.factors.memo, self.candidates = like.factors.memo, like.candidates
            self.known, self.exact, self.paying = like.known, like.exact, like.paying
        self.variables: dict[str, int] = {}
        """Of operators, by id."""
        self.parameters: dict[Ref, tuple[int, SharedParameter]] = {}
        """The variables of parameters with several uses."""
        self.sharing: dict[Ref, tuple[int, SharedResharding]] = {}
        self.values: list[Value] = []
        self.leaving: list[tuple[int, Seconds]] = []
        """Seconds to replicate what leaves the graph."""
        # tables of `like` may be older than the bounds that were raised while it was built
        self.raised: int = self.resharding.raised if like is None else like.raised
        self.learned = {source.id for source in self.operators.of_kind("parameter")}
        self._add_variables()
        self._add_factors()
        self.reader = _SolutionReader(self)

    def assignments(self, indices: Sequence[int]) -> dict[str, Assignment]:
        """The strategy of every operator in a solution."""
        return {id: self.candidates[id].assignments[indices[v]] for id, v in self.variables.items()}

    def tensors(self, indices: Sequence[int]) -> dict[Ref, Layout]:
        """The layouts of parameters with several uses in a solution."""
        return {ref: shared.layouts[indices[variable]] for ref, (variable, shared) in self.parameters.items()}

    def evaluate(self, indices: Sequence[int]) -> bool:
        """Makes exact what a solution uses; whether any bound was too low."""
        for (cost, row, target), _ in self.reader.entries(indices):
            key = id(cost), row, target
            if key not in self.exact:
                self.exact.add(key)
                cost.evaluate(row, target)
        for ref, (variable, shared) in self.parameters.items():
            shared.evaluate(indices[variable], self._of_users(ref, indices))
        return self.refresh()

    def refresh(self) -> bool:
        """Makes all tables again whose entries have changed; whether any bound was too low."""
        if self.resharding.raised == self.raised:
            return False
        self.raised = self.resharding.raised
        changed = {id(one) for one in self.known.values() if isinstance(one, UseCost) and one.refresh()}
        for key, one in self.known.items():
            if isinstance(one, SharedParameter):
                one.refresh()
            elif isinstance(one, SharedResharding) and not changed.isdisjoint(key):
                for table in (one.first, *one.uses):
                    table.refresh()
                    changed.add(id(table))
            elif isinstance(one, FactorTable) and not changed.isdisjoint(key):
                one.refresh()
                changed.add(id(one))
        return True

    def cost(self, indices: Sequence[int]) -> float:
        """Seconds of a solution whose entries are exact: every target of a value is paid once."""
        total = self.reader.owned(indices)[0]
        for variable, seconds in self.leaving:
            total += seconds[indices[variable]]
        entries = self.reader.entries(indices, once=True)
        total += sum(cost.seconds[row, target] * count for (cost, row, target), count in entries)
        for ref, (variable, shared) in self.parameters.items():
            total += shared.cost(indices[variable], self._of_users(ref, indices))
        return float(total)

    def bytes(self, indices: Sequence[int]) -> float:
        """What a rank keeps in a solution: parameters, gradients, optimizer states and results."""
        total = self.reader.owned(indices)[1]
        total += sum(shared.bytes[indices[variable]] for variable, shared in self.parameters.values())
        return float(total)

    def _of_users(self, ref: Ref, indices: Sequence[int]) -> list[int]:
        return [indices[self.variables[user.id]] for user, _ in self.operators.users[ref]]

    def underpaid(self, indices: Sequence[int]) -> frozenset[Ref]:
        """The values of which uses want different targets in a solution and pay too little for them, as far as their
        resharding can be shared."""
        values = set()
        for value in map(self.values.__getitem__, self.reader.disagreeing(indices)):
            row = 0 if value.producer is None else int(value.given.of_candidate[indices[value.producer]])
            pays = any(cost.seconds[row, cost.of_candidate[indices[user]]] for user, cost in value.uses)
            if pays and value.ref not in self.sharing and self._can_share(value):
                values.add(value.ref)
        return frozenset(values)

    def _can_share(self, value: Value) -> bool:
        """Whether sharing is exact and small enough."""
        if value.ref in self.shared:
            return False
        if self.wide:
            users = {user for user, _ in value.uses}
            return len(value.uses) == len(users) <= MOST_JOINT
        widest = max(len(cost.of_candidate) for _, cost in value.uses)
        targets = max(len(cost.targets) for _, cost in value.uses)
        return len(value.uses) <= MOST_SHARING and len(value.given.of_candidate) * targets * widest <= MOST_ENTRIES

    def set_multiplier(self, multiplier: float) -> None:
        """Set the Lagrange multiplier: the cost of a byte of memory in seconds."""
        self.space.multiplier = multiplier
        for key, one in self.known.items():
            if key[0] == "own":
                one.refresh()
        for _, shared in self.parameters.values():
            shared.own.refresh()

    def _once(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    def _add_variables(self) -> None:
        """Add the variables in the order of the program; those of values come before their first users."""
        first: dict[str, list[Ref]] = {}
        for ref, uses in self.operators.users.items():
            if len(uses) > 1 and (ref.id in self.learned or ref in self.shared):
                first.setdefault(uses[0][0].id, []).append(ref)
        for operator in self.operators.operators:
            for ref in first.get(operator.id, ()):
                if ref.id in self.learned:
                    self._add_parameter(ref)
                elif not self.wide:
                    self._add_sharing(ref)
            self.variables[operator.id] = self.factors.add(len(self.candidates[operator.id]))

    def _add_parameter(self, ref: Ref) -> None:
        source, uses = self.operators.by_id[ref.id], self._uses(ref)
        assert isinstance(source, Source)
        key = ("parameter", source.trainable, self.operators.specs[ref], *map(self._kind, uses))
        shared = self._once(key, lambda: SharedParameter(self.space, source, uses, self.candidates))
        self.parameters[ref] = self.factors.add(len(shared.layouts)), shared

    def _add_sharing(self, ref: Ref) -> None:
        given, costs, _ = self._pays(ref)
        shared = self._once(("shared", id(given), *map(id, costs)), lambda: shared_resharding(given, costs))
        if shared is not None:
            self.sharing[ref] = self.factors.add(shared.first.seconds.shape[1]), shared

    def _add_factors(self) -> None:
        for id_, variable in self.variables.items():
            one = self.candidates[id_]
            self.factors.factors.append(Factor((variable,), self._once(("own", id(one)), self._own(one))))
        for ref, uses in self.operators.users.items():
            if uses and ref in self.parameters:
                variable, shared = self.parameters[ref]
                self.factors.factors.append(Factor((variable,), shared.own))
                for (user, _), table in zip(uses, shared.uses, strict=False):
                    self.factors.factors.append(Factor((variable, self.variables[user.id]), table))
            elif uses and ref.id not in self.learned and self.problem.resharding_counts(ref):
                self._add_value(ref, [self.variables[user.id] for user, _ in uses])
        for ref in self.operators.outputs if self.problem.relaxation is None else ():  # one number, once per step
            self._add_leaving(ref, ref in self.operators.trained)
        for _, ref in self.operators.updates:
            if self.problem.resharding_counts(ref):
                self._add_leaving(ref, False)
        for pair in () if self.problem.styled is None else self.problem.styled.together:
            self._add_compatibility(pair)

    def _add_compatibility(self, pair: tuple[Operator, Operator, bool]) -> None:
        """Two operators that a trainer slices as one module."""
        styled, (first, second, both) = self.problem.styled, pair
        assert styled is not None
        one, other = self.candidates[first.id], self.candidates[second.id]

        def seconds() -> Seconds:
            every = [[styled.compatible(pair, (a, b)) for b in other.assignments] for a in one.assignments]
            return np.where(every, 0.0, FORBIDDEN)

        table = self._once(("together", id(one), id(other), both), lambda: FactorTable(seconds))
        self.factors.factors.append(Factor((self.variables[first.id], self.variables[second.id]), table))

    def _own(self, candidates: Candidates) -> Callable[[], FactorTable]:
        return lambda: FactorTable(lambda: candidates.seconds + self.space.multiplier * candidates.bytes)

    def _add_value(self, ref: Ref, users: Sequence[int]) -> None:
        producer, (given, costs, tables) = self.variables.get(ref.id), self.paying.get(ref) or self._pays(ref)
        value = Value(ref, producer, given, list(zip(users, costs, strict=True)))
        self.values.append(value)
        before = () if producer is None else (producer,)
        if self.wide and len(set(users)) == len(users):
            single = [([one], share) for one, share in zip(value.uses, _sharing(costs), strict=True)]
            for group, share in [(value.uses, 1)] if ref in self.shared else single:
                paid = [cost for _, cost in group]
                key = ("joint", id(given), share, producer is not None, *map(id, paid))
                table = self._once(key, partial(joint_uses, given, paid, share, producer is not None))
                self.factors.factors.append(Factor((*before, *(user for user, _ in group)), table))
        elif ref in self.sharing:
            variable, shared = self.sharing[ref]
            self._add((producer, variable), shared.first)
            for user, table in zip(users, shared.uses, strict=True):
                self._add((producer, variable, user), table)
        else:
            for user, table in zip(users, tables, strict=True):
                self._add((producer, user), table)

    def _add(self, variables: tuple[int | None, ...], table: FactorTable) -> None:
        """A factor; a value that no operator produces has one layout and no variable."""
        if variables[0] is None:
            of_source = table
            table = self._once(("first", id(of_source)), lambda: FactorTable(lambda: of_source.seconds[0]))
        self.factors.factors.append(Factor(tuple([one for one in variables if one is not None]), table))

    def _add_leaving(self, ref: Ref, gradient: bool) -> None:
        """What leaves the graph is replicated on every rank."""
        if isinstance(self.operators.by_id[ref.id], Source):
            return
        given, spec = self._given(ref), self.operators.specs[ref]
        table = self.resharding.table_of([Layout.replicated(len(spec.shape))])
        one, every = np.zeros(1, dtype=np.int64), np.zeros(len(given.of_candidate), dtype=np.int64)
        cost = UseCost(self.resharding, spec, given.table, table, table if gradient else None, one, one, every)
        for row in range(len(given.table)):
            cost.evaluate(row, 0)
        cost.refresh()
        seconds = cost.seconds[given.of_candidate, 0]
        self.leaving.append((self.variables[ref.id], seconds))
        self.factors.factors.append(constant((self.variables[ref.id],), seconds))

    def _given(self, ref: Ref) -> Layouts:
        """The layouts in which a value is handed on, by the candidate of its producer (one: a source)."""
        node = self.operators.by_id[ref.id]
        if isinstance(node, Operator):
            return self.candidates[ref.id].given[ref.index]
        layout = self.problem.inputs[node.name] if node.kind == "input" else Layout.replicated(len(node.spec.shape))
        one = np.zeros(1, dtype=np.int64)
        given: Layouts = self._once(("source", layout), lambda: Layouts(self.resharding.table_of([layout]), one))
        return given

    def _pays(self, ref: Ref) -> tuple[Layouts, list[UseCost], list[FactorTable]]:
        """How a value is handed on, and what each of its uses pays, by itself or as its part: the same for all values
        with the same candidates around them."""
        users, returning = self.operators.users[ref], self.operators.returning
        if ref.id in self.candidates:
            source: tuple[Any, ...] = id(self.candidates[ref.id]), ref.index
        else:
            source = id(self._given(ref)), self.operators.specs[ref]
        uses = [
            (id(self.candidates[user.id]), place, user.id in returning, self._how(user, place)) for user, place in users
        ]
        key = ("value", source, ref in self.operators.trained, *uses)
        if key not in self.known:
            given, spec = self._given(ref), self.operators.specs[ref]
            costs = []
            for use in self._uses(ref):
                name = ("use", id(given), spec.shape, spec.item_bytes, *self._kind(use), self._how(*use[:2]))
                costs.append(self._once(name, partial(self._use_cost, given, spec, use)))
            parts = zip(costs, _sharing(costs), strict=True)
            tables = [self._once(("part", id(one), share), self._part(given, one, share)) for one, share in parts]
            self.known[key] = given, costs, tables
        self.paying[ref] = self.known[key]
        return self.paying[ref]

    def _part(self, given: Layouts, cost: UseCost, uses: int) -> Callable[[], FactorTable]:
        """What one of several uses pays [candidates of the producer, candidates of the user]."""
        return lambda: FactorTable(lambda: cost.seconds[np.ix_(given.of_candidate, cost.of_candidate)] / uses)

    def _uses(self, ref: Ref) -> list[Use]:
        trained, returning = ref in self.operators.trained, self.operators.returning
        return [(user, position, trained and user.id in returning) for user, position in self.operators.users[ref]]

    def _kind(self, use: Use) -> tuple[int, int, bool]:
        return id(self.candidates[use[0].id]), use[1], use[2]

    def _how(self, user: Operator, position: int) -> Hashable:
        """How the user may take the value, where the trainer of modules limits it."""
        return None if self.problem.styled is None else self.problem.styled.use(user, position)

    def _use_cost(self, given: Layouts, spec: TensorSpec, use: Use) -> UseCost:
        operator, position, gradient = use
        wanted = self.candidates[operator.id].wanted[position]
        returned = self.candidates[operator.id].returned[position]
        numbers = wanted.of_candidate * len(returned.table) + (returned.of_candidate if gradient else 0)
        names, of_candidate = np.unique(numbers, return_inverse=True)
        come, go = names // len(returned.table), names % len(returned.table)
        back = returned.table if gradient else None
        styled, penalty, every = self.problem.styled, None, self.space.every
        if styled is not None:
            penalty = styled.penalty(every(given.table), every(wanted.table), styled.use(operator, position))
        return UseCost(self.resharding, spec, given.table, wanted.table, back, come, go, of_candidate, penalty)


class _SolutionReader:
    """Solutions read with a few gathers per kind of operator and use: what operators take and keep, what uses pay."""

    def __init__(self, graph: CostGraph) -> None:
        operators: dict[int, list[int]] = {}
        for id_, variable in graph.variables.items():
            operators.setdefault(id(graph.candidates[id_]), []).append(variable)
        kinds = {id(one): one for one in graph.candidates.values()}
        self.operators = [(kinds[number], np.array(variables)) for number, variables in operators.items()]
        sources = len(graph.factors.sizes)  # one more variable, with one candidate
        uses: dict[int, tuple[UseCost, Integers, list[tuple[int, int, int]]]] = {}
        for place, value in enumerate(graph.values):
            producer = sources if value.producer is None else value.producer
            for user, cost in value.uses:
                uses.setdefault(id(cost), (cost, value.given.of_candidate, []))[2].append((place, producer, user))
        targets: dict[tuple[bytes, bytes, bytes], int] = {}
        self.uses = [
            (cost, given, np.array([targets.setdefault(one, len(targets)) for one in cost.targets]), np.array(places).T)
            for cost, given, places in uses.values()
        ]
        """Per use cost: the layout of every candidate of the producer, the names of its targets, and for every use the
        value and the variables of producer and user."""
        self.targets = max(len(targets), 1)

    def owned(self, indices: Sequence[int]) -> tuple[float, float]:
        """Seconds and bytes of the operators by themselves."""
        chosen, seconds, size = np.array(indices), 0.0, 0.0
        for one, variables in self.operators:
            seconds += float(one.seconds[chosen[variables]].sum())
            size += float(one.bytes[chosen[variables]].sum())
        return seconds, size

    def entries(self, indices: Sequence[int], *, once: bool = False) -> Iterator[tuple[Entry, int]]:
        """What a solution pays, and how often; `once`: a target that several uses of a value want counts once."""
        taken = self._taken(indices)
        if once:
            taken = taken[:, np.unique(taken[3], return_index=True)[1]]
        for (kind, row, target), count in Counter(zip(*taken[:3].tolist(), strict=True)).items():
            yield (self.uses[kind][0], row, target), count

    def disagreeing(self, indices: Sequence[int]) -> list[int]:
        """The values whose uses want different targets in a solution."""
        values, counts = np.unique(np.unique(self._taken(indices)[3]) // self.targets, return_counts=True)
        return [int(value) for value in values[counts > 1]]

    def _taken(self, indices: Sequence[int]) -> Integers:
        """Per use the number of its use cost, row and target, and a number for its value and what it wants of it."""
        chosen, parts = np.array([*indices, 0]), [np.zeros((4, 0), dtype=np.int64)]
        for number, (cost, given, names, (values, producers, users)) in enumerate(self.uses):
            targets = cost.of_candidate[chosen[users]]
            rows = given[chosen[producers]]
            wanted = values * self.targets + names[targets]
            parts.append(np.stack([np.full(len(values), number), rows, targets, wanted]))
        return np.concatenate(parts, 1)
