"""The search as a network: variables with a few options each, and tables of seconds over some of them.

Every operator is a variable; so is every parameter with several uses (its layout, and over which axes its gradient is
added). Uses of a value that want the same share one redistribution. Tables over two operators cannot say so: there each
of k uses pays a k-th, which is right where all agree and else a lower bound. For a value where they do not agree, a
variable says which layout is shared (`split`); that is exact for up to `MOST_SHARING` uses.

Invariant: the sum of the tables is never above what the plan costs on the cluster, and equal where all prices are
settled and uses agree or are split. Variables stand in the order of the program, and equal tables have one cell, so
repeated layers look the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from strategies.core.graph import Operator, Ref, Source, TensorSpec
from strategies.core.layout import Layout
from strategies.rules.sharding import Assignment
from strategies.search.cells import Cell, Network, Table, table
from strategies.search.options import Choices, Menu, Side
from strategies.search.problem import Problem
from strategies.search.reading import Owned, Uses
from strategies.search.shared_parameters import SharedParameter
from strategies.search.transfers import Prices, Seconds
from strategies.search.uses import Pair, Sharing, agreeing, cell_of_use, sharing_of

MOST_SHARING = 3
"""Uses of a value up to which it is exact to let one of its layouts be shared."""
MOST_AGREEING = 4
"""The same, of a network that is too wide to be eliminated as it is."""
MOST_ENTRIES = 2**23
"""Of a table, up to which a value is split."""


Paying = tuple[Side, list[Pair], list[Cell]]
"""How a value is handed on, what each use may pay, and the table of each."""


class Offers(Protocol):
    """What operators may do, and at which prices."""

    pressure: float

    @property
    def transfers(self) -> Prices: ...

    def of(self, operator: Operator) -> Choices: ...


class Building:
    """Makes the network of a problem, and reads a solution of it. `split` are the values with a variable of their own
    for what is shared; where the network is `wide`, with a table over all uses. What was made for a network `like` this
    one, of the same problem and menu, is taken over."""

    def __init__(
        self,
        problem: Problem,
        menu: Offers,
        split: frozenset[Ref] = frozenset(),
        *,
        wide: bool = False,
        like: Building | None = None,
    ) -> None:
        self.problem, self.graph, self.menu, self.split, self.wide = problem, problem.graph, menu, split, wide
        self.transfers, self.network = menu.transfers, Network()
        if like is not None:
            self.network.known = like.network.known
        self.choices: dict[str, Choices] = (
            like.choices if like else {one.id: menu.of(one) for one in self.graph.operators}
        )
        self.variables: dict[str, int] = {}
        self.parameters: dict[Ref, tuple[int, SharedParameter]] = {}
        self.sharings: dict[Ref, tuple[int, Sharing]] = {}
        self.used: list[tuple[Ref, int | None, Side, list[tuple[int, Pair]]]] = []
        self.leaving: list[tuple[int, Seconds]] = []
        self.known: dict[tuple[Any, ...], Any] = like.known if like else {}
        self.paying: dict[Ref, Paying] = like.paying if like else {}
        self.raised = self.transfers.raised
        self.settled: set[tuple[int, int, int]] = like.settled if like else set()
        """Entries of pairs that were priced."""
        self.learned = {source.id for source in self.graph.of_kind("parameter")}
        self._variables()
        self._tables()
        self.uses = Uses(len(self.network.sizes), [one[1:] for one in self.used])
        self.owned = Owned(list(self.choices.values()), [self.variables[id] for id in self.choices])

    def assignments(self, picks: Sequence[int]) -> dict[str, Assignment]:
        return {id: self.choices[id].assignments[picks[variable]] for id, variable in self.variables.items()}

    def tensors(self, picks: Sequence[int]) -> dict[Ref, Layout]:
        """The layouts of the parameters with several uses."""
        return {ref: shared.layouts[picks[variable]] for ref, (variable, shared) in self.parameters.items()}

    def settle(self, picks: Sequence[int]) -> bool:
        """Prices all that a solution uses; whether anything was too low before."""
        for (pair, row, target), _ in self.uses.entries(picks):
            key = id(pair), row, target
            if key not in self.settled:
                self.settled.add(key)
                pair.settle(row, target)
        for ref, (variable, shared) in self.parameters.items():
            shared.settle(picks[variable], self._picked(ref, picks))
        return self.renew()

    def renew(self) -> bool:
        """Makes all tables again whose prices were raised; whether any were."""
        if self.transfers.raised == self.raised:
            return False
        self.raised = self.transfers.raised
        self._refresh()
        return True

    def _refresh(self) -> None:
        """Makes all cells again whose prices have changed."""
        changed = {id(one) for one in self.known.values() if isinstance(one, Pair) and one.refresh()}
        for one in self.known.values():
            if isinstance(one, SharedParameter):
                one.refresh()
        for key, one in self.known.items():
            if isinstance(one, Sharing) and not changed.isdisjoint(key):
                for cell in (one.first, *one.uses):
                    cell.refresh()
                    changed.add(id(cell))
            elif isinstance(one, Cell) and not changed.isdisjoint(key):
                one.refresh()
                changed.add(id(one))

    def cost(self, picks: Sequence[int]) -> float:
        """What a solution costs whose prices are settled: every target of a value is paid once."""
        total = self.owned.taken(picks)[0]
        for variable, seconds in self.leaving:
            total += seconds[picks[variable]]
        total += sum(pair.seconds[row, target] * n for (pair, row, target), n in self.uses.entries(picks, once=True))
        for ref, (variable, shared) in self.parameters.items():
            total += shared.cost(picks[variable], self._picked(ref, picks))
        return float(total)

    def _picked(self, ref: Ref, picks: Sequence[int]) -> list[int]:
        return [picks[self.variables[user.id]] for user, _ in self.graph.users[ref]]

    def underpaid(self, picks: Sequence[int]) -> frozenset[Ref]:
        """The values of which uses want different layouts in a solution and pay too little for them, as far as they can
        be split."""
        found = set()
        for ref, producer, given, uses in map(self.used.__getitem__, self.uses.disagreeing(picks)):
            row = 0 if producer is None else int(given.of_option[picks[producer]])
            pays = any(pair.seconds[row, pair.of_option[picks[user]]] for user, pair in uses)
            if pays and ref not in self.sharings and self._splits(ref, uses):
                found.add(ref)
        return frozenset(found)

    def _splits(self, ref: Ref, uses: Sequence[tuple[int, Pair]]) -> bool:
        """Whether it is exact and small enough to give a value a variable of its own; in a wide network, a table."""
        users = {user for user, _ in uses}
        if self.wide:
            return ref not in self.split and len(uses) == len(users) <= MOST_AGREEING
        widest = max(len(pair.of_option) for _, pair in uses)
        entries = len(self._given(ref).of_option) * max(len(pair.targets) for _, pair in uses) * widest
        return ref not in self.split and len(uses) <= MOST_SHARING and entries <= MOST_ENTRIES

    def _variables(self) -> None:
        firsts: dict[str, list[Ref]] = {}
        for ref, uses in self.graph.users.items():
            if len(uses) > 1 and (ref.id in self.learned or ref in self.split):
                firsts.setdefault(uses[0][0].id, []).append(ref)
        for operator in self.graph.operators:
            for ref in firsts.get(operator.id, ()):
                self._used_often(ref)
            self.variables[operator.id] = self.network.add(len(self.choices[operator.id]))

    def _used_often(self, ref: Ref) -> None:
        source = self.graph.by_id[ref.id]
        if isinstance(source, Source) and source.kind == "parameter":
            key = ("parameter", source.trainable, self.graph.specs[ref], *map(self._kind, self._uses(ref)))
            menu = self.menu
            if not isinstance(menu, Menu):
                return  # classes of layouts do not say how a parameter lies: its uses have what they take at least
            shared = self._remember(key, lambda: SharedParameter(menu, source, self._uses(ref), self.choices))
            self.parameters[ref] = self.network.add(len(shared.layouts)), shared
        elif ref in self.split and not self.wide:
            given, pairs, _ = self._paying(ref)
            sharing = self._remember(("sharing", id(given), *map(id, pairs)), lambda: sharing_of(given, pairs))
            if sharing is not None:
                self.sharings[ref] = self.network.add(sharing.first.seconds.shape[1]), sharing

    def _remember(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    def _uses(self, ref: Ref) -> list[tuple[Operator, int, bool]]:
        trained, returning = ref in self.graph.trained, self.graph.returning
        return [(user, position, trained and user.id in returning) for user, position in self.graph.users[ref]]

    def _kind(self, use: tuple[Operator, int, bool]) -> tuple[int, int, bool]:
        return id(self.choices[use[0].id]), use[1], use[2]

    def _given(self, ref: Ref) -> Side:
        """In which layouts a value is handed on, and by which option of its producer (one option: a source)."""
        node = self.graph.by_id[ref.id]
        if isinstance(node, Operator):
            return self.choices[ref.id].given[ref.index]
        layout = self.problem.inputs[node.name] if node.kind == "input" else Layout.replicated(len(node.spec.shape))
        side: Side = self._remember(
            ("source", layout), lambda: Side(self.transfers.rows_of([layout]), np.zeros(1, dtype=np.int64))
        )
        return side

    def _paying(self, ref: Ref) -> Paying:
        """How a value is handed on, and what each of its uses pays, alone or for its part: the same for all values that
        look alike."""
        key = self._look(ref)
        if key not in self.known:
            given = self._given(ref)
            pairs = self._pairs(ref, given)
            cells = [self._remember(("use", id(one), len(pairs)), self._use(given, one, pairs)) for one in pairs]
            self.known[key] = given, pairs, cells
        found: Paying = self.known[key]
        self.paying[ref] = found
        return found

    def _use(self, given: Side, pair: Pair, pairs: Sequence[Pair]) -> Callable[[], Cell]:
        return lambda: cell_of_use(given, pair, len(pairs))

    def _look(self, ref: Ref) -> tuple[Any, ...]:
        """All that a value's prices follow from: of which choices it is which result, or where it comes from; and what
        its users are."""
        choices, returning = self.choices, self.graph.returning
        if ref.id in choices:
            source: tuple[Any, ...] = id(choices[ref.id]), ref.index
        else:
            source = id(self._given(ref)), self.graph.specs[ref]
        uses = [(id(choices[user.id]), place, user.id in returning) for user, place in self.graph.users[ref]]
        return "value", source, ref in self.graph.trained, *uses

    def _pairs(self, ref: Ref, given: Side) -> list[Pair]:
        spec, found = self.graph.specs[ref], []
        for use in self._uses(ref):
            key = ("pair", id(given), spec.shape, spec.item_bytes, *self._kind(use))
            found.append(self._remember(key, lambda use=use: self._pair(given, spec, use)))  # type: ignore[misc]
        return found

    def _pair(self, given: Side, spec: TensorSpec, use: tuple[Operator, int, bool]) -> Pair:
        operator, position, gradient = use
        wanted = self.choices[operator.id].wanted[position]
        returned = self.choices[operator.id].returned[position]
        numbers = wanted.of_option * len(returned.rows) + (returned.of_option if gradient else 0)
        names, of_option = np.unique(numbers, return_inverse=True)
        come, go = names // len(returned.rows), names % len(returned.rows)
        back = returned.rows if gradient else None
        return Pair(self.transfers, spec, given.rows, wanted.rows, back, come, go, of_option)

    def _tables(self) -> None:
        own = {id(one): self._remember(("own", id(one)), self._own(one)) for one in self.choices.values()}
        for name, variable in self.variables.items():
            self.network.tables.append(Table((variable,), own[id(self.choices[name])]))
        for ref, uses in self.graph.users.items():
            if uses and ref in self.parameters:
                variable, shared = self.parameters[ref]
                self.network.tables.append(Table((variable,), shared.own))
                for (user, _), cell in zip(uses, shared.uses, strict=False):
                    self.network.tables.append(Table((variable, self.variables[user.id]), cell))
            elif uses and ref.id not in self.learned and self.problem.counts(ref):
                self._value(ref, [self.variables[user.id] for user, _ in uses])
        for ref in self.graph.outputs if self.problem.sure is None else ():  # one number, once per step
            self._whole(ref, ref in self.graph.trained)
        for _, ref in self.graph.updates:
            if self.problem.counts(ref):
                self._whole(ref, False)

    def _own(self, choices: Choices) -> Callable[[], Cell]:
        return lambda: Cell(lambda: choices.own + self.menu.pressure * choices.bytes)

    def press(self, pressure: float) -> None:
        """Lets a byte of memory cost so many seconds."""
        self.menu.pressure = pressure
        for key, one in self.known.items():
            if key[0] == "own":
                one.refresh()
        for _, shared in self.parameters.values():
            shared.own.refresh()

    def bytes(self, picks: Sequence[int]) -> float:
        """What a rank keeps under a solution: parameters, gradients, optimizer states and results."""
        found = self.owned.taken(picks)[1]
        found += sum(shared.bytes[picks[variable]] for variable, shared in self.parameters.values())
        return float(found)

    def _value(self, ref: Ref, users: Sequence[int]) -> None:
        producer, (given, pairs, cells) = self.variables.get(ref.id), self.paying.get(ref) or self._paying(ref)
        self.used.append((ref, producer, given, list(zip(users, pairs, strict=True))))
        if self.wide and len(set(users)) == len(users):
            produced = () if producer is None else (producer,)
            together = [list(zip(users, pairs, strict=True))]
            for some in together if ref in self.split else [[one] for one in together[0]]:
                cell = self._agreeing(given, [pair for _, pair in some], len(users) // len(some), produced != ())
                self.network.tables.append(Table((*produced, *(user for user, _ in some)), cell))
            return
        if self.sharings and ref in self.sharings:
            variable, sharing = self.sharings[ref]
            self._add((producer, variable), sharing.first)
            for user, cell in zip(users, sharing.uses, strict=True):
                self._add((producer, variable, user), cell)
            return
        if producer is None:
            for user, cell in zip(users, cells, strict=True):
                self._add((producer, user), cell)
        else:
            self.network.tables += [Table((producer, user), cell) for user, cell in zip(users, cells, strict=True)]

    def _agreeing(self, given: Side, pairs: Sequence[Pair], share: int, produced: bool) -> Cell:
        """What these uses pay together; each pays one of `share` parts."""
        key = ("agreeing", id(given), share, produced, *map(id, pairs))
        cell: Cell = self._remember(key, lambda: agreeing(given, pairs, share, produced))
        return cell

    def _add(self, variables: tuple[int | None, ...], cell: Cell) -> None:
        """A table; a value that no operator produces has one layout and no variable."""
        if variables[0] is None:
            variables = variables[1:]
            cell = self._remember(("first", id(cell)), lambda cell=cell: Cell(lambda: cell.seconds[0]))  # type: ignore[misc]
        self.network.tables.append(Table(tuple([one for one in variables if one is not None]), cell))

    def _whole(self, ref: Ref, gradient: bool) -> None:
        """What leaves the graph is whole on every rank."""
        if isinstance(self.graph.by_id[ref.id], Source):
            return
        given, spec = self._given(ref), self.graph.specs[ref]
        rows = self.transfers.rows_of([Layout.replicated(len(spec.shape))])
        one, every = np.zeros(1, dtype=np.int64), np.zeros(len(given.of_option), dtype=np.int64)
        pair = Pair(self.transfers, spec, given.rows, rows, rows if gradient else None, one, one, every)
        for row in range(len(given.rows)):
            pair.settle(row, 0)
        pair.refresh()
        seconds = pair.seconds[given.of_option, 0]
        self.leaving.append((self.variables[ref.id], seconds))
        self.network.tables.append(table((self.variables[ref.id],), seconds))
