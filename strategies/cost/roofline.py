"""Seconds of one operator on one rank: a roofline of flops and bytes, forward and backward, from its rule alone, or so
many times the roofline where the machine's description knows the operator.

Invariant: the cost is that of the rank's own slice, padding included, so a strategy that repeats work on every rank is
not cheaper than the operator on one device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strategies.core.graph import Operator, OperatorGraph, TensorSpec
from strategies.core.mesh import Mesh
from strategies.core.plan import Plan
from strategies.cost.cluster import Cluster, Pace
from strategies.rules import rule_of
from strategies.rules.sharding import DEFERRED, Assignment, Dims, Sharding
from strategies.rules.traits import traits


@dataclass(frozen=True)
class Work:
    """Seconds of one rank for one micro-batch; `calls` is the part of both directions that kernel launches take."""

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
    """The seconds of both directions; backward is 0 where no operand has a gradient."""
    return Work(*roofline(sharding, shares(sharding, assignment, mesh), operator, graph, cluster, max))


def roofline(
    sharding: Sharding,
    share: Mapping[str, Any],
    operator: Operator,
    graph: OperatorGraph,
    cluster: Cluster,
    larger: Callable[[Any, Any], Any],
) -> tuple[Any, Any, Any]:
    """The three seconds of `Work`, for one strategy or for many at once.

    Args:
        sharding: The operator's rule.
        share: The share of every factor that a rank has, 1 where it is absent: numbers, or arrays [strategies].
        operator: The operator.
        graph: Its graph.
        cluster: The machine.
        larger: The larger one of each two: `max`, or numpy's `maximum`.
    """
    trained = [ref in graph.trained for ref in operator.operands]
    if traits(operator.op).view:
        return cluster.view, cluster.view * any(trained), cluster.view * (1 + any(trained))
    ahead, paces = forward_pace(operator, cluster), cluster.operators.get(operator.op)
    flops: Any = math.prod(share.values(), start=sharding.flops)
    operands = _local_bytes(sharding.operands, graph.operand_specs(operator), share)
    results = sum(_local_bytes(sharding.results, operator.results, share))
    peak, bandwidth = cluster.peak(result_dtype(operator)), cluster.memory_bandwidth
    forward = ahead.call + ahead.factor * larger(flops / peak, (sum(operands) + results) / bandwidth)
    if not any(trained):
        return forward, 0.0, ahead.call
    gradients = sum(size for size, learns in zip(operands, trained, strict=True) if learns)
    moved = results + gradients + (sum(operands) if traits(operator.op).rereads else 0.0)
    calls, ratio = backward_work(sharding, operator, trained)
    back = Pace(calls * cluster.launch, 1.0) if paces is None else paces[1]
    backward = back.call + back.factor * larger(ratio * flops / peak, moved / bandwidth)
    return forward, backward, ahead.call + back.call


def forward_pace(operator: Operator, cluster: Cluster) -> Pace:
    """The pace of an operator's forward; a view has no work."""
    if traits(operator.op).view:
        return Pace(cluster.view, 1.0)
    paces = cluster.operators.get(operator.op)
    return Pace(cluster.launch, 1.0) if paces is None else paces[0]


def result_dtype(operator: Operator) -> str:
    """The dtype in which an operator computes."""
    return next((spec.dtype for spec in operator.results if spec.floating), "float32")


def backward_work(sharding: Sharding, operator: Operator, trained: list[bool]) -> tuple[int, float]:
    """The calls of backward, and its flops relative to forward's: a product per factor of a product that has a
    gradient; `trained` says which operands have one."""
    fused = traits(operator.op).backward_products
    if fused is not None:
        return 1, fused
    products = sum(
        learns and any(factor in sharding.sums for factor in dims)
        for learns, dims in zip(trained, sharding.operands, strict=True)
    )
    others = sum(trained) - products
    return max(products + (others > 0), 1), float(products or (2 if sharding.flops else 0))


def shares(sharding: Sharding, assignment: Assignment, mesh: Mesh) -> dict[str, float]:
    """The share of every sliced factor that one rank has, padding included."""
    share = {}
    for factor, axes in assignment.items():
        if factor == DEFERRED:
            continue
        size, count = sharding.sizes[factor], mesh.product(axes)
        if mesh.share is not None and mesh.share.axis in axes:
            share[factor] = float(1 / mesh.parts(axes))
            continue
        size = size if size % count == 0 else max(sharding.lengths_of(factor))
        share[factor] = -(-size // count) / size if size else 1.0
    return share


def _local_bytes(tensors: Sequence[Dims], specs: Sequence[TensorSpec], share: Mapping[str, Any]) -> list[Any]:
    """Bytes of a rank's slices."""
    return [
        math.prod((share.get(factor, 1.0) for factor in dims if factor), start=1.0) * spec.elements * spec.item_bytes
        for dims, spec in zip(tensors, specs, strict=True)
    ]


def flops_of(graph: OperatorGraph, plan: Plan) -> dict[str, float]:
    """Flops of each operator's slice in forward, by name."""
    flops = {}
    for operator in graph.operators:
        sharding, assignment = rule_of(operator, graph), plan.operators[operator.name].assignment
        flops[operator.name] = sharding.flops / plan.mesh.product(sharding.used(assignment))
    return flops
