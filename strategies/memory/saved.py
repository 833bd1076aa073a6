"""Which results stay in memory for backward: what torch's autograd saves, by the traits of operators.

Behind a view lies what it shows. Invariant: nothing runs; `strategies.memory.trace` counts exactly, for one plan at a
time.
"""

from __future__ import annotations

from strategies.core.graph import Operator, OperatorGraph, Ref
from strategies.rules.traits import traits


def saved(graph: OperatorGraph) -> frozenset[Ref]:
    """The results of operators that stay for backward; of views what they show, so none of a view itself."""
    found: set[Ref] = set()
    for operator in reversed(graph.operators):
        for index in range(len(operator.results)):
            ref = Ref(operator.id, index)
            by_itself = operator.id in graph.returning and traits(operator.op).saves_result(index)
            if by_itself or any(_saves(user, position, found, graph) for user, position in graph.users[ref]):
                found.add(ref)
    views = {operator.id for operator in graph.operators if traits(operator.op).view}
    return frozenset(ref for ref in found if ref.id not in views)


def _saves(user: Operator, position: int, found: set[Ref], graph: OperatorGraph) -> bool:
    """Whether a user keeps its operand: for its own gradient, or as a view of which others keep something."""
    if traits(user.op).view:
        return any(Ref(user.id, index) in found for index in range(len(user.results)))
    return user.id in graph.returning and saves_operand(graph, user, position)


def saves_operand(graph: OperatorGraph, user: Operator, position: int) -> bool:
    """Whether the gradients of an operator need its operand at `position`."""
    return traits(user.op).saves_operand(position, [ref in graph.trained for ref in user.operands])
