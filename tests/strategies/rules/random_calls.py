"""Calls of every operator with a rule, as the fuzzer generates them: random shapes and arguments."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from torch import Tensor

from strategies.core.graph import Operator, OperatorGraph, Ref
from strategies.rules import RULES
from tests.fuzz.generators import GENERATORS
from tests.fuzz.pool import Pool

OPERATORS = sorted(GENERATORS.keys() & RULES.keys())
CALLS = 2


@dataclass(frozen=True)
class Call:
    """`operator` in a graph whose outputs are its results; `values` are its operands, `sources` those of the graph."""

    operator: Operator
    graph: OperatorGraph
    values: tuple[Tensor, ...]
    sources: Mapping[str, Tensor]


@cache
def calls(name: str, count: int = CALLS) -> tuple[Call, ...]:
    """Up to `count` calls of an operator."""
    found: list[Call] = []
    for seed in range(6 * count):
        pool = Pool(random.Random(7919 * seed + 13))
        if not pool.attempt(lambda pool: GENERATORS[name](pool, name)):
            continue
        for operator in pool.operators:
            if operator.op == name and len(found) < count:
                graph = pool.graph([Ref(operator.id, index) for index in range(len(operator.results))])
                values = tuple(pool.values[ref] for ref in operator.operands)
                sources = {source.name: pool.values[Ref(source.id)] for source in pool.sources}
                found.append(Call(operator, graph, values, sources))
    return tuple(found)
