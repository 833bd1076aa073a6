"""The predicted performance of a plan on its cluster: speed, the bottleneck, and what would make it faster or make it
fit.

What-ifs estimate the same plan on a machine with one rate doubled. Invariant: everything is derived from plan, program
and cluster; nothing is measured.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from runner.planning.estimate import Estimate, StageEstimate
from runner.report.text import CALLS
from strategies.core.graph import Operator, Ref, Source
from strategies.core.mesh import Mesh
from strategies.core.request import RecomputeRequest
from strategies.cost.by_operator import OperatorCost, operator_costs
from strategies.cost.cluster import Cluster, Level, Link
from strategies.cost.roofline import backward_work
from strategies.cost.server import served
from strategies.cost.step import step_cost
from strategies.lowering.recompute import recomputed, repeated_layers
from strategies.memory.parts import memory
from strategies.memory.repeated_blocks import trace_repeated
from strategies.planner.description import model_name, model_operators
from strategies.rules import rule_of

ATTENTION = 2.0
"""Flops of attention's backward relative to forward's, as they are counted for MFU: without recompute."""


def predict(content: dict[str, Any], step: Estimate, *, ranks: int, samples: int, tokens: int) -> None:
    """Add to the content of plan.json the cost of its operators (`predicted`, per operator), the sources of their
    operands (`inputs`), and the performance of the plan (`prediction`).

    Args:
        content: That of plan.json, without predictions.
        step: The estimate of a step, which has so many `samples`, and `tokens`; 0 for a batch without tokens.
        ranks: Those of all stages.
    """
    parts, cluster, settings = step.parts, step.cluster, step.settings
    costs = [
        operator_costs(part.graph, part.plan, part.program, part.cluster, settings, part.cost, step.served)
        for part in parts
    ]
    entries = iter(content["operators"])
    made = {model_name(operator) for part in parts for operator in part.graph.operators}
    for part, found in zip(parts, costs, strict=True):
        together: dict[str, OperatorCost] = {}
        for name, cost in _by_model_operator(part, found):
            together[name] = cost + together[name] if name in together else cost
        for operator in model_operators(part.graph, part.plan):
            entry = next(entries)
            entry["inputs"] = [_sender(part, ref, made) for ref in operator.operands]
            entry["predicted"] = dict(vars(together[model_name(operator)]))
    seconds, needed, limit = content["cost"]["total"], content["memory"], cluster.memory
    if "pipeline" in content:
        groups = content["pipeline"]
        limit = groups["memory_limits"][groups["memory"].index(needed)]
    shares = shares_of(costs)
    if step.servers is not None:
        shares = {name: seconds for name, seconds in shares.items() if not name.endswith(" link")}
        shares["server links"] = parts[0].cost.communication
    shares |= {"optimizer": content["cost"]["optimizer"], "waiting": content["cost"].get("waiting", 0.0)}
    content["prediction"] = {
        "cluster": cluster.name,
        "devices": cluster.devices,
        "ranks": ranks,
        "axes": {axis: crossed(parts[0].plan.mesh, axis, cluster) for axis in parts[0].plan.mesh.names},
        "seconds": seconds,
        "samples_per_second": samples / seconds if seconds else None,
        "tokens_per_second": tokens / seconds if seconds and tokens else None,
        "mfu": _seconds_at_peak(step, ranks) / seconds if seconds else None,
        "memory": needed["peak"],
        "memory_limit": limit,
        "shares": shares,
        "binding": binding(needed["peak"], limit, shares),
        "speedups": speedups(step),
        "shrunk": smaller_needs(content, step, limit) if needed["peak"] > limit else {},
    }


def training(prediction: Mapping[str, Any], steps: int, price_per_hour: float | None) -> dict[str, Any]:
    """What a training of so many steps takes, without evaluations, checkpoints and the start: `steps`, `seconds`,
    `device_hours` of all devices of the plan, and their `price`, null where a device has none; all for `prediction` as
    plan.json has it."""
    seconds = steps * prediction["seconds"]
    hours = prediction["ranks"] * seconds / 3600
    price = None if price_per_hour is None else hours * price_per_hour
    return {"steps": steps, "seconds": seconds, "device_hours": hours, "price": price}


def _by_model_operator(part: StageEstimate, costs: Mapping[str, OperatorCost]) -> Iterator[tuple[str, OperatorCost]]:
    """The cost of every operator, with the name of the model's operator that it belongs to: what cuts or joins batch
    splits belongs to its first user."""
    users: dict[str, str] = {}
    every = []
    for operator in reversed(part.graph.operators):
        name, cost = model_name(operator), costs[operator.name]
        if part.plan.operators[operator.name].origin == "copies":
            name, cost = users.get(operator.id, name), replace(cost, results=0)
        users |= dict.fromkeys((ref.id for ref in operator.operands), name)
        every.append((name, cost))
    return reversed(every)


def _producer(part: StageEstimate, ref: Ref) -> str:
    """The model's name of the operator or source that a value comes from."""
    node = part.graph.by_id[ref.id]
    while isinstance(node, Operator) and part.plan.operators[node.name].origin == "copies":
        node = part.graph.by_id[node.operands[0].id]
    return model_name(node) if isinstance(node, Operator) else node.name


