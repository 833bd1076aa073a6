"""Seconds of one operator on one rank: a roofline of flops and bytes, forward and backward, from its rule alone.

Invariant: what is priced is the rank's own slice, padding included, so a strategy that repeats work on every rank is
not cheaper than the operator on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from strategies.core.graph import Operator, OperatorGraph
from strategies.core.mesh import Mesh
from strategies.core.plan import Plan
from strategies.cost.cluster import Cluster
from strategies.rules import rule_of
from strategies.rules.sharding import Assignment, Dims, Sharding
from strategies.rules.traits import traits


@dataclass(frozen=True)
class Work:
    """Seconds of one rank for one micro-batch; `calls` is the part of both that begins calls, whatever they compute."""

    forward: float
    backward: float
    calls: float


def operator_seconds(
    sharding: Sharding,
    assignment: Assignment,
    operator: Operator,
    graph: OperatorGraph,
    mesh: Mesh,
    cluster: Cluster,
    trained: bool,
) -> float:
    """Seconds of forward and, if `trained`, backward of the slice of one rank."""
    work = operator_work(sharding, assignment, operator, graph, mesh, cluster)
    return work.forward + (work.backward if trained else 0.0)


def operator_work(
    sharding: Sharding, assignment: Assignment, operator: Operator, graph: OperatorGraph, mesh: Mesh, cluster: Cluster
) -> Work:
    """The seconds of both ways; backward is 0 where no operand has a gradient."""
    return Work(*roofline(sharding, shares(sharding, assignment, mesh), operator, graph, cluster, max))


def roofline(
    sharding: Sharding,
    share: Mapping[str, Any],
    operator: Operator,
    graph: OperatorGraph,
    cluster: Cluster,
    larger: Callable[[Any, Any], Any],
) -> tuple[Any, Any, Any]:
    """The three seconds of `Work` where a rank has so much of every factor (1 where it is not told): numbers, or arrays
    of as many strategies; `larger` takes the larger one of each two."""
    learns = [ref in graph.trained for ref in operator.operands]
    if traits(operator.op).view:
        return cluster.view, cluster.view * any(learns), cluster.view * (1 + any(learns))
    flops: Any = sharding.flops
    for part in share.values():
        flops = flops * part
    operands = [
        _local(dims, share) * spec.elements * spec.item_bytes
        for dims, spec in zip(sharding.operands, graph.operand_specs(operator), strict=True)
    ]
    results = sum(
        _local(dims, share) * spec.elements * spec.item_bytes
        for dims, spec in zip(sharding.results, operator.results, strict=True)
    )
    dtype = next((spec.dtype for spec in operator.results if spec.floating), "float32")
    peak, bandwidth = cluster.peak(dtype), cluster.memory_bandwidth
    forward = cluster.launch + larger(flops / peak, (sum(operands) + results) / bandwidth)
    if not any(learns):
        return forward, 0.0, cluster.launch
    own = sum(size for size, learn in zip(operands, learns, strict=True) if learn)
    moved = results + own + (sum(operands) if traits(operator.op).rereads else 0.0)
    calls, ratio = backward_work(sharding, operator, learns)
    backward = calls * cluster.launch + larger(ratio * flops / peak, moved / bandwidth)
    return forward, backward, (1 + calls) * cluster.launch


def backward_work(sharding: Sharding, operator: Operator, learns: list[bool]) -> tuple[int, float]:
    """How many calls backward makes, and its flops relative to forward's: a product per factor of a product that
    learns."""
    fused = traits(operator.op).backward_products
    if fused is not None:
        return 1, fused
    products = sum(
        learn and any(factor in sharding.sums for factor in dims)
        for learn, dims in zip(learns, sharding.operands, strict=True)
    )
    others = sum(learns) - products
    return max(products + (others > 0), 1), float(products or (2 if sharding.flops else 0))


def shares(sharding: Sharding, assignment: Assignment, mesh: Mesh) -> dict[str, float]:
    """The share of every sliced factor that one rank has, padding included."""
    found = {}
    for factor, axes in assignment.items():
        size = sharding.sizes[factor]
        found[factor] = -(-size // mesh.product(axes)) / size if size else 1.0
    return found


def _local(dims: Dims, share: Mapping[str, Any]) -> Any:
    found: Any = 1.0
    for factor in dims:
        if factor is not None:
            found = found * share.get(factor, 1.0)
    return found


def flops_of(graph: OperatorGraph, plan: Plan) -> dict[str, float]:
    """Flops of each operator's slice in forward, by name."""
    found = {}
    for operator in graph.operators:
        sharding, assignment = rule_of(operator, graph), plan.operators[operator.name].assignment
        found[operator.name] = sharding.flops / plan.mesh.product(sharding.used(assignment))
    return found
