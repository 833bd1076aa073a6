"""The search as a network: variables with a few options each, and tables of seconds over some of them.

Every operator is a variable; so is every parameter with several uses (its layout, and over which axes its gradient is
added). A value that two or three operators use may be redistributed once for several of them: a variable says for which
layout. Invariant: the sum of the tables is what the plan costs on the cluster. Only where a value has more uses
(`exact` is False) the sum is a lower bound: each use pays its share as if all wanted the same.

Variables stand in the order of the program, and equal tables are one object, so repeated layers look the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from strategies.graph import Operator, Ref, Source, TensorSpec
from strategies.layout import Layout
from strategies.rules.sharding import Assignment
from strategies.search.options import Menu, Side
from strategies.search.problem import Problem
from strategies.search.shared_parameters import SharedParameter
from strategies.search.transfers import Integers, Rows, Seconds, Transfers

MOST_SHARING = 3
"""Uses of a value up to which it is exact to let one of its layouts be shared."""


@dataclass(frozen=True, eq=False)
class Table:
    """Seconds over `variables`, one array dim each. Equal parts of a program share `seconds`."""

    variables: tuple[int, ...]
    seconds: Seconds


@dataclass(eq=False)
class Network:
    """`sizes` are the options of every variable; a table's variables are in increasing order."""

    sizes: list[int] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    exact: bool = True

    def add(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def cost(self, picks: Sequence[int]) -> float:
        """Seconds of a solution."""
        return float(sum(one.seconds[tuple(picks[v] for v in one.variables)] for one in self.tables))


@dataclass(frozen=True, eq=False)
class Pair:
    """What one use of a value costs: `seconds` [layouts of the value, targets], `of_option` [options of the user] the
    target of each; `targets` tell how the value comes and how the gradient goes."""

    seconds: Seconds
    of_option: Integers
    targets: tuple[tuple[bytes, ...], ...]


@dataclass(frozen=True, eq=False)
class Sharing:
    """A value that uses may share: `first` [options of the producer, shared layouts] is what the shared one costs (0 is
    none), `uses` [options of the producer, shared layouts, options of the user] what is left for each use."""

    first: Seconds
    uses: tuple[Seconds, ...]


class Building:
    """Makes the network of a problem, and reads a solution of it."""

    def __init__(self, problem: Problem, transfers: Transfers) -> None:
        self.problem, self.graph, self.transfers = problem, problem.graph, transfers
        self.menu, self.network = Menu(problem, transfers), Network()
        self.choices = {operator.id: self.menu.of(operator) for operator in self.graph.operators}
        self.variables: dict[str, int] = {}
        self.parameters: dict[Ref, tuple[int, SharedParameter]] = {}
        self.sharings: dict[Ref, tuple[int, Sharing]] = {}
        self.known: dict[tuple[Any, ...], Any] = {}
        self.one = np.zeros(1, dtype=np.int64)
        self._variables()
        self._tables()

    def assignments(self, picks: Sequence[int]) -> dict[str, Assignment]:
        return {id: self.choices[id].assignments[picks[variable]] for id, variable in self.variables.items()}

    def tensors(self, picks: Sequence[int]) -> dict[Ref, Layout]:
        """The layouts of the parameters with several uses."""
        return {ref: shared.layouts[picks[variable]] for ref, (variable, shared) in self.parameters.items()}

    def _variables(self) -> None:
        firsts: dict[str, list[Ref]] = {}
        for ref, uses in self.graph.users.items():
            if len(uses) > 1:
                firsts.setdefault(uses[0][0].id, []).append(ref)
        for operator in self.graph.operators:
            for ref in firsts.get(operator.id, ()):
                self._used_often(ref)
            self.variables[operator.id] = self.network.add(len(self.choices[operator.id]))

    def _used_often(self, ref: Ref) -> None:
        source = self.graph.by_id[ref.id]
        if isinstance(source, Source) and source.kind == "parameter":
            key = ("parameter", source.trainable, self.graph.specs[ref], *map(self._kind, self._uses(ref)))
            shared = self._remember(key, lambda: SharedParameter(self.menu, source, self._uses(ref), self.choices))
            self.network.exact &= sum(not gradient for _, _, gradient in self._uses(ref)) < 2
            self.parameters[ref] = self.network.add(len(shared.layouts)), shared
        elif len(self.graph.users[ref]) <= MOST_SHARING:
            given, pairs = self._given(ref), self._pairs(ref)
            key = ("sharing", id(given), *map(id, pairs))
            sharing = self._remember(key, lambda: _sharing(given, pairs))
            if sharing is not None:
                self.sharings[ref] = self.network.add(sharing.first.shape[1]), sharing
        else:
            self.network.exact = False

    def _remember(self, key: tuple[Any, ...], make: Any) -> Any:
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    def _uses(self, ref: Ref) -> list[tuple[Operator, int, bool]]:
        trained = ref in self.graph.trained
        return [
            (user, position, trained and user.id in self.graph.returning) for user, position in self.graph.users[ref]
        ]

    def _kind(self, use: tuple[Operator, int, bool]) -> tuple[int, int, bool]:
        return id(self.choices[use[0].id]), use[1], use[2]

    def _given(self, ref: Ref) -> Side:
        """In which layouts a value is handed on, and by which option of its producer (one option: a source)."""
        node = self.graph.by_id[ref.id]
        if isinstance(node, Operator):
            return self.choices[ref.id].given[ref.index]
        layout = self.problem.inputs[node.name] if node.kind == "input" else Layout.replicated(len(node.spec.shape))
        side: Side = self._remember(("source", layout), lambda: Side(self.transfers.rows_of([layout]), self.one))
        return side

    def _pairs(self, ref: Ref) -> list[Pair]:
        given, spec = self._given(ref), self.graph.specs[ref]
        found = []
        for use in self._uses(ref):
            key = ("pair", id(given), spec, *self._kind(use))
            found.append(self._remember(key, lambda use=use: self._pair(given, spec, use)))
        return found

    def _pair(self, given: Side, spec: TensorSpec, use: tuple[Operator, int, bool]) -> Pair:
        operator, position, gradient = use
        choices = self.choices[operator.id]
        wanted, returned = choices.wanted[position], choices.returned[position]
        numbers = wanted.of_option * len(returned.rows) + (returned.of_option if gradient else 0)
        names, of_option = np.unique(numbers, return_inverse=True)
        come, go = names // len(returned.rows), names % len(returned.rows)
        seconds = self.transfers.seconds(given.rows, wanted.rows, spec)[:, come]
        if gradient:
            whole = Rows(given.rows.dims, np.zeros_like(given.rows.partial))
            seconds = seconds + self.transfers.seconds(returned.rows, whole, spec)[go].T
        targets = []
        for a, b in zip(come, go, strict=True):
            told = [wanted.rows.dims[a].tobytes()]
            targets.append(tuple(told + [returned.rows.partial[b].tobytes()] * gradient))
        return Pair(seconds, of_option, tuple(targets))

    def _tables(self) -> None:
        for operator in self.graph.operators:
            variable = self.variables[operator.id]
            self.network.tables.append(Table((variable,), self.choices[operator.id].own))
        for ref, uses in self.graph.users.items():
            if not uses:
                continue
            source = self.graph.by_id[ref.id]
            if ref in self.parameters:
                variable, shared = self.parameters[ref]
                self.network.tables.append(Table((variable,), shared.own))
                for (user, _, _), seconds in zip(self._uses(ref), shared.uses, strict=True):
                    self.network.tables.append(Table((variable, self.variables[user.id]), seconds))
            elif not (isinstance(source, Source) and source.kind == "parameter"):
                self._value(ref)
        for ref in self.graph.outputs:
            self._whole(ref, ref in self.graph.trained)
        for _, ref in self.graph.updates:
            self._whole(ref, False)

    def _value(self, ref: Ref) -> None:
        producer, pairs = self.variables.get(ref.id), self._pairs(ref)
        users = [self.variables[user.id] for user, _ in self.graph.users[ref]]
        given = self._given(ref)
        if ref in self.sharings:
            variable, sharing = self.sharings[ref]
            self._add((producer, variable), sharing.first)
            for user, seconds in zip(users, sharing.uses, strict=True):
                self._add((producer, variable, user), seconds)
            return
        share = 1.0 if len(users) <= MOST_SHARING else 1.0 / len(users)
        for user, pair in zip(users, pairs, strict=True):
            seconds = self._remember(
                ("use", id(pair), share),
                lambda pair=pair: share * pair.seconds[np.ix_(given.of_option, pair.of_option)],
            )
            self._add((producer, user), seconds)

    def _add(self, variables: tuple[int | None, ...], seconds: Seconds) -> None:
        """A table; a value that no operator produces has one layout and no variable."""
        if not seconds.any():
            return
        if variables[0] is None:
            variables, seconds = variables[1:], self._remember(("first", id(seconds)), lambda: seconds[0])
        named = tuple(variable for variable in variables if variable is not None)
        if len(set(named)) < len(named):  # an operator that takes a value twice
            places = [named.index(variable) for variable in named]
            letters = "".join(chr(97 + place) for place in places)
            kept = "".join(dict.fromkeys(letters))
            seconds = self._remember(("diagonal", id(seconds)), lambda: np.einsum(f"{letters}->{kept}", seconds))
            named = tuple(dict.fromkeys(named))
        self.network.tables.append(Table(named, seconds))

    def _whole(self, ref: Ref, gradient: bool) -> None:
        """What leaves the graph is whole on every rank."""
        node = self.graph.by_id[ref.id]
        if isinstance(node, Source):
            return
        given, spec = self._given(ref), self.graph.specs[ref]
        rows = self.transfers.rows_of([Layout.replicated(len(spec.shape))])
        seconds = self.transfers.seconds(given.rows, rows, spec)[:, 0]
        if gradient:
            whole = Rows(given.rows.dims, np.zeros_like(given.rows.partial))
            seconds = seconds + self.transfers.seconds(rows, whole, spec)[0]
        self._add((self.variables[ref.id],), seconds[given.of_option])


def _sharing(given: Side, pairs: Sequence[Pair]) -> Sharing | None:
    """None where nothing is worth sharing."""
    often: dict[tuple[bytes, ...], list[Pair]] = {}
    for pair in pairs:
        for number, target in enumerate(pair.targets):
            if pair.seconds[:, number].any():
                often.setdefault(target, []).append(pair)
    shared = [target for target, found in often.items() if len(found) > 1]
    if not shared:
        return None
    costs = [often[target][0].seconds[:, often[target][0].targets.index(target)] for target in shared]
    first = np.stack([np.zeros(len(given.rows)), *costs], 1)[given.of_option]
    uses = []
    for pair in pairs:
        names = [pair.targets.index(target) if target in pair.targets else -1 for target in shared]
        left = np.repeat(pair.seconds[given.of_option][:, None, pair.of_option], len(shared) + 1, axis=1)
        for number, name in enumerate(names):
            left[:, number + 1, pair.of_option == name] = 0.0
        uses.append(left)
    return Sharing(first, tuple(uses))
