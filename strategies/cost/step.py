"""Seconds of a training step by part: from the graph's operators, the program's collectives and a described machine.

The search evaluates plans by `step_cost`, `run plan` prints it, and `run explain` divides it among operators.
Invariant: `total` is the sum of what nothing else hides: compute, communication, the exposed part of adding gradients,
ZeRO's collectives and the optimizer. Bytes are those that `strategies.planner.description.communication` predicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from strategies.core.graph import ITEM_BYTES, Operator, OperatorGraph
from strategies.core.mesh import Mesh
from strategies.core.plan import Plan, Recompute
from strategies.core.program import Program
from strategies.core.steps import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from strategies.cost.backward_halves import weight_seconds
from strategies.cost.cluster import Cluster
from strategies.cost.collectives import collective_seconds
from strategies.cost.exposed_communication import added_seconds, hidden_gathers
from strategies.cost.roofline import Work, operator_work
from strategies.optimizer import sharding
from strategies.optimizer.buckets import Bucket, all_reduce_elements, buckets
from strategies.optimizer.bytes_per_element import Need, needed
from strategies.optimizer.settings import OptimizerSettings
from strategies.optimizer.updates import Engine, local_elements
from strategies.optimizer.zero import traffic as zero_traffic
from strategies.rules import rule_of


@dataclass(frozen=True)
class EngineWork:
    """What an engine of ZeRO does beside its collectives. Measured on one rank: DeepSpeed with 10 and 30 layers of 16
    columns, our own with GPTs of 4 and 12 layers of 64 columns, but for its gathers, whose calls were counted.

    Attributes:
        step: On the host, in small operators, per step.
        gradient: The same per gradient of a micro-batch.
        gather: The same per gather of stage 3.
        copies: How often it reads or writes a gradient on its way: into a bucket, back, into a flat tensor, and scaled.
    """

    step: int
    gradient: int
    gather: int
    copies: int


WORK: dict[Engine, EngineWork] = {"deepspeed": EngineWork(240, 15, 120, 8), "native": EngineWork(30, 12, 30, 4)}
MASTER = 4
"""Bytes of an element where the optimizer works: fp32, whatever the model's dtype."""


@dataclass(frozen=True)
class StepCost:
    """Seconds of one rank per step, of all its micro-batches.

    Attributes:
        cluster: The machine's name.
        forward: Compute of forward.
        backward: Compute of backward, without recompute.
        backward_weights: The part of it that a stage of a pipeline may compute later, see `weight_seconds`.
        recomputed: Second forward of recomputed modules.
        redistributions: Exposed redistributions, by collective.
        weights: The part of the redistributions that carries parameters.
        gradients: Gradient reduction at stage 0.
        exposed: The part of `gradients` that backward does not hide.
        zero: ZeRO's collectives, without what compute hides of our own gathers and reduce-scatters.
        optimizer: The optimizer's update.
    """

    cluster: str
    forward: float
    backward: float
    backward_weights: float
    recomputed: float
    redistributions: dict[str, float]
    weights: dict[str, float]
    gradients: float
    exposed: float
    zero: dict[str, float]
    optimizer: float

    @property
    def compute(self) -> float:
        """Seconds of all operators."""
        return self.forward + self.backward + self.recomputed

    @property
    def communication(self) -> float:
        """Seconds of communication that nothing hides."""
        return sum(self.redistributions.values()) + self.exposed + sum(self.zero.values())

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.communication + self.optimizer

    def to_json(self) -> dict[str, str | float | dict[str, float]]:
        """The entry of plan.json; `total` is `compute` + `communication` + `optimizer`."""
        return {
            "cluster": self.cluster,
            "forward": self.forward,
            "backward": self.backward,
            "backward_weights": self.backward_weights,
            "recomputed": self.recomputed,
            "compute": self.compute,
            "redistributions": self.redistributions,
            "gradients": self.gradients,
            "gradients_exposed": self.exposed,
            "zero": self.zero,
            "communication": self.communication,
            "optimizer": self.optimizer,
            "total": self.total,
        }


def works_of(graph: OperatorGraph, plan: Plan, cluster: Cluster) -> list[Work]:
    """The work of all operators, in their order."""
    return [
        operator_work(
            rule_of(operator, graph), plan.operators[operator.name].assignment, operator, graph, plan.mesh, cluster
        )
        for operator in graph.operators
    ]


def recomputed_seconds(graph: OperatorGraph, works: Sequence[Work], recompute: Recompute | None) -> float:
    """Seconds of the operators that backward recomputes, for one micro-batch."""
    if recompute is None:
        return 0.0
    pairs = zip(graph.operators, works, strict=True)
    return sum(work.forward for operator, work in pairs if is_recomputed(operator, recompute))


