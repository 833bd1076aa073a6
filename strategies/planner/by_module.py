"""Plans that a trainer carries out which slices modules by styles: every plan of a search becomes the one that its
styles mean, so a target says all of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from strategies.core.graph import Operator, OperatorGraph, Ref, Source
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import Plan
from strategies.cost.styled_modules import StyledModules
from strategies.planner.declared_layouts import Declared, declared_plan
from strategies.planner.module_styles import axes_of, declared, tp_plan_of
from strategies.rules import rule_of

ROWS, MODULES = "dp", "tp"
"""The axes of a mesh: those that slice the rows of a batch have any other name than that which slices modules."""


def by_module(graph: OperatorGraph, plan: Plan, styles: Collection[str]) -> Plan:
    """The plan that the styles of a plan's modules mean."""
    axes = (MODULES,) if MODULES in plan.mesh.names else ()
    found = declared_plan(graph, declared(tp_plan_of(graph, plan, styles, axes), graph, plan.mesh, axes))
    operators = {name: replace(one, origin=plan.operators[name].origin) for name, one in found.operators.items()}
    return replace(found, operators=operators)


def styled_modules(
    graph: OperatorGraph, mesh: Mesh, axes: Sequence[str], inputs: Mapping[str, Layout], styles: Collection[str]
) -> StyledModules:
    """What styles allow over these axes of a mesh, where the batch has the layouts `inputs`."""
    plan = declared_plan(graph, Declared(mesh, inputs, {}))
    rows = {operator.id: plan.operators[operator.name].assignment for operator in graph.operators}
    shardings = {operator.id: rule_of(operator, graph) for operator in graph.operators}
    return StyledModules(graph, shardings, frozenset(axes), rows, styles)


def violated(graph: OperatorGraph, plan: Plan, styles: Collection[str]) -> Iterator[Operator]:
    """The operators of a plan that a trainer with these styles would lay out otherwise."""
    modules = styled_modules(graph, plan.mesh, axes_of(plan), plan.inputs, styles)

    def handed(ref: Ref) -> Layout:
        node = graph.by_id[ref.id]
        if isinstance(node, Source):
            return plan.inputs[node.name] if node.kind == "input" else plan.tensors[node.name]
        return modules.shardings[node.id].result_layouts(plan.operators[node.name].assignment)[ref.index]

    chosen = {operator.id: plan.operators[operator.name].assignment for operator in graph.operators}
    yield from modules.violated(chosen, handed)
