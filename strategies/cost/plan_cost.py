"""The cost of a plan in seconds: of a single operator, of resharding a value to a use, and in total.

A plan costs the work of every operator, every resharding forward and backward (once per value and target, but of a
parameter once per use that returns a gradient, as the engine does it), the replication of what leaves the graph, and
the update of every parameter. Invariant: with the engine's paths (`resharding_seconds`) the total is what the
lowered program costs, and what the factors of the cost graph add up to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from strategies.core.graph import Operator, Ref, Source, TensorSpec
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.cost.cluster import Cluster
from strategies.cost.collectives import resharding_seconds
from strategies.cost.node_cost import NodeCost
from strategies.cost.problem import Problem
from strategies.cost.resharding_estimate import estimated_seconds
from strategies.cost.resharding_matrix import UNREACHABLE
from strategies.cost.roofline import operator_seconds
from strategies.lowering.lowering import left_axes
from strategies.rules.sharding import Assignment

ReshardingSeconds = Callable[[Layout, Layout, tuple[int, ...], int, Mesh, Cluster], float]
"""Layouts before and after, shape, bytes per element, mesh, cluster -> seconds."""


class PlanCost:
    """Costs of one problem on one cluster; `resharding` estimates the seconds of a resharding."""

    def __init__(self, problem: Problem, cluster: Cluster, resharding: ReshardingSeconds = resharding_seconds) -> None:
        self.problem, self.cluster, self.mesh, self.resharding = problem, cluster, problem.mesh, resharding
        self._resharded: dict[tuple[Layout, Layout, tuple[int, ...], int], float] = {}
        self._rates: dict[tuple[frozenset[str], frozenset[str], int], float] = {}
        self.node_cost = NodeCost(problem, cluster)
        self._leaving: dict[str, list[tuple[int, bool]]] = {}
        for ref in problem.graph.outputs:
            self._leaving.setdefault(ref.id, []).append((ref.index, ref in problem.graph.trained))
        for _, ref in problem.graph.updates:
            self._leaving.setdefault(ref.id, []).append((ref.index, False))

    def resharded(self, before: Layout, after: Layout, spec: TensorSpec) -> float:
        """Seconds to carry a value of `spec` from one layout to another."""
        if before == after:
            return 0.0
        key = before, after, spec.shape, spec.item_bytes
        if key not in self._resharded:
            self._resharded[key] = self.resharding(before, after, spec.shape, spec.item_bytes, self.mesh, self.cluster)
        return self._resharded[key]

    def used(self, have: Layout, wanted: Layout, returned: Layout | None, spec: TensorSpec) -> float:
        """Seconds to carry a value to a use and its gradient back (None: there is none)."""
        back = 0.0 if returned is None else self.returned(returned, have, spec)
        return self.resharded(have, wanted, spec) + back

    def returned(self, returned: Layout, have: Layout, spec: TensorSpec) -> float:
        """Seconds to carry the gradient of a value with the layout `have` back from a use: partial over what `have`
        defers, at least."""
        return self.resharded(returned, have.gradient, spec) if have.deferred <= returned.partial else UNREACHABLE

    def operator(self, operator: Operator, assignment: Assignment) -> float:
        """Seconds of an operator's own work, forward and backward, of what its local program sends, and of results that
        are handed on in another layout."""
        problem, sharding = self.problem, self.problem.shardings[operator.id]
        trained = operator.id in problem.graph.returning
        seconds = operator_seconds(sharding, assignment, operator, problem.graph, self.mesh, self.cluster, trained)
        natural = sharding.result_layouts(assignment)
        for index, handed in enumerate(problem.outputs.get(operator.id, ())):
            spec, have = operator.results[index], natural[index]
            seconds += self.resharded(have, handed, spec)
            if trained and Ref(operator.id, index) in problem.graph.trained:
                seconds += self.resharded(handed.reduced, have.reduced, spec)
        if assignment and self.node_cost.communicates(operator, sharding):
            seconds += self.node_cost.local_communication(operator, sharding, assignment)
        return seconds

    def update(self, stored: Layout, left: frozenset[str], spec: TensorSpec) -> float:
        """Seconds of the update of a trained parameter that has the layout `stored`, its gradient partial over
        `left`."""
        key = left, stored.axes, spec.item_bytes
        elements = stored.local_elements(spec.shape, self.mesh)
        if key not in self._rates:
            self._rates[key] = self.node_cost.parameter_seconds(Layout(stored.dims, left), spec) / max(elements, 1)
        return elements * self._rates[key]

    def leaving(self, operator: Operator, results: Sequence[Layout]) -> float:
        """Seconds to replicate those of an operator's results that leave the graph, and to slice their gradients again;
        `results` are their layouts."""
        seconds = 0.0
        for index, trained in self._leaving.get(operator.id, ()):
            have, spec = results[index], operator.results[index]
            replicated = Layout.replicated(len(spec.shape))
            seconds += self.used(have, replicated, replicated if trained else None, spec)
        return seconds

    def total(self, chosen: Mapping[str, Assignment], tensors: Mapping[Ref, Layout] | None = None) -> float:
        """Seconds of a step with these assignments (by operator). Parameters with several uses have the
        layouts of `tensors`, else those that their first use wants."""
        seconds = 0.0
        for operator in self.problem.graph.operators:
            results = [self.layout(Ref(operator.id, index), chosen) for index in range(len(operator.results))]
            seconds += self.operator(operator, chosen[operator.id]) + self.leaving(operator, results)
        return seconds + sum(self.value(ref, chosen, (tensors or {}).get(ref)) for ref in self.problem.graph.users)

    def value(self, ref: Ref, chosen: Mapping[str, Assignment], stored: Layout | None = None) -> float:
        """Seconds to carry a value to all of its uses and their gradients back; of a parameter, with its update."""
        graph, shardings = self.problem.graph, self.problem.shardings
        source, spec = graph.by_id[ref.id], graph.specs[ref]
        every = [
            (
                shardings[user.id].operand_layouts(chosen[user.id])[position],
                shardings[user.id].gradient_layouts(chosen[user.id])[position]
                if self.has_gradient(ref, user)
                else None,
            )
            for user, position in graph.users[ref]
        ]
        if isinstance(source, Source) and source.kind == "parameter":
            return self.parameter(every, spec, stored)
        have = self.layout(ref, chosen)
        return sum(self.used(have, wanted, returned, spec) for wanted, returned in dict.fromkeys(every))

    def has_gradient(self, ref: Ref, user: Operator) -> bool:
        """Whether a gradient comes back from this use of a value."""
        return ref in self.problem.graph.trained and user.id in self.problem.graph.returning

    def layout(self, ref: Ref, chosen: Mapping[str, Assignment]) -> Layout:
        """The layout of a value that is no parameter."""
        source = self.problem.graph.by_id[ref.id]
        if isinstance(source, Operator):
            return self.problem.result_layout(ref, chosen[ref.id])
        if source.kind == "input":
            return self.problem.inputs[source.name]
        return Layout.replicated(len(source.spec.shape))

    def parameter(
        self, uses: Sequence[tuple[Layout, Layout | None]], spec: TensorSpec, stored: Layout | None = None
    ) -> float:
        """Seconds of a parameter, by the layouts of its uses and of their gradients: it has the layout `stored`, else
        that of its first use. Uses without a gradient share what they want in common; of the others each takes it and
        returns its gradient, which is added over all axes that some use leaves."""
        if not uses:
            return 0.0
        stored, left, seconds = stored or uses[0][0], frozenset[str](), 0.0
        for wanted in dict.fromkeys(wanted for wanted, returned in uses if returned is None):
            seconds += self.resharded(stored, wanted, spec)
        trained = [(wanted, returned) for wanted, returned in uses if returned is not None]
        for wanted, returned in trained:
            partial = left_axes(stored, returned, spec.shape, self.mesh)
            left |= partial
            seconds += self.resharded(stored, wanted, spec) + self.resharded(
                returned, Layout(stored.dims, partial), spec
            )
        return seconds + (self.update(stored, left, spec) if trained else 0.0)


MOST_AXES = 3
"""Axes of a mesh up to which a search is exact and resharding paths are searched for; on more they are estimated."""


def few_axes(mesh: Mesh) -> bool:
    """Whether a mesh has so few axes of more than one rank."""
    return len(mesh.sorted(mesh.names)) <= MOST_AXES


def approximate_cost(problem: Problem, cluster: Cluster) -> PlanCost:
    """The cost that a heuristic search minimises: exact on few axes, else with resharding in closed form."""

    def make() -> PlanCost:
        return PlanCost(problem, cluster) if few_axes(problem.mesh) else PlanCost(problem, cluster, estimated_seconds)

    return problem.once(("cost", cluster), make)
