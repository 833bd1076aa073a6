"""Which results stay in memory for backward: what torch's autograd saves, told from operators' names.

A product saves an operand if another one learns; some operators save their result (`OWN`) and nothing else
(`ONLY_OWN`); sums save nothing; whatever is not known saves its operands. Behind a view lies what it shows. Invariant:
nothing runs; `strategies.memory.trace` counts exactly, for one plan at a time.
"""

from __future__ import annotations

from strategies.core.graph import Operator, OperatorGraph, Ref
from strategies.cost.roofline import LINEAR, VIEWS

ONLY_OWN = frozenset("dropout exp log_softmax native_dropout relu rsqrt sigmoid softmax sqrt tanh".split())
"""Operators whose gradients need their result (or a mask as large) alone."""
OWN = ONLY_OWN | {"scaled_dot_product_attention"}
PRODUCTS = frozenset("addmm baddbmm bmm conv1d conv2d conv3d div einsum linear matmul mm mul".split())
"""Operators that are linear in each operand."""
STILL = LINEAR | {"clone", "contiguous", "copy", "to", "type_as"}
"""Operators whose gradients need nothing."""


def saved(graph: OperatorGraph) -> frozenset[Ref]:
    """The results of operators that stay for backward; of views what they show, so none of a view itself."""
    found: set[Ref] = set()
    for operator in reversed(graph.operators):
        for index in range(len(operator.results)):
            ref = Ref(operator.id, index)
            by_itself = operator.op in OWN and operator.id in graph.returning
            if by_itself or any(_saves(user, position, found, graph) for user, position in graph.users[ref]):
                found.add(ref)
    views = {operator.id for operator in graph.operators if operator.op in VIEWS}
    return frozenset(ref for ref in found if ref.id not in views)


def _saves(user: Operator, position: int, found: set[Ref], graph: OperatorGraph) -> bool:
    """Whether a user keeps its operand: for its own gradient, or as a view of which others keep something."""
    if user.op in VIEWS:
        return any(Ref(user.id, index) in found for index in range(len(user.results)))
    if user.id not in graph.returning or user.op in ONLY_OWN or user.op in STILL:
        return False
    if user.op in PRODUCTS:
        others = [ref for at, ref in enumerate(user.operands) if at != position]
        return any(ref in graph.trained for ref in others)
    return True
