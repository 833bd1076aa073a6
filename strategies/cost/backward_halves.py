"""Which part of a stage's backward computes gradients of parameters, which nothing waits for.

The split is that of `strategies.runtime.split_backward`: an operator between a received value and the loss computes the
gradient of its parameters apart if that is a product of its own, and operators that only parameters lead to run later.
Invariant: a stage that receives no value with a gradient has nothing that could wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from strategies.core.graph import Operator, OperatorGraph, Ref
from strategies.cost.roofline import Work
from strategies.rules import rule_of
from strategies.rules.traits import traits


def weight_seconds(graph: OperatorGraph, works: Sequence[Work]) -> float:
    """Seconds of the weight-gradient pass of one micro-batch; `works` are those of the operators, in their order."""
    along = {source.id for source in graph.of_kind("input") if source.trainable}
    if not along:
        return 0.0
    seconds = 0.0
    for operator, work in zip(graph.operators, works, strict=True):
        if along.isdisjoint(ref.id for ref in operator.operands):
            seconds += work.backward
            continue
        along.add(operator.id)
        seconds += work.backward * _share(operator, graph, along)
    return seconds


def _share(operator: Operator, graph: OperatorGraph, along: set[str]) -> float:
    """The share of the products of backward that parameters need."""
    if traits(operator.op).backward_products is not None:
        return 0.0
    rule = rule_of(operator, graph)

    def is_product(ref: Ref, position: int) -> bool:
        return ref in graph.trained and any(factor in rule.sums for factor in rule.operands[position])

    products = [ref for position, ref in enumerate(operator.operands) if is_product(ref, position)]
    return sum(ref.id not in along for ref in products) / len(products) if products else 0.0
