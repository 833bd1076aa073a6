"""Sharding rules. `rule_of(operator, graph)` is the only entrance.

`table` holds every rule that is a line of factor notation; an operator family that needs a local program (an offset, a
mask, a count) has a file. Operators without a rule run replicated on every rank, and plans report them. `traits` says
all other properties of an operator by its name.
"""

from __future__ import annotations

import pkgutil
import weakref
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module

from strategies.core.graph import Operator, OperatorGraph, TensorSpec
from strategies.rules.declared import rule_of_lines
from strategies.rules.packed import in_sections
from strategies.rules.random import draw_replicated, draws
from strategies.rules.registry import RULES
from strategies.rules.sharding import Sharding, replicated

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")


_known: dict[int, dict[int, tuple[Operator, Sharding]]] = {}
"""Shardings by graph and operator, as long as the graph lives."""


def rule_of(operator: Operator, graph: OperatorGraph) -> Sharding:
    """The sharding of `operator`; without factors if no rule knows it, or its rule does not cover this form of call."""
    known, key = _of_graph(graph), id(operator)
    if (entry := known.get(key)) is None:
        found = sharding_of(operator, graph.operand_specs(operator))
        # backward of torch's operators is linear; a function of the user's may clip its gradient
        defers = operator.id in graph.from_parameters and operator.target.startswith("aten.")
        entry = known[key] = operator, replace(found, defers=True) if defers else found
    return entry[1]


def share_rules(part: OperatorGraph, graph: OperatorGraph) -> None:
    """Let `part` know the shardings of the operators that it has from `graph`, with the same operands."""
    known, shared = _of_graph(part), _of_graph(graph)
    known.update((id(operator), shared[id(operator)]) for operator in part.operators if id(operator) in shared)


def _of_graph(graph: OperatorGraph) -> dict[int, tuple[Operator, Sharding]]:
    key = id(graph)
    if (known := _known.get(key)) is None:
        known = _known[key] = {}
        weakref.finalize(graph, _known.pop, key, None)
    return known


def sharding_of(operator: Operator, specs: Sequence[TensorSpec]) -> Sharding:
    """The sharding of an operator, as `rule_of` gives it, in no graph and with operands of these shapes."""
    rule = rule_of_lines(operator.lines) if operator.lines else RULES.get(operator.op)
    found = rule(operator, specs) if rule else None
    found = found or replicated(operator, specs, draw_replicated if draws(operator) else None)
    return in_sections(operator, specs, found) if any(one.packed for one in (*specs, *operator.results)) else found
