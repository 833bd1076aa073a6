"""What a whole plan costs, edge by edge as the engine executes it: the search's sum without its tables.

A value is redistributed once for all uses that need the same slice and return the same kind of gradient; parameters are
redistributed per use, and their gradients added once over all axes that some use left open.
"""

from __future__ import annotations

from collections.abc import Mapping

from strategies.engine.lowering import left_axes
from strategies.graph import Operator, Ref, Source, TensorSpec
from strategies.layout import Layout
from strategies.rules.sharding import Assignment
from strategies.search.options import Menu
from strategies.search.problem import Problem


def plan_seconds(
    menu: Menu, assignments: Mapping[str, Assignment], tensors: Mapping[Ref, Layout], problem: Problem
) -> float:
    """Seconds of a step under `assignments` by operator id; `tensors` are layouts of parameters with several uses."""
    return _Pricing(menu, assignments, tensors, problem).total()


class _Pricing:
    def __init__(
        self, menu: Menu, assignments: Mapping[str, Assignment], tensors: Mapping[Ref, Layout], problem: Problem
    ) -> None:
        self.menu, self.assignments, self.tensors = menu, assignments, tensors
        self.problem, self.graph, self.mesh = problem, problem.graph, problem.mesh

    def total(self) -> float:
        found = sum(self.menu.own_seconds(operator, self.assignments[operator.id]) for operator in self.graph.operators)
        for ref, uses in self.graph.users.items():
            node = self.graph.by_id[ref.id]
            if isinstance(node, Source) and node.kind == "parameter":
                if len(uses) > 1:
                    found += self._parameter(ref, node)
            else:
                found += self._value(ref)
        for ref, learns in (
            *((ref, True) for ref in self.graph.outputs),
            *((ref, False) for _, ref in self.graph.updates),
        ):
            if isinstance(self.graph.by_id[ref.id], Operator):
                have, spec = self._have(ref), self.graph.specs[ref]
                found += self._chain(have, Layout.replicated(len(spec.shape)), spec)
                if learns and ref in self.graph.trained:
                    found += self._chain(Layout.replicated(len(spec.shape)), have.whole, spec)
        return found

    def _chain(self, before: Layout, after: Layout, spec: TensorSpec) -> float:
        return self.menu.chain_seconds(before, after, spec)

    def _have(self, ref: Ref) -> Layout:
        node = self.graph.by_id[ref.id]
        if isinstance(node, Operator):
            return self.problem.result_layout(ref, self.assignments[ref.id])
        return self.problem.inputs[node.name] if node.kind == "input" else Layout.replicated(len(node.spec.shape))

    def _use(self, user: Operator, position: int) -> tuple[Layout, Layout]:
        sharding, assignment = self.problem.shardings[user.id], self.assignments[user.id]
        return sharding.operand_layouts(assignment)[position], sharding.gradient_layouts(assignment)[position]

    def _value(self, ref: Ref) -> float:
        have, spec, found = self._have(ref), self.graph.specs[ref], 0.0
        done = set()
        for user, position in self.graph.users[ref]:
            wanted, returned = self._use(user, position)
            gradient = ref in self.graph.trained and user.id in self.graph.returning
            key = (wanted, returned if gradient else None)
            if key not in done:
                done.add(key)
                found += self._chain(have, wanted, spec)
                if gradient:
                    found += self._chain(returned, have.whole, spec)
        return found

    def _parameter(self, ref: Ref, source: Source) -> float:
        have, spec, found = self.tensors[ref], source.spec, 0.0
        added: set[str] = set()
        shared: set[Layout] = set()
        for user, position in self.graph.users[ref]:
            wanted, returned = self._use(user, position)
            if ref not in self.graph.trained or user.id not in self.graph.returning:
                if wanted not in shared:
                    shared.add(wanted)
                    found += self._chain(have, wanted, spec)
            else:
                found += self._chain(have, wanted, spec)
                left = left_axes(have, returned, spec.shape, self.mesh)
                found += self._chain(returned, Layout(have.dims, left), spec)
                added |= left
        if ref in self.graph.trained and any(user.id in self.graph.returning for user, _ in self.graph.users[ref]):
            found += self.menu.parameter_seconds(Layout(have.dims, frozenset(added)), spec)
        return found