def recomputed_by_module(graph: OperatorGraph, works: Sequence[Work], recompute: Recompute) -> dict[str, float]:
    """The same by module of `recompute`, the outermost around each operator."""
    seconds = dict.fromkeys(recompute.modules, 0.0)
    for operator, work in zip(graph.operators, works, strict=True):
        module = recompute.repeated_in(operator.name, operator.path)
        if module is not None:
            seconds[module] += work.forward
    return seconds


def is_recomputed(operator: Operator, recompute: Recompute) -> bool:
    """Whether backward runs the forward of `operator` again."""
    return recompute.repeated_in(operator.name, operator.path) is not None


def step_cost(
    graph: OperatorGraph,
    plan: Plan,
    program: Program,
    cluster: Cluster,
    settings: OptimizerSettings,
    works: Sequence[Work] | None = None,
) -> StepCost:
    """What a step costs.

    Args:
        graph: What a step computes.
        plan: Its plan.
        program: `plan` lowered.
        cluster: The machine.
        settings: Of the optimizer step.
        works: Those of `works_of`, if they are known.

    Raises:
        StrategyError: The cluster has fewer devices than the plan.
    """
    mesh, micro_batches = plan.mesh, settings.accumulate
    works = works_of(graph, plan, cluster) if works is None else works
    forward, backward = sum(work.forward for work in works), sum(work.backward for work in works)
    by_name = dict(zip((operator.name for operator in graph.operators), works, strict=True))
    redistributed = {kind: micro_batches * one for kind, one in added_seconds(program, by_name, cluster).items()}
    weights = dict[str, float]()
    names = frozenset(source.id for source in program.parameters)
    if any(one.value.id in names and (one.forward or one.backward) for one in program.redistributions):
        others = added_seconds(program, by_name, cluster, without=names)
        weights = {kind: seconds - micro_batches * others.get(kind, 0.0) for kind, seconds in redistributed.items()}
    if program.loss_axes:
        size = 8 * all_reduce_elements([1], mesh.product(program.loss_axes))
        seconds = collective_seconds(ALL_REDUCE, size, program.loss_axes, mesh, cluster)
        redistributed[ALL_REDUCE] = redistributed.get(ALL_REDUCE, 0.0) + seconds
    gradients = exposed = 0.0
    if settings.stage == 0:
        gradients, exposed = _gradients(buckets(program, settings.cut), program, cluster, settings.overlap, backward)
    return StepCost(
        cluster.name,
        micro_batches * forward,
        micro_batches * backward,
        micro_batches * weight_seconds(graph, works),
        micro_batches * recomputed_seconds(graph, works, plan.recompute),
        redistributed,
        weights,
        gradients,
        exposed,
        _zero(program, cluster, settings, backward, by_name),
        optimizer_seconds(program, cluster, settings),
    )


def lower_bound_with_zero(cost: StepCost, program: Program, cluster: Cluster, settings: OptimizerSettings) -> StepCost:
    """A lower bound of `cost`, of a `program` without ZeRO, at the stage of `settings`: ZeRO may take over what carries
    parameters, and brings its own collectives and update. What stage 3 gathers depends on its own program."""
    kept = {kind: seconds - cost.weights.get(kind, 0.0) for kind, seconds in cost.redistributions.items()}
    backward, optimizer = cost.backward / settings.accumulate, optimizer_seconds(program, cluster, settings)
    zero = _zero(program, cluster, settings, backward)
    if settings.stage == 3:
        zero.pop(ALL_GATHER, None)
    return replace(cost, redistributions=kept, weights={}, gradients=0.0, exposed=0.0, zero=zero, optimizer=optimizer)


def _gradients(
    sums: Iterable[Bucket], program: Program, cluster: Cluster, overlap: bool, backward: float
) -> tuple[float, float]:
    """Seconds of adding all gradients, and how much of that backward of the last micro-batch does not hide: at least
    the last bucket, which is complete when backward ends."""
    times = []
    for one in sums:
        item_bytes, ranks = ITEM_BYTES[one.dtype], program.mesh.product(one.axes)
        size = all_reduce_elements([one.elements], ranks) * item_bytes
        seconds = collective_seconds(ALL_REDUCE, size, one.axes, program.mesh, cluster)
        if len(one.names) > 1:  # joined to one tensor
            seconds += 2 * one.elements * item_bytes / cluster.memory_bandwidth
        times.append(seconds)
    return sum(times), _exposed(times, backward, cluster) if overlap else sum(times)


def _exposed(times: Sequence[float], backward: float, cluster: Cluster) -> float:
    """How much of the reductions of gradients `backward` does not hide."""
    total = sum(times)
    return max(total - min(cluster.overlap * total, backward), times[-1]) if times else 0.0


