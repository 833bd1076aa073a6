"""What a target of an export lays out otherwise than the plan, with what that costs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from runner.build.optimizers import need_of
from runner.planning.clusters import cluster_of
from runner.planning.prepare import Prepared
from strategies.core.graph import Ref, TensorSpec
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import Plan
from strategies.cost.cluster import Cluster
from strategies.cost.collectives import path_seconds
from strategies.cost.problem import Problem
from strategies.cost.step import MASTER
from strategies.memory.estimate import parameter_bytes
from strategies.planner.declared_layouts import operand_layouts
from strategies.resharding.path import resharding_path

NEGLIGIBLE = 0.01
"""The part of what a rank keeps under ZeRO that a target may keep in addition: norms that the axis of modules does not
slice have more replicas in a plan than FSDP beside tensor parallelism slices."""


@dataclass(frozen=True)
class Change:
    """Something that a target lays out otherwise than the plan.

    Attributes:
        kind: parameter, buffer, input, operator, optimizer or collectives.
        name: of the tensor, batch entry or operator; of collectives, their kind.
        planned, exported: its layouts; of collectives, the bytes that a rank sends in a step.
        bytes: sent by a rank in forward of a step to come from the one to the other; of a parameter, and under ZeRO,
            kept in addition; of collectives, sent in addition, negative where it is less, as it is where an operator
            reads the rows of one rank instead of all.
        seconds: of sending them, predicted; of collectives, in addition.
    """

    kind: str
    name: str
    planned: str
    exported: str
    bytes: int
    seconds: float

    def __str__(self) -> str:
        if self.planned == self.exported:
            return f"{self.kind} {self.name}: {self.planned} in the plan, where the target has slices or partial sums"
        return (
            f"{self.kind} {self.name}: {self.planned} in the plan, {self.exported} as exported; {self.bytes:,} bytes, "
            f"{self.seconds * 1e3:.3g} ms"
        )


def sent(kind: str, name: str, planned: Layout, exported: Layout, spec: TensorSpec, mesh: Mesh, at: Cluster) -> Change:
    """The change of a value that is brought from one layout to the other, on the cluster `at`."""
    path = resharding_path(planned, exported, spec.shape, mesh)
    size = int(sum(step.busiest(mesh) for step in path) * spec.item_bytes)
    return Change(kind, name, str(planned), str(exported), size, path_seconds(path, spec.item_bytes, mesh, at))


def of_optimizer(prepared: Prepared, stages: Collection[int], axes: Collection[str]) -> Iterator[Change]:
    """What ZeRO slices over all replicas of a parameter, and a target only at these stages and along these axes, where
    a rank keeps more than 1 % more by that."""
    stage, plan, graph = prepared.config.parallel.zero.known, prepared.plan, prepared.graph
    assert plan is not None and graph is not None
    states = need_of(prepared.config.optimizer).kept / MASTER
    problem = Problem(graph, plan.mesh, {}, {}, {}, {}, stage, states)
    covered = [axis for axis in axes if stage in stages]

    def kept(over: Collection[str] | None) -> float:
        return sum(
            plan.tensors[source.name].local_elements(source.spec.shape, plan.mesh)
            * parameter_bytes(problem, plan.tensors[source.name], Ref(source.id), over)
            for source in graph.of_kind("parameter")
            if source.trainable
        )

    ours, theirs = kept(None), kept(covered)
    if theirs > (1 + NEGLIGIBLE) * ours:
        exported = f"sliced over {', '.join(covered)} alone" if covered else "on every replica"
        yield Change("optimizer", f"ZeRO stage {stage}", "sliced over replicas", exported, int(theirs - ours), 0.0)


def between(prepared: Prepared, exported: Plan) -> Iterator[Change]:
    """The parameters, batch entries and operators of a plan that another one on the same mesh lays out otherwise."""
    graph, plan = prepared.graph, prepared.plan
    assert graph is not None and plan is not None
    mesh, cluster = plan.mesh, cluster_of(prepared.config, prepared.device, prepared.world_size)
    for source in graph.sources:
        ours, theirs = ((one.inputs if source.kind == "input" else one.tensors) for one in (plan, exported))
        layout, other, spec = ours[source.name], theirs[source.name], source.spec
        if layout == other:
            continue
        if source.kind == "input":
            yield sent("input", source.name, layout, other, spec, mesh, cluster)
            continue
        more = other.local_elements(spec.shape, mesh) - layout.local_elements(spec.shape, mesh)
        yield Change(source.kind, source.name, str(layout), str(other), more * spec.item_bytes, 0.0)
    for operator in graph.operators:
        pair = (operand_layouts(operator, graph, one) for one in (plan, exported))
        for ref, layout, other in zip(operator.operands, *pair, strict=True):
            if layout != other:
                yield sent("operator", operator.name, layout, other, graph.specs[ref], mesh, cluster)
