"""The plans of the matrix: data parallel, a search that starts from strategies on the big products (where none of them
divides, one without), and random."""

from __future__ import annotations

import random
from typing import Literal

from strategies.core.graph import Operator, OperatorGraph
from strategies.core.mesh import Mesh
from strategies.core.plan import Plan
from strategies.core.request import OperatorStrategy, Request
from strategies.planner.planner import make_plan
from strategies.rules import rule_of
from tests.fuzz.plans import random_plan

Mode = Literal["data_parallel", "auto", "random"]
MODES: tuple[Mode, ...] = ("data_parallel", "auto", "random")
PRODUCTS = frozenset("linear matmul mm bmm addmm baddbmm einsum conv1d conv2d conv3d".split())
BIASED = frozenset({"addmm", "baddbmm"})
"""Products whose first operand is the addend."""
BIG = 0.5
"""The configured products have at least this share of the flops of all products."""


def plan_for(graph: OperatorGraph, mode: Mode, world: int = 4, seed: int = 0) -> Plan:
    """The plan of one mode on `world` devices; random ones on a mesh of two axes where that is possible."""
    if mode == "data_parallel":
        return make_plan(graph, Request("data_parallel", world))
    if mode == "auto":
        strategies = seeds(graph, world)
        search = "sharding_propagation" if strategies else "recursive_programming"
        return make_plan(graph, Request("auto", world, search, strategies=strategies))
    shape = (2, world // 2) if world % 2 == 0 and world > 2 else (world,)
    return random_plan(random.Random(seed), graph, Mesh(tuple(zip("ab", shape, strict=False))))


def flops(graph: OperatorGraph, operator: Operator) -> float:
    """Of one operator: its rule's, or (without a rule) an estimate from above, as if all further operands were
    weights of a product with every row of the result."""
    sharding = rule_of(operator, graph)
    if sharding.known:
        return sharding.flops
    specs, result = graph.operand_specs(operator), operator.results[0]
    if operator.op not in PRODUCTS and not any(part in operator.op for part in ("mm", "conv", "lstm", "gru", "rnn")):
        return sharding.flops
    weights = sum(spec.elements for spec in specs[1:] if spec.floating and len(spec.shape) > 1)
    return 2.0 * result.elements / max(result.shape[-1:] or (1,)) * weights


def seeds(graph: OperatorGraph, world: int) -> dict[str, OperatorStrategy]:
    """Strategies for the products with the most flops: columns and rows alternately, as far as they divide."""
    products = [operator for operator in graph.operators if operator.op in PRODUCTS and rule_of(operator, graph).known]
    total, seen = sum(flops(graph, operator) for operator in products), 0.0
    big: set[str] = set()
    for operator in sorted(products, key=lambda operator: -flops(graph, operator)):
        if seen > BIG * total:
            break
        big.add(operator.id)
        seen += flops(graph, operator)
    found: dict[str, OperatorStrategy] = {}
    for operator in products:
        if operator.id in big and (wanted := _cut(graph, operator, world, rows=len(found) % 2 == 1)) is not None:
            found[operator.name] = wanted
    return found


def _cut(graph: OperatorGraph, operator: Operator, world: int, rows: bool) -> OperatorStrategy | None:
    """`world` slices of the weight's columns (a factor that only the second factor of the product and the result have)
    or of its rows (the contraction); of whichever divides."""
    sharding = rule_of(operator, graph)
    begin = 1 if operator.op in BIASED else 0
    if len(sharding.operands) < begin + 2:
        return None
    first, second = sharding.operands[begin : begin + 2]
    columns = [f for f in second if f is not None and f not in first and f not in sharding.sums]
    contracted = [f for f in second if f is not None and f in first and f in sharding.sums]
    wanted = (contracted + columns) if rows else (columns + contracted)
    cut = next((factor for factor in wanted if sharding.sizes[factor] % world == 0), None)
    if cut is None:
        return None
    return OperatorStrategy(tuple(tuple(world if f == cut else 1 for f in dims) for dims in sharding.operands), None)
