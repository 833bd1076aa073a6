"""The plan of a program that others lay out: parameters have layouts, modules may receive and return some, and
everything in between follows.

So do programs of DTensors and of local tensors run. An operator computes on its operands as they come, without a
choice: where they disagree, slices of parameters come first, then those of the largest operand (of equal ones, of that
with the most slices), and what does not fit an operator's rule is replicated for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from strategies.core.graph import Operator, OperatorGraph, Ref
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import OperatorPlan, Plan
from strategies.rules import rule_of
from strategies.rules.sharding import Assignment, Sharding

Placed = Mapping[str, int | None]
"""Mesh axis -> the dim that it slices, counted from the end where negative; None: replicated. Axes that are missing
stay where they are."""


SEARCH = {
    "algorithm": "declared",
    "seconds": 0.0,
    "cost": None,
    "lower_bound": None,
    "loaded_from": "what its modules declare",
}
"""The key `search` of such a plan."""


@dataclass(frozen=True)
class Declared:
    """What somebody says of a program.

    Attributes:
        inputs: layouts of the batch's entries.
        tensors: layouts of parameters by full name; the others are replicated.
        received: how a module (by path) takes the first value that it gets from outside.
        returned: how it hands on the last value that others use.
        packed: the parameters of which a rank has a stripe of each section.
    """

    mesh: Mesh
    inputs: Mapping[str, Layout]
    tensors: Mapping[str, Layout]
    received: Mapping[str, Placed] = field(default_factory=dict)
    returned: Mapping[str, Placed] = field(default_factory=dict)
    packed: frozenset[str] = frozenset()


def declared_plan(graph: OperatorGraph, declared: Declared) -> Plan:
    """The plan of a training graph as it was declared."""
    mesh, tensors = declared.mesh, {}
    layouts: dict[Ref, Layout] = {}
    for source in graph.sources:
        known = declared.inputs if source.kind == "input" else declared.tensors
        layouts[Ref(source.id)] = known.get(source.name, Layout.replicated(len(source.spec.shape)))
        if source.kind != "input":
            tensors[source.name] = layouts[Ref(source.id)]
    received = {
        (operator.id, ref): declared.received[path]
        for path in declared.received
        for operator, ref in _entering(graph, path)
    }
    returned = {_leaving(graph, path): placed for path, placed in declared.returned.items()}
    operators = {}
    for operator in graph.operators:
        sharding, incoming = rule_of(operator, graph), []
        for ref in operator.operands:
            placed = received.get((operator.id, ref), {})
            incoming.append(_moved(layouts[ref], placed, graph.specs[ref].shape, mesh))
        assignment = _agreed(operator, sharding, incoming, graph, mesh)
        natural, outputs = sharding.result_layouts(assignment), []
        for index, (layout, spec) in enumerate(zip(natural, operator.results, strict=True)):
            ref = Ref(operator.id, index)
            outputs.append(_moved(layout.reduced, returned.get(ref, {}), spec.shape, mesh))
            layouts[ref] = outputs[-1]
        moved = any(want != layout.reduced for want, layout in zip(outputs, natural, strict=True))
        known_to = operator.module in declared.received or operator.module in declared.returned
        operators[operator.name] = OperatorPlan(
            assignment, "configured" if known_to else "propagated", tuple(outputs) if moved else None
        )
    inputs = {source.name: layouts[Ref(source.id)] for source in graph.of_kind("input")}
    return Plan(mesh, operators, inputs, tensors, SEARCH)


def operand_layouts(operator: Operator, graph: OperatorGraph, plan: Plan) -> tuple[Layout, ...]:
    """The layouts in which an operator takes its operands."""
    return tuple(rule_of(operator, graph).operand_layouts(plan.operators[operator.name].assignment))


def _inside(operator: Operator, path: str) -> bool:
    return operator.module == path or operator.module.startswith(f"{path}.")


def _entering(graph: OperatorGraph, path: str) -> Iterator[tuple[Operator, Ref]]:
    """The uses, within a module, of the first value that it takes from outside."""
    inside = [operator for operator in graph.operators if _inside(operator, path)]
    known = {operator.id for operator in inside} | {source.id for source in graph.sources if source.kind != "input"}
    first = next((ref for operator in inside for ref in operator.operands if ref.id not in known), None)
    yield from ((operator, first) for operator in inside if first is not None and first in operator.operands)


def _leaving(graph: OperatorGraph, path: str) -> Ref | None:
    """The last value of a module that others use."""
    made = {operator.id for operator in graph.operators if _inside(operator, path)}
    found = None
    for operator in graph.operators:
        for index in range(len(operator.results) if operator.id in made else 0):
            if any(user.id not in made for user, _ in graph.users[Ref(operator.id, index)]):
                found = Ref(operator.id, index)
    return found


def _moved(layout: Layout, placed: Placed, shape: Sequence[int], mesh: Mesh) -> Layout:
    """The layout with some axes on other dims, as far as slices stay equal."""
    if not placed:
        return layout
    dims = [[axis for axis in axes if axis not in placed] for axes in layout.dims]
    for axis, dim in placed.items():
        if dim is not None and -len(dims) <= dim < len(dims):
            axes = mesh.sorted([*dims[dim], axis])
            if shape[dim] % mesh.product(axes) == 0:
                dims[dim] = list(axes)
    return Layout(tuple(map(tuple, dims)))


def _agreed(
    operator: Operator, sharding: Sharding, incoming: Sequence[Layout], graph: OperatorGraph, mesh: Mesh
) -> Assignment:
    """The factors' axes by the layouts in which the operands come."""
    assignment: dict[str, tuple[str, ...]] = {}
    used: set[str] = set()

    def order(position: int) -> tuple[bool, int, int]:
        ref = operator.operands[position]
        return ref.id in parameters, graph.specs[ref].elements, mesh.product(incoming[position].axes)

    parameters = {source.id for source in graph.of_kind("parameter")}
    for position in sorted(range(len(incoming)), key=order, reverse=True):
        for factor, axes in zip(sharding.operands[position], incoming[position].dims, strict=True):
            free = tuple(axis for axis in axes if axis not in used)
            if factor is None or factor in assignment or not free:
                continue
            while free and not sharding.fits(factor, mesh.product(free)):
                free = free[:-1]
            if free:
                assignment[factor] = free
                used |= {*free}
    return {factor: assignment[factor] for factor in sharding.factors if factor in assignment}
