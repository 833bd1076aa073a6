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
    """What ZeRO slices over replicas, where a target slices nothing: it has other stages alone, or no rank along the
    `axes` over which it does so. Along some of them, what the other axes leave replicated (norms under tensor
    parallelism) has more copies there, which is not listed."""
    stage, plan, graph = prepared.config.parallel.zero.known, prepared.plan, prepared.graph
    assert plan is not None and graph is not None
    if stage in stages and plan.mesh.product(axes) > 1:
        return
    states = need_of(prepared.config.optimizer).kept / MASTER
    without, here = (Problem(graph, plan.mesh, {}, {}, {}, {}, one, states) for one in (0, stage))
    more = 0.0
    for source in graph.of_kind("parameter"):
        layout, ref = plan.tensors[source.name], Ref(source.id)
        kept = parameter_bytes(without, layout, ref) - parameter_bytes(here, layout, ref)
        more += kept * layout.local_elements(source.spec.shape, plan.mesh) if source.trainable else 0.0
    if more:
        yield Change("optimizer", f"ZeRO stage {stage}", "sliced over replicas", "on every replica", int(more), 0.0)


def _same(one: Layout, other: Layout, mesh: Mesh) -> bool:
    """Whether two layouts differ in axes of one rank alone."""
    sliced = [[[axis for axis in used if mesh.sizes[axis] > 1] for used in layout.dims] for layout in (one, other)]
    summed = [{axis for axis in layout.partial if mesh.sizes[axis] > 1} for layout in (one, other)]
    return sliced[0] == sliced[1] and summed[0] == summed[1]


def between(prepared: Prepared, exported: Plan) -> Iterator[Change]:
    """The parameters, batch entries and operators of a plan that another one on the same mesh lays out otherwise."""
    graph, plan = prepared.graph, prepared.plan
    assert graph is not None and plan is not None
    mesh, cluster = plan.mesh, cluster_of(prepared.config, prepared.device, prepared.world_size)
    for source in graph.sources:
        ours, theirs = ((one.inputs if source.kind == "input" else one.tensors) for one in (plan, exported))
        layout, other, spec = ours[source.name], theirs[source.name], source.spec
        if _same(layout, other, mesh):
            continue
        if source.kind == "input":
            yield sent("input", source.name, layout, other, spec, mesh, cluster)
            continue
        more = other.local_elements(spec.shape, mesh) - layout.local_elements(spec.shape, mesh)
        yield Change(source.kind, source.name, str(layout), str(other), more * spec.item_bytes, 0.0)
    for operator in graph.operators:
        pair = (operand_layouts(operator, graph, one) for one in (plan, exported))
        for ref, layout, other in zip(operator.operands, *pair, strict=True):
            if not _same(layout, other, mesh):
                yield sent("operator", operator.name, layout, other, graph.specs[ref], mesh, cluster)
