"""The bytes that a rank stores for backward at least: told from operators' names and layouts alone.

Invariant: never more than a trace counts. What operators surely save is counted once, in the smallest of the layouts in
which it is handed on and used; of modules that are computed again, what comes in, and of what is kept what is saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from strategies.cost.operators import VIEWS
from strategies.cost.saved import PRODUCTS
from strategies.graph import Operator, OperatorGraph, Ref
from strategies.layout import Layout
from strategies.plan import Plan
from strategies.rules import rule_of

SAVING = PRODUCTS | {"gelu", "layer_norm", "rms_norm", "scaled_dot_product_attention", "silu"}
"""Operators whose gradients need their operands."""
THROUGH = VIEWS | {"clone", "contiguous", "copy", "dropout", "to", "type_as"}
"""Operators that may return what they were given."""


def least_stored(graph: OperatorGraph, plan: Plan) -> int:
    """Of one forward of `graph` under `plan`, which may be a stage of a pipeline."""
    return _Storing(graph, plan).total()


@dataclass(frozen=True)
class _Storing:
    graph: OperatorGraph
    plan: Plan
    seen: dict[Ref, bool] = field(default_factory=dict)
    """Whether the second run of its module needs a result."""

    def total(self) -> int:
        found = 0.0
        for operator in self.graph.operators:
            if operator.op not in THROUGH:
                for index, spec in enumerate(operator.results):
                    if spec.floating:
                        found += self._stored(Ref(operator.id, index), operator)
        return int(found)

    def _stored(self, ref: Ref, operator: Operator) -> float:
        """Bytes of a result; 0 where it need not be stored."""
        mine, uses = self.regions[operator.id], list(self._uses(ref))
        here = mine is None or operator.name in self._kept
        if not any(self._stores(mine, here, *use) for use in uses):
            return 0.0
        own = self.plan.operators[operator.name]
        given = own.outputs or rule_of(operator, self.graph).result_layouts(own.assignment)
        return min(self._bytes(ref, given[ref.index]), *(self._bytes(ref, layout) for ref, layout in self._used(uses)))

    def _stores(self, mine: str | None, here: bool, user: Operator, position: int) -> bool:
        """Whether a use in a module keeps what one in another module, or in the same, has made; `here`: its module does
        not make it again."""
        theirs = self.regions[user.id]
        if theirs not in (None, mine):
            return self.plan.recompute is not None and not self.plan.recompute.slices_inputs
        if theirs == mine and mine is not None:
            return here and self._asks(user, position)
        return self._saves(user, position)

    def _asks(self, user: Operator, position: int) -> bool:
        """Whether the second run of a module needs an operand of one of its operators: for backward, or to make
        something again that is needed."""
        if self._saves(user, position):
            return True
        again = user.name not in self._kept
        return again and any(self._needed(Ref(user.id, index)) for index in range(len(user.results)))

    def _needed(self, ref: Ref) -> bool:
        if ref not in self.seen:
            mine = self.regions[ref.id]
            inside = (use for use in self._uses(ref) if self.regions[use[0].id] == mine)
            self.seen[ref] = any(self._asks(*use) for use in inside)
        return self.seen[ref]

    def _saves(self, user: Operator, position: int) -> bool:
        """Whether autograd surely saves an operand."""
        if user.op not in SAVING or user.id not in self.graph.returning:
            return False
        others = (ref for at, ref in enumerate(user.operands) if at != position)
        return user.op not in PRODUCTS or any(ref in self.graph.trained for ref in others)

    def _uses(self, ref: Ref) -> Iterator[tuple[Operator, int]]:
        """By operators that do more than to show it."""
        for user, position in self.graph.users[ref]:
            if user.op in THROUGH:
                for index in range(len(user.results)):
                    yield from self._uses(Ref(user.id, index))
            else:
                yield user, position

    def _used(self, uses: list[tuple[Operator, int]]) -> Iterator[tuple[Ref, Layout]]:
        for user, position in uses:
            assignment = self.plan.operators[user.name].assignment
            yield user.operands[position], rule_of(user, self.graph).operand_layouts(assignment)[position]

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
