"""Values computed from parameters alone, or replicated, as their users take them, where a rule and no search decides.

The gradient of a value computed from parameters is partial where its users are sliced. Added there, it takes a
collective of its own; with the parameter's, it takes a part of a bucket. From the last operator to the first, each is
sliced along dims that all users slice, and defers what all users return as partial sums, together with the operators
that it is computed from or else alone, if that takes no longer. Searches that compare candidates find this by
themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from strategies.core.graph import Operator, Ref
from strategies.cost.cluster import Cluster
from strategies.cost.plan_cost import PlanCost, approximate_cost
from strategies.cost.problem import Problem
from strategies.rules.sharding import DEFERRED, Assignment

EQUAL = 1e-9
"""Relative difference below which seconds are equal."""
MOST_TOGETHER = 100
"""Operators that are decided together at most."""


def deferred(problem: Problem, cluster: Cluster, chosen: Mapping[str, Assignment]) -> dict[str, Assignment]:
    """The assignments `chosen`, by operator id, with deferred reductions where no strategy is configured."""
    cost, made = approximate_cost(problem, cluster), dict(chosen)
    movable = {
        operator.id: operator
        for operator in problem.graph.operators
        if operator.id not in problem.fixed and (problem.shardings[operator.id].defers or not chosen[operator.id])
    }
    order = {id: place for place, id in enumerate(movable)}
    for id, operator in reversed(movable.items()):
        if _as_used(problem, operator, made) == made[id]:
            continue
        for group in (sorted(_origins(operator, movable), key=lambda one: -order[one.id]), [operator]):
            other = dict(made)
            for one in group:
                other[one.id] = _as_used(problem, one, other)
            if _around(cost, group, other) <= _around(cost, group, made) * (1 + EQUAL):
                made = other
                break
    return made


def _origins(operator: Operator, movable: Mapping[str, Operator]) -> list[Operator]:
    """An operator and the `movable` ones that it is computed from by these alone, the nearest `MOST_TOGETHER`."""
    origins = {operator.id: operator}
    for one in (queue := [operator]):
        near = {ref.id: movable[ref.id] for ref in one.operands if ref.id in movable and ref.id not in origins}
        if len(origins) + len(near) > MOST_TOGETHER:
            break
        origins |= near
        queue += near.values()
    return queue


def _as_used(problem: Problem, operator: Operator, chosen: Mapping[str, Assignment]) -> Assignment:
    """The assignment of an operator that follows its users."""
    graph, mesh, sharding = problem.graph, problem.mesh, problem.shardings[operator.id]
    assignment = {factor: axes for factor, axes in chosen[operator.id].items() if factor != DEFERRED}
    free = frozenset(mesh.names) - {axis for axes in assignment.values() for axis in axes}
    partial = free
    for index, dims in enumerate(sharding.results):
        ref = Ref(operator.id, index)
        uses = [(problem.shardings[user.id], chosen[user.id], position) for user, position in graph.users[ref]]
        wanted = {rule.operand_layouts(one)[position] for rule, one, position in uses}
        for factor, places in zip(dims, zip(*(layout.dims for layout in wanted), strict=True), strict=False):
            axes = places[0]
            if factor is None or factor in assignment or not axes or {axes} != {*places} or not free.issuperset(axes):
                continue
            if sharding.divides(factor, mesh.product(axes)):
                assignment[factor], free = axes, free.difference(axes)
        if ref in graph.trained:
            returning = [
                rule.gradient_layouts(one)[position].partial
                for (rule, one, position), (user, _) in zip(uses, graph.users[ref], strict=True)
                if user.id in graph.returning
            ]
            partial = partial.intersection(*returning) if returning else frozenset()
    left = mesh.sorted(partial & free) if sharding.defers else ()
    return {**assignment, DEFERRED: left} if left else assignment


def _around(cost: PlanCost, group: Sequence[Operator], chosen: Mapping[str, Assignment]) -> float:
    """Seconds of operators, their operands and their results."""
    results = [Ref(one.id, index) for one in group for index in range(len(one.results))]
    values = dict.fromkeys([*results, *(ref for one in group for ref in one.operands)])
    seconds = sum(cost.operator(one, chosen[one.id]) for one in group)
    return seconds + sum(cost.value(ref, chosen) for ref in values)
