"""What a choice costs in seconds: an operator by itself, a value on its way to a use, and a whole plan.

A plan costs the work of every operator, every redistribution forward and backward (once per value and target, but of a
parameter once per use that returns a gradient, as the engine does it), what leaves the graph made whole, and the update
of every parameter. Invariant: with the engine's redistributions (`engine_seconds`) the total is what the lowered
program costs, and what the exact search's tables add up to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence

from strategies.core.graph import Operator, Ref, Source, TensorSpec
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.cost.cluster import Cluster
from strategies.cost.collectives import path_seconds
from strategies.cost.roofline import operator_seconds
from strategies.lowering.lowering import left_axes
from strategies.resharding.path import resharding_path
from strategies.rules.sharding import Assignment
from strategies.search.own import Own
from strategies.search.problem import Problem

Moving = Callable[[Layout, Layout, tuple[int, ...], int, Mesh, Cluster], float]
"""Layouts before and after, shape, bytes per element, mesh, cluster -> seconds."""


def engine_seconds(
    before: Layout, after: Layout, shape: tuple[int, ...], item_bytes: int, mesh: Mesh, cluster: Cluster
) -> float:
    """Seconds of the chain that the engine runs."""
    return path_seconds(resharding_path(before, after, shape, mesh), item_bytes, mesh, cluster)


class Pricing:
    """Prices of one problem on one cluster; `moving` says what a redistribution takes."""

    def __init__(self, problem: Problem, cluster: Cluster, moving: Moving = engine_seconds) -> None:
        self.problem, self.cluster, self.mesh, self.moving = problem, cluster, problem.mesh, moving
        self._moves: dict[tuple[Layout, Layout, tuple[int, ...], int], float] = {}
        self._rates: dict[tuple[frozenset[str], frozenset[str], int], float] = {}
        self._talks: dict[Hashable, bool] = {}
        self.own = Own(problem, cluster)
        self._leaving: dict[str, list[tuple[int, bool]]] = {}
        for ref in problem.graph.outputs:
            self._leaving.setdefault(ref.id, []).append((ref.index, ref in problem.graph.trained))
        for _, ref in problem.graph.updates:
            self._leaving.setdefault(ref.id, []).append((ref.index, False))

    def moved(self, before: Layout, after: Layout, spec: TensorSpec) -> float:
        """Seconds to carry a value of `spec` from one layout to another."""
        if before == after:
            return 0.0
        key = before, after, spec.shape, spec.item_bytes
        if key not in self._moves:
            self._moves[key] = self.moving(before, after, spec.shape, spec.item_bytes, self.mesh, self.cluster)
        return self._moves[key]

    def used(self, have: Layout, wanted: Layout, returned: Layout | None, spec: TensorSpec) -> float:
        """Seconds to carry a value to a use and its gradient back (None: there is none)."""
        back = 0.0 if returned is None else self.moved(returned, have.whole, spec)
        return self.moved(have, wanted, spec) + back

    def worked(self, operator: Operator, assignment: Assignment) -> float:
        """Seconds of an operator's own work, forward and backward, of what its local program sends, and of results that
        are handed on in another layout."""
        problem, sharding = self.problem, self.problem.shardings[operator.id]
        trained = operator.id in problem.graph.returning
        seconds = operator_seconds(sharding, assignment, operator, problem.graph, self.mesh, self.cluster, trained)
        natural = sharding.result_layouts(assignment)
        for index, handed in enumerate(problem.outputs.get(operator.id, ())):
            spec, have = operator.results[index], natural[index]
            seconds += self.moved(have, handed, spec)
            if trained and Ref(operator.id, index) in problem.graph.trained:
                seconds += self.moved(handed.whole, have.whole, spec)
        if sharding.local is None or not assignment:
            return seconds
        key = operator.target, sharding.operands, tuple(sharding.sizes.items())
        if key not in self._talks:
            self._talks[key] = self.own.talks(operator, sharding)
        return seconds + (self.own.inside(operator, sharding, assignment) if self._talks[key] else 0.0)

    def updated(self, held: Layout, left: frozenset[str], spec: TensorSpec) -> float:
        """Seconds of the update of a trained parameter that lies like `held`, its gradient partial over `left`."""
        key = left, held.axes, spec.item_bytes
        elements = math.prod(held.local_shape(spec.shape, self.mesh))
        if key not in self._rates:
            self._rates[key] = self.own.parameter_seconds(Layout(held.dims, left), spec) / max(elements, 1)
        return elements * self._rates[key]

    def left(self, operator: Operator, results: Sequence[Layout]) -> float:
        """Seconds to make those of an operator's results whole that leave the graph, and to cut their gradients again;
        they lie as `results`."""
        seconds = 0.0
        for index, learns in self._leaving.get(operator.id, ()):
            have, spec = results[index], operator.results[index]
            whole = Layout.replicated(len(spec.shape))
            seconds += self.used(have, whole, whole if learns else None, spec)
        return seconds

    def total(self, chosen: Mapping[str, Assignment], tensors: Mapping[Ref, Layout] | None = None) -> float:
        """Seconds of a step with these assignments (by operator). Parameters with several uses lie as `tensors` says,
        else as their first use wants them."""
        seconds = 0.0
        for operator in self.problem.graph.operators:
            results = [self.layout(Ref(operator.id, index), chosen) for index in range(len(operator.results))]
            seconds += self.worked(operator, chosen[operator.id]) + self.left(operator, results)
        return seconds + sum(self.carried(ref, chosen, (tensors or {}).get(ref)) for ref in self.problem.graph.users)

    def carried(self, ref: Ref, chosen: Mapping[str, Assignment], held: Layout | None = None) -> float:
        """Seconds to carry a value to all of its uses and their gradients back; of a parameter, with its update."""
        graph, shardings = self.problem.graph, self.problem.shardings
        source, spec = graph.by_id[ref.id], graph.specs[ref]
        every = [
            (
                shardings[user.id].operand_layouts(chosen[user.id])[position],
                shardings[user.id].gradient_layouts(chosen[user.id])[position] if self.learns(ref, user) else None,
            )
            for user, position in graph.users[ref]
        ]
        if isinstance(source, Source) and source.kind == "parameter":
            return self.parameter(every, spec, held)
        have = self.layout(ref, chosen)
        return sum(self.used(have, wanted, returned, spec) for wanted, returned in dict.fromkeys(every))

    def learns(self, ref: Ref, user: Operator) -> bool:
        """Whether a gradient comes back from this use of a value."""
        return ref in self.problem.graph.trained and user.id in self.problem.graph.returning

    def layout(self, ref: Ref, chosen: Mapping[str, Assignment]) -> Layout:
        """How a value that is no parameter lies."""
        source = self.problem.graph.by_id[ref.id]
        if isinstance(source, Operator):
            return self.problem.result_layout(ref, chosen[ref.id])
        if source.kind == "input":
            return self.problem.inputs[source.name]
        return Layout.replicated(len(source.spec.shape))

    def parameter(
        self, ways: Sequence[tuple[Layout, Layout | None]], spec: TensorSpec, held: Layout | None = None
    ) -> float:
        """Seconds of a parameter that is used in these ways: it lies like `held`, else as the first wants it. Uses
        without a gradient share what they want in common; of the others each takes it and returns its gradient, which
        is added over all axes that some use leaves."""
        if not ways:
            return 0.0
        held, left, seconds = held or ways[0][0], frozenset[str](), 0.0
        for wanted in dict.fromkeys(wanted for wanted, returned in ways if returned is None):
            seconds += self.moved(held, wanted, spec)
        learning = [(wanted, returned) for wanted, returned in ways if returned is not None]
        for wanted, returned in learning:
            open_ = left_axes(held, returned, spec.shape, self.mesh)
            left |= open_
            seconds += self.moved(held, wanted, spec) + self.moved(returned, Layout(held.dims, open_), spec)
        return seconds + (self.updated(held, left, spec) if learning else 0.0)
