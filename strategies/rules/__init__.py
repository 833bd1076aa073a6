"""Sharding rules, one operator family per file. `rule_of(operator, graph)` is the only entrance.

A rule is a function (operator, operand specs) -> Sharding, registered for torch operator names (without overload).
Adding an operator = adding its name to a rule, or a rule, and a case to tests/strategies/rules. Operators without a
rule run on whole tensors on every rank, and plans report them.
"""

from __future__ import annotations

import weakref

from strategies.core.graph import Operator, OperatorGraph
from strategies.rules import attention as attention_rules
from strategies.rules import batch_norm as batch_norm_rules
from strategies.rules import (
    class_losses,
    convolution,
    einsum,
    experts,
    factories,
    indexing,
    linalg,
    losses,
    matmul,
    normalization,
    pointwise,
    pooling,
    random,
    recurrent,
    reductions,
    resampling,
    sampling,
    scans,
    selections,
    special,
    spectral,
    vectors,
    views,
    writing,
)
from strategies.rules import concatenation as joins
from strategies.rules import embedding as embedding_rules
from strategies.rules.registry import RULES
from strategies.rules.sharding import Sharding, whole

FAMILIES = (
    pointwise,
    matmul,
    views,
    selections,
    reductions,
    normalization,
    embedding_rules,
    losses,
    class_losses,
    einsum,
    factories,
    indexing,
    writing,
    experts,
    joins,
    scans,
    special,
    spectral,
    linalg,
    vectors,
    random,
    batch_norm_rules,
    attention_rules,
    convolution,
    pooling,
    resampling,
    recurrent,
    sampling,
)


_known: dict[int, dict[int, tuple[Operator, Sharding]]] = {}
"""What rules have told, by graph and operator, as long as the graph lives."""


def rule_of(operator: Operator, graph: OperatorGraph) -> Sharding:
    """The sharding of `operator`; whole tensors if no rule knows it (or its rule does not cover this form of call)."""
    told = _told(graph)
    if id(operator) not in told:
        told[id(operator)] = operator, _rule_of(operator, graph)
    return told[id(operator)][1]


def share_rules(part: OperatorGraph, graph: OperatorGraph) -> None:
    """Let `part` know the shardings of the operators that it has from `graph`, with the same operands."""
    known, told = _told(part), _told(graph)
    known.update((id(operator), told[id(operator)]) for operator in part.operators if id(operator) in told)


def _told(graph: OperatorGraph) -> dict[int, tuple[Operator, Sharding]]:
    if id(graph) not in _known:
        _known[id(graph)] = {}
        weakref.finalize(graph, _known.pop, id(graph), None)
    return _known[id(graph)]


def _rule_of(operator: Operator, graph: OperatorGraph) -> Sharding:
    specs = graph.operand_specs(operator)
    rule = RULES.get(operator.op)
    found = rule(operator, specs) if rule else None
    if found is None:
        return whole(operator, specs, random.draw_whole if random.draws(operator) else None)
    return found
