"""What a choice costs in seconds: an operator by itself, a value on its way to a use, and a whole plan.

A plan costs the work of every operator, every redistribution forward and backward (once per value and target, as the
engine does it), and the sums of the parameters' gradients. These leave in large buckets while backward still runs, so
they cost by their bytes, and only the share that backward cannot hide. Invariant: for one problem all decisions take
their prices here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from strategies.cost.cluster import Cluster
from strategies.cost.collectives import chain_seconds, collective_seconds
from strategies.cost.operators import operator_seconds
from strategies.graph import Operator, Ref, Source, TensorSpec
from strategies.layout import Layout
from strategies.mesh import Mesh
from strategies.redistribution import ALL_REDUCE, chain
from strategies.rules.sharding import Assignment
from strategies.search.problem import Problem

Moving = Callable[[Layout, Layout, tuple[int, ...], int, Mesh, Cluster], float]
"""Layouts before and after, shape, bytes per element, mesh, cluster -> seconds."""
BUCKET = 25 * 2**20
"""Bytes of one all-reduce of gradients."""


def engine_seconds(
    before: Layout, after: Layout, shape: tuple[int, ...], item_bytes: int, mesh: Mesh, cluster: Cluster
) -> float:
    """Seconds of the chain that the engine runs."""
    return chain_seconds(chain(before, after, shape, mesh), item_bytes, mesh, cluster)


class Pricing:
    """Prices of one problem on one cluster; `moving` says what a redistribution takes."""

    def __init__(self, problem: Problem, cluster: Cluster, moving: Moving = engine_seconds) -> None:
        self.problem, self.cluster, self.mesh, self.moving = problem, cluster, problem.mesh, moving
        self._moves: dict[tuple[Layout, Layout, tuple[int, ...], int], float] = {}
        self._rates: dict[tuple[str, ...], float] = {}

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
        """Seconds of an operator's own work, forward and backward."""
        problem = self.problem
        sharding = problem.shardings[operator.id]
        return operator_seconds(sharding, assignment, operator, problem.graph, self.mesh, self.cluster, True)

    def added(self, held: Layout, left: tuple[str, ...], spec: TensorSpec) -> float:
        """Seconds for which a step waits until the gradient of a parameter that lies like `held` is added over the
        axes `left`."""
        if not left:
            return 0.0
        if left not in self._rates:
            ranks = self.mesh.product(left)
            sent = 2 * BUCKET * (ranks - 1) / ranks
            self._rates[left] = collective_seconds(ALL_REDUCE, sent, left, self.mesh, self.cluster) / BUCKET
        size = math.prod(held.local_shape(spec.shape, self.mesh)) * max(spec.item_bytes, 4)
        return size * self._rates[left] * (1 - self.cluster.overlap)

    def total(self, chosen: Mapping[str, Assignment]) -> float:
        """Seconds of a step with these assignments (by operator)."""
        work = sum(self.worked(operator, chosen[operator.id]) for operator in self.problem.graph.operators)
        return work + sum(self.carried(ref, chosen) for ref in self.problem.graph.users)

    def carried(self, ref: Ref, chosen: Mapping[str, Assignment]) -> float:
        """Seconds to carry a value to all of its uses and their gradients back; of a parameter, with adding these."""
        graph, shardings = self.problem.graph, self.problem.shardings
        source, spec = graph.by_id[ref.id], graph.specs[ref]
        learns = ref in graph.trained
        ways = dict.fromkeys(
            (
                shardings[user.id].operand_layouts(chosen[user.id])[position],
                shardings[user.id].gradient_layouts(chosen[user.id])[position] if learns else None,
            )
            for user, position in graph.users[ref]
        )
        if isinstance(source, Source) and source.kind == "parameter":
            return self.parameter(list(ways), spec)
        have = self.layout(ref, chosen)
        return sum(self.used(have, wanted, returned, spec) for wanted, returned in ways)

    def layout(self, ref: Ref, chosen: Mapping[str, Assignment]) -> Layout:
        """How a value that is no parameter lies."""
        source = self.problem.graph.by_id[ref.id]
        if isinstance(source, Operator):
            return self.problem.result_layout(ref, chosen[ref.id])
        if source.kind == "input":
            return self.problem.inputs[source.name]
        return Layout.replicated(len(source.spec.shape))

    def parameter(self, ways: list[tuple[Layout, Layout | None]], spec: TensorSpec) -> float:
        """Seconds of a parameter that is used in these ways: it lies as the first wants it; its gradient is added over
        all axes that a use leaves."""
        if not ways:
            return 0.0
        held, left, seconds = ways[0][0], set[str](), 0.0
        for wanted, returned in ways:
            seconds += self.moved(held, wanted, spec)
            if returned is not None:
                open_ = returned.partial & frozenset(held.replica_axes(self.mesh))
                left |= open_
                seconds += self.moved(Layout(returned.dims, returned.partial - open_), held, spec)
        return seconds + self.added(held, self.mesh.sorted(left), spec)
