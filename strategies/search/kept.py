"""Bytes that a rank keeps under a plan: parameters with their gradients and optimizer states, and results that stay for
backward.

Invariant: the exact search adds up the same bytes from its tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from strategies.core.errors import TooLarge
from strategies.core.graph import Operator, Ref
from strategies.core.layout import Layout
from strategies.cost.step import MASTER
from strategies.memory.limit import in_words
from strategies.rules.sharding import Assignment
from strategies.search.problem import Problem


def parameter_bytes(problem: Problem, layout: Layout, ref: Ref) -> float:
    """Bytes per element that a rank keeps of a parameter, its gradient and the optimizer's states."""
    spec = problem.graph.specs[ref]
    replicas = problem.mesh.product(layout.replica_axes(problem.mesh))
    parts = [replicas if problem.stage >= stage else 1 for stage in (3, 2, 1)]
    if ref not in problem.graph.trained:
        return spec.item_bytes / parts[0]
    masters = MASTER if spec.item_bytes < MASTER else 0
    gradient = max(spec.item_bytes, MASTER) if problem.stage > 1 else spec.item_bytes  # then they are added in fp32
    states = max(spec.item_bytes, MASTER) * problem.states + masters
    return spec.item_bytes / parts[0] + gradient / parts[1] + states / parts[2]


def operator_bytes(problem: Problem, operator: Operator, assignment: Assignment) -> float:
    """Of an operator's results, and of the parameters of which it is the first user: they lie as it wants them."""
    graph, sharding, found = problem.graph, problem.shardings[operator.id], 0.0
    given = problem.outputs.get(operator.id) or sharding.result_layouts(assignment)
    for index, (layout, spec) in enumerate(zip(given, operator.results, strict=True)):
        if Ref(operator.id, index) in problem.stored:
            found += math.prod(layout.local_shape(spec.shape, problem.mesh)) * spec.item_bytes
    wanted = sharding.operand_layouts(assignment)
    for position, ref in enumerate(operator.operands):
        node = graph.by_id[ref.id]
        if isinstance(node, Operator) or node.kind != "parameter":
            continue
        user, at = graph.users[ref][0]
        if user.id == operator.id and at == position:
            elements = math.prod(wanted[position].local_shape(node.spec.shape, problem.mesh))
            found += elements * parameter_bytes(problem, wanted[position], ref)
    return found


def plan_bytes(problem: Problem, chosen: Mapping[str, Assignment]) -> float:
    """Of all operators, by their assignments."""
    return sum(operator_bytes(problem, operator, chosen[operator.id]) for operator in problem.graph.operators)


def too_large(limit: float, smallest: float) -> TooLarge:
    """The error where no plan keeps the limit."""
    return TooLarge(
        "MW502",
        f"parallel.memory_limit = {in_words(int(limit))} per rank, but no plan was found that keeps it: the smallest "
        f"needs {in_words(int(smallest))}. Use more ranks, a higher parallel.zero.stage, smaller batches, or a larger "
        "limit.",
        smallest,
    )