def _seconds_at_peak(step: Estimate, ranks: int) -> float:
    """Seconds in which all devices at the peak of every dtype would do the matrix products of a step, without
    recompute, each as many as it can; backward has one per factor that is trained."""
    devices = Counter({one.kind.cluster: len(one.kind.ranks) for one in step.kinds} or step.cluster.each)
    if not devices:
        return _alone_at_peak(step, step.cluster) / ranks
    rate = sum(count / seconds for one, count in devices.items() if (seconds := _alone_at_peak(step, one)))
    return 1 / rate if rate else 0.0


def _alone_at_peak(step: Estimate, cluster: Cluster) -> float:
    seconds = 0.0
    for part in step.parts:
        for operator in part.graph.operators:
            sharding, attends = rule_of(operator, part.graph), operator.op == "scaled_dot_product_attention"
            if sharding.sums or attends:
                trained = [ref in part.graph.trained for ref in operator.operands]
                _, backward = backward_work(sharding, operator, trained)
                times = any(trained) * (ATTENTION if attends else backward)
                dtype = next((spec.dtype for spec in operator.results if spec.floating), "float32")
                seconds += (1 + times) * sharding.flops / cluster.peak(dtype)
    return step.settings.accumulate * cluster.fraction * seconds


def _sender(part: StageEstimate, ref: Ref, made: Set[str]) -> str:
    """The name of the operator or source that an operand comes from, of another stage where a stage receives its
    result as `NAME[RESULT]`. A batch entry that has the name of an operator (`0`) becomes `batch[0]`."""
    name, node = _producer(part, ref), part.graph.by_id[ref.id]
    if isinstance(node, Source) and node.kind == "input" and name in made:
        return f"batch[{name}]"
    operator = name.rpartition("[")[0]
    return operator if operator in made else name


def crossed(mesh: Mesh, axis: str, cluster: Cluster) -> str | None:
    """The slowest cluster level between neighbours along a mesh axis; None for one rank."""
    spread = zip(cluster.levels, cluster.spread(mesh, (axis,)), strict=True)
    return next((level.name for level, peers in spread if peers > 1), None)


def shares_of(costs: Sequence[Mapping[str, OperatorCost]]) -> dict[str, float]:
    """Seconds by what limits them: flops, memory bandwidth, launching calls, and a link per level."""
    shares = {"flops": 0.0, "memory bandwidth": 0.0, CALLS: 0.0}
    for cost in (cost for stage in costs for cost in stage.values()):
        shares[CALLS] += cost.calls
        shares["flops" if cost.flop_bound else "memory bandwidth"] += cost.forward + cost.backward - cost.calls
        for level, seconds in cost.levels.items():
            shares[f"{level} link"] = shares.get(f"{level} link", 0.0) + seconds
    return shares


