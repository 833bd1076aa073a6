"""The bytes that a rank stores for backward at least: from operators' traits and layouts alone.

Invariant: never more than a trace counts. What operators surely save is counted once, in the smallest of the layouts in
which it is handed on and used; of modules that are computed again, what comes in, and of what is kept what is saved.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from strategies.core.graph import Operator, OperatorGraph, Ref
from strategies.core.layout import Layout
from strategies.core.plan import Plan
from strategies.memory.saved import saves_operand
from strategies.rules import rule_of
from strategies.rules.traits import traits


@dataclass(frozen=True)
class _Use:
    """By an operator that does more than return a value; `saves`: autograd surely saves it there."""

    user: Operator
    position: int
    saves: bool


_uses: dict[int, dict[Ref, tuple[_Use, ...]]] = {}
"""Of all results, by graph, as long as it lives."""


def least_stored(graph: OperatorGraph, plan: Plan) -> int:
    """Of one forward of `graph` under `plan`, which may be a stage of a pipeline."""
    if id(graph) not in _uses:
        _uses[id(graph)] = {
            Ref(operator.id, index): tuple(_used(graph, Ref(operator.id, index)))
            for operator in graph.operators
            if traits(operator.op).result == "new"
            for index in range(len(operator.results))
        }
        weakref.finalize(graph, _uses.pop, id(graph), None)
    return _Storing(graph, plan, _uses[id(graph)]).total()


def _used(graph: OperatorGraph, ref: Ref) -> Iterator[_Use]:
    for user, position in graph.users[ref]:
        if traits(user.op).result != "new":
            for index in range(len(user.results)):
                yield from _used(graph, Ref(user.id, index))
        else:
            yield _Use(user, position, _saves(graph, user, position))


def _saves(graph: OperatorGraph, user: Operator, position: int) -> bool:
    return traits(user.op).certain and user.id in graph.returning and saves_operand(graph, user, position)


@dataclass(frozen=True)
class _Storing:
    graph: OperatorGraph
    plan: Plan
    uses: Mapping[Ref, tuple[_Use, ...]]
    seen: dict[Ref, bool] = field(default_factory=dict)
    """Whether the second run of its module needs a result."""

    def total(self) -> int:
        return int(sum(self._stored(ref, uses) for ref, uses in self.uses.items() if self.graph.specs[ref].floating))

    def _stored(self, ref: Ref, uses: Sequence[_Use]) -> float:
        """Bytes of a result; 0 where it need not be stored."""
        operator, mine = self.graph.by_id[ref.id], self.regions[ref.id]
        assert isinstance(operator, Operator)
        here = mine is None or operator.name in self._kept
        if not any(self._stores(mine, here, use) for use in uses):
            return 0.0
        own = self.plan.operators[operator.name]
        given = own.outputs or rule_of(operator, self.graph).result_layouts(own.assignment)
        return min(
            self._bytes(ref, given[ref.index]), *(self._bytes(ref, layout) for ref, layout in self._layouts(uses))
        )

    def _stores(self, mine: str | None, here: bool, use: _Use) -> bool:
        """Whether a use in a module keeps what one in another module, or in the same, has made; `here`: its module does
        not make it again."""
        theirs = self.regions[use.user.id]
        if theirs not in (None, mine):
            return self.plan.recompute is not None and not self.plan.recompute.slices_inputs
        if theirs == mine and mine is not None:
            return here and self._asks(use)
        return use.saves

    def _asks(self, use: _Use) -> bool:
        """Whether the second run of a module needs an operand of one of its operators: for backward, or to make
        something again that is needed."""
        if use.saves:
            return True
        again = use.user.name not in self._kept
        return again and any(self._needed(Ref(use.user.id, index)) for index in range(len(use.user.results)))

    def _needed(self, ref: Ref) -> bool:
        if ref not in self.seen:
            mine = self.regions[ref.id]
            inside = (use for use in self.uses[ref] if self.regions[use.user.id] == mine)
            self.seen[ref] = any(self._asks(use) for use in inside)
        return self.seen[ref]

    def _layouts(self, uses: Sequence[_Use]) -> Iterator[tuple[Ref, Layout]]:
        for use in uses:
            assignment = self.plan.operators[use.user.name].assignment
            layouts = rule_of(use.user, self.graph).operand_layouts(assignment)
            yield use.user.operands[use.position], layouts[use.position]

    def _bytes(self, ref: Ref, layout: Layout) -> float:
        spec = self.graph.specs[ref]
        return math.prod(layout.local_shape(spec.shape, self.plan.mesh)) * spec.item_bytes

    @cached_property
    def regions(self) -> dict[str, str | None]:
        """The module that is computed again around every operator."""
        again = self.plan.recompute
        return {one.id: None if again is None else again.region(one.path) for one in self.graph.operators}

    @cached_property
    def _kept(self) -> frozenset[str]:
        return frozenset(() if self.plan.recompute is None else self.plan.recompute.kept)
