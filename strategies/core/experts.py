"""Modules of experts: each row is multiplied by the matrices of the experts to which it was routed.

Such a module has a matrix for every expert in one parameter, and a grouped product of its rows, sorted by expert. What
it returns for a row follows from that row alone, since the order of before is restored.
"""

from __future__ import annotations

from collections.abc import Sequence

from strategies.core.graph import Operator, OperatorGraph, Ref, Source

GROUPED = ("_grouped_mm", "transformers::grouped_mm_fallback")
"""Products of rows with the matrices of their experts: (rows, matrices, ends of every expert's rows)."""
RESHAPED = ("contiguous", "to", "transpose")
"""What comes before, with the experts still in dim 0."""
LINEAR = (*RESHAPED, *"flatten index index_select mul permute reshape squeeze sum unsqueeze view".split())
"""Of a partial sum and complete values they make a partial sum."""


def experts(graph: OperatorGraph) -> dict[str, tuple[Source, ...]]:
    """The parameters of every module that has experts, by its path: all have the experts in dim 0."""
    found = {}
    for operator in graph.operators:
        if operator.op not in GROUPED or operator.module in found:
            continue
        matrices, prefix = parameter_of(graph, operator.operands[1]), f"{operator.module}."
        own = tuple(source for source in graph.of_kind("parameter") if source.name.startswith(prefix))
        count = graph.specs[operator.operands[1]].shape[:1]
        if matrices in own and all(source.spec.shape[:1] == count for source in own):
            found[operator.module] = own
    return found


def matrices_of(graph: OperatorGraph) -> dict[str, tuple[Source, ...]]:
    """The parameters, by path, of every module whose parameters are all matrices by expert, without biases, and which
    returns a linear function of its last products."""
    found: dict[str, list[Source]] = {}
    for source in graph.of_kind("parameter"):
        found.setdefault(source.name.rpartition(".")[0], []).append(source)
    return {
        path: tuple(own)
        for path, own in found.items()
        if len(own) > 1 and {len(one.spec.shape) for one in own} == {3} and len({one.spec.shape[0] for one in own}) == 1
        if last_products(path, own, graph)
    }


def last_products(path: str, own: Sequence[Source], graph: OperatorGraph) -> frozenset[str]:
    """The ids of the last products of a module with its parameters, where it returns a linear function of them, so that
    their partial sums may be added up there; else none."""
    inside = [one for one in graph.operators if f"{one.module}.".startswith(f"{path}.")]
    products = {one.id for one in inside if one.op not in RESHAPED and _takes(one, own, graph)}
    behind: dict[str, frozenset[str]] = {}  # by operator, the products on whose results it depends
    for one in inside:
        before = (behind.get(ref.id, frozenset()) for ref in one.operands)
        behind[one.id] = frozenset().union(*before, {one.id} & products)
    last = products.difference(*(behind[one] - {one} for one in products))
    for one in inside:
        if one.id not in last and behind[one.id] & last:
            partial = [ref for ref in one.operands if behind.get(ref.id, frozenset()) & last]
            if one.op not in LINEAR or len(partial) > 1:
                return frozenset()
    return frozenset(last)


def _takes(operator: Operator, own: Sequence[Source], graph: OperatorGraph) -> bool:
    return any(parameter_of(graph, ref) in own for ref in operator.operands)


def parameter_of(graph: OperatorGraph, ref: Ref) -> Source | None:
    """The parameter that a value is, or is made of by `RESHAPED`."""
    node = graph.by_id[ref.id]
    while isinstance(node, Operator) and node.op in RESHAPED:
        node = graph.by_id[node.operands[0].id]
    return node if isinstance(node, Source) and node.kind == "parameter" else None