def binding(memory: int, limit: int, shares: Mapping[str, float]) -> str:
    """The bottleneck: the memory of a device if the plan needs more, else what takes most of the time."""
    return "memory" if memory > limit else max(shares, key=lambda name: shares[name])


def smaller_needs(content: Mapping[str, Any], step: Estimate, limit: int) -> dict[str, int]:
    """Bytes that a rank would need at most with more ZeRO, with full recompute, and with both, by the keys that ask for
    it. ZeRO divides what replicas share; recompute is traced where it may keep the limit, and else what is needed at
    least: what does not go with the results that backward needs. Pipelines have neither."""
    if len(step.parts) > 1:
        return {}
    part, settings, memory_now = step.parts[0], step.settings, content["memory"]
    sizes = [(math.prod(one["local_shape"]), one["replica_group_size"]) for one in content["parameters"].values()]
    share = 1 - sum(size / replicas for size, replicas in sizes) / sum(size for size, _ in sizes)
    needs, freed, zero = {}, 0, ""
    for stage in range(settings.stage + 1, 4) if share else ():
        freed += int(share * memory_now[("optimizer", "gradients", "parameters")[stage - 1]])
        zero = f"parallel.zero.stage={stage}"
        needs[zero] = memory_now["peak"] - freed
    if part.plan.recompute is None and repeated_layers(part.graph, None):
        rules = {operator.id: rule_of(operator, part.graph) for operator in part.graph.operators}
        recompute = recomputed(part.graph, rules, RecomputeRequest("full"))
        if recompute.modules:
            stored = memory_now["activations"]
            peak = max(size - stored * (phase != "update") for phase, size in memory_now["peaks"].items())
            if peak - freed <= limit:
                peak = memory(trace_repeated(replace(part.program, recompute=recompute), settings, 0), settings).peak
            needs["parallel.recompute=full"] = peak
            if zero:
                needs[f"parallel.recompute=full {zero}"] = peak - freed
    return needs


def speedups(step: Estimate) -> dict[str, float]:
    """How many times as fast the slowest stage would be with one rate doubled."""

    def seconds(part: StageEstimate, cluster: Cluster, links: bool) -> float:
        works = part.works if links else None  # no link changes them
        cost = step_cost(part.graph, part.plan, part.program, cluster, step.settings, works)
        return cost.total if step.servers is None else served(cost, step.servers, cluster).total

    before = max(part.cost.total for part in step.parts)
    every = [doubled(part.cluster) for part in step.parts]
    after = {
        name: max(seconds(part, one[name], name.endswith(" link")) for part, one in zip(step.parts, every, strict=True))
        for name in every[0]
    }
    return {name: before / later for name, later in after.items() if before}


def doubled(cluster: Cluster) -> dict[str, Cluster]:
    """The cluster with one of its rates doubled, by the rate's name."""
    clusters = {
        "flops": replace(cluster, flops={dtype: 2 * rate for dtype, rate in cluster.flops.items()}),
        "memory bandwidth": replace(cluster, memory_bandwidth=2 * cluster.memory_bandwidth),
        CALLS: replace(
            cluster,
            launch=cluster.launch / 2,
            view=cluster.view / 2,
            operators={
                op: (replace(ahead, call=ahead.call / 2), replace(back, call=back.call / 2))
                for op, (ahead, back) in cluster.operators.items()
            },
        ),
    }
    for level in cluster.levels:
        if level.size > 1:
            levels = tuple(_twice(other) if other is level else other for other in cluster.levels)
            clusters[f"{level.name} link"] = replace(cluster, levels=levels)
    return clusters


def _twice(level: Level) -> Level:
    def faster(link: Link) -> Link:
        return Link(2 * link.bandwidth, link.latency / 2, link.call / 2)

    return replace(level, link=faster(level.link), kinds={kind: faster(link) for kind, link in level.kinds.items()})