def _zero(
    program: Program,
    cluster: Cluster,
    settings: OptimizerSettings,
    backward: float,
    works: Mapping[str, Work] = MappingProxyType({}),
) -> dict[str, float]:
    """Seconds of what ZeRO sends, by collective, with the norm of the gradients where the engine is DeepSpeed's, which
    computes it in every step; others compute it where it is logged or clipped, at every stage.
    `backward` of one micro-batch hides reduce-scatters of our own: at stage 1 the last one alone. The `works` of
    operators, by plan name, hide gathers of our own stage 3."""
    by_kind: dict[str, list[float]] = {}
    for call in _zero_calls(program, settings):
        seconds = collective_seconds(call.kind, call.bytes / call.count, call.axes, program.mesh, cluster)
        if call.kind == ALL_GATHER and settings.stage == 3:
            seconds += WORK[settings.engine].gather * cluster.view
        by_kind.setdefault(call.kind, []).append(call.count * seconds)
    exposed = {kind: sum(times) for kind, times in by_kind.items()}
    if settings.native and settings.stage == 3 and ALL_GATHER in by_kind:
        hidden = _hidden_gathers(program, cluster, settings, works)
        exposed[ALL_GATHER] -= settings.accumulate * sum(hidden)
        backward -= hidden[1]
    if settings.native and settings.overlap and REDUCE_SCATTER in by_kind:
        hiding = settings.accumulate if settings.stage > 1 else 1
        exposed[REDUCE_SCATTER] = _exposed(by_kind[REDUCE_SCATTER][::-1], hiding * backward, cluster)
    if settings.stage and not settings.native and program.mesh.size > 1:
        exposed[ALL_REDUCE] = exposed.get(ALL_REDUCE, 0.0) + norm_seconds(program.mesh, cluster)
    return exposed


def _hidden_gathers(
    program: Program, cluster: Cluster, settings: OptimizerSettings, works: Mapping[str, Work]
) -> tuple[float, float]:
    """Seconds of our own stage 3's gathers that forward and backward of one micro-batch hide."""
    names = [group["names"] for group in settings.groups_for(program)]
    buckets = sharding.sharded_buckets(program, names, settings.limit, settings.stage, settings.complete)
    ids, gathers = {source.name: source.id for source in program.parameters}, dict[str, tuple[int, float]]()
    for number, bucket in enumerate(buckets):
        if bucket.ranks > 1 and not bucket.stay:
            size = (bucket.ranks - 1) * bucket.part * ITEM_BYTES[bucket.dtype]
            seconds = collective_seconds(ALL_GATHER, size, bucket.axes, program.mesh, cluster)
            gathers |= {ids[member.name]: (number, seconds) for member in bucket.members}
    return hidden_gathers(program, works, gathers, len(buckets) - 1, cluster.overlap)


def _zero_calls(program: Program, settings: OptimizerSettings) -> tuple[zero_traffic.Calls, ...]:
    if not settings.stage:
        return ()
    groups, agreed = settings.groups_for(program), zero_traffic.agreement(program)
    if settings.native:
        names = [one["names"] for one in groups]
        own = sharding.calls(program, names, settings.accumulate, settings.limit, settings.stage, settings.complete)
        return own + agreed
    return zero_traffic.calls(program, settings.stage, settings.accumulate, groups, settings.complete) + agreed


def norm_seconds(mesh: Mesh, cluster: Cluster) -> float:
    """Seconds of adding the norm of the gradients over all ranks."""
    return collective_seconds(
        ALL_REDUCE, MASTER * all_reduce_elements([1], mesh.size), mesh.sorted(mesh.names), mesh, cluster
    )


def optimizer_seconds(program: Program, cluster: Cluster, settings: OptimizerSettings) -> float:
    """Seconds of the optimizer's own work: what its calls read and write of the parameters that a rank updates. ZeRO
    copies every gradient between parameters, buckets and flat tensors, and updates its part of them."""
    need = need_of(settings)
    moved, count, names = 0.0, 0, set(program.trainable_names)
    copies = WORK[settings.engine].copies
    for source in program.parameters:
        if source.name in names:
            replicas = program.mesh.product(program.layouts[source.id].replica_axes(program.mesh))
            elements, item_bytes = local_elements(program, source), max(MASTER, source.spec.item_bytes)
            moved += elements / (replicas if settings.stage else 1) * item_bytes / MASTER * need.moved
            moved += settings.accumulate * elements * item_bytes * copies * bool(settings.stage)
            count += 1
    return calling_seconds(count, cluster, settings) + moved / cluster.memory_bandwidth


def need_of(settings: OptimizerSettings) -> Need:
    """What the optimizer needs for parameters in fp32."""
    return needed(settings.factory, torch.float32, settings.kernels)


def calling_seconds(count: int, cluster: Cluster, settings: OptimizerSettings) -> float:
    """Seconds of the calls of an optimizer of `count` parameters, whatever their sizes."""
    need = need_of(settings)
    host = need.calls * bool(count) + need.each * count
    if settings.stage:
        work = WORK[settings.engine]
        host = work.step + count * work.gradient * settings.accumulate
    return cluster.launch * bool(count) + cluster.view * host
