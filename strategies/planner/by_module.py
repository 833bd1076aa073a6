"""Plans that a trainer carries out which slices modules, by styles or by the layouts at their borders: every plan of a
search becomes the one that these mean, so a target says all of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from strategies.core.graph import Operator, OperatorGraph, Ref, Source
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import Plan
from strategies.core.request import Unsliced
from strategies.cost.bordered_modules import KEEPING, BorderedModules
from strategies.cost.styled_modules import ModuleLayouts, StyledModules
from strategies.planner.boundaries import Boundary, borders, boundaries, operators_inside
from strategies.planner.declared_layouts import Declared, declared_plan, operand_layouts
from strategies.planner.module_styles import axes_of, declared, tp_plan_of
from strategies.rules import rule_of
from strategies.rules.packed import unsliced_dims
from strategies.rules.sharding import Sharding
from strategies.rules.traits import traits

ROWS, MODULES = "dp", "tp"
"""The axes of a mesh: those that slice the rows of a batch have any other name than that which slices modules."""


def by_module(graph: OperatorGraph, plan: Plan, styles: Collection[str] | None) -> Plan:
    """The plan that the styles of a plan's modules mean; None: that their borders mean."""
    if styles is None:
        found = by_borders(graph, plan)
    else:
        axes = (MODULES,) if MODULES in plan.mesh.names else ()
        found = declared_plan(graph, declared(tp_plan_of(graph, plan, styles, axes), graph, plan.mesh, axes))
    operators = {name: replace(one, origin=plan.operators[name].origin) for name, one in found.operators.items()}
    return replace(found, operators=operators)


def by_borders(graph: OperatorGraph, plan: Plan, said: Callable[[Layout], Layout] = lambda layout: layout) -> Plan:
    """The plan that follows from the layouts of the batch, of parameters, and of what modules receive and return, as
    far as they are `said`."""

    def placed(boundary: Boundary) -> dict[str, int | None]:
        dim_of = {axis: dim for dim, axes in enumerate(said(boundary.layout).dims) for axis in axes}
        return {axis: dim_of.get(axis) for axis in plan.mesh.names}

    inputs = {source.name: said(plan.inputs[source.name]) for source in graph.of_kind("input")}
    tensors = {source.name: said(plan.tensors[source.name]) for source in graph.of_kind("parameter")}
    received, returned = ({path: placed(one) for path, one in table.items()} for table in boundaries(graph, plan))
    return declared_plan(graph, Declared(plan.mesh, inputs, tensors, received, returned))


def sliced_modules(
    graph: OperatorGraph,
    mesh: Mesh,
    axes: Sequence[str],
    inputs: Mapping[str, Layout],
    styles: Collection[str] | None,
    shardings: Mapping[str, Sharding],
) -> ModuleLayouts:
    """What styles, or borders where they are None, allow over these axes of a mesh, where the batch has the layouts
    `inputs`."""
    plan = declared_plan(graph, Declared(mesh, inputs, {}))
    rows = {operator.id: plan.operators[operator.name].assignment for operator in graph.operators}
    if styles is None:
        return BorderedModules(graph, shardings, frozenset(axes), rows, borders(graph))
    return StyledModules(graph, shardings, frozenset(axes), rows, styles)


def violated(graph: OperatorGraph, plan: Plan, styles: Collection[str]) -> Iterator[Operator]:
    """The operators of a plan that a trainer with these styles would lay out otherwise."""
    shardings = {operator.id: rule_of(operator, graph) for operator in graph.operators}
    modules = sliced_modules(graph, plan.mesh, axes_of(plan), plan.inputs, styles, shardings)
    assert isinstance(modules, StyledModules)

    def handed(ref: Ref) -> Layout:
        node = graph.by_id[ref.id]
        if isinstance(node, Source):
            return plan.inputs[node.name] if node.kind == "input" else plan.tensors[node.name]
        return modules.shardings[node.id].result_layouts(plan.operators[node.name].assignment)[ref.index]

    chosen = {operator.id: plan.operators[operator.name].assignment for operator in graph.operators}
    yield from modules.violated(chosen, handed)


@dataclass(frozen=True)
class Undecided:
    """An operand that an operator takes otherwise than it comes.

    Attributes:
        comes, taken: its layouts.
    """

    operator: Operator
    ref: Ref
    comes: Layout
    taken: Layout


@dataclass(frozen=True)
class BetweenBorders:
    """What DTensor does where no border of a module says it.

    Attributes:
        undecided: where slices are gathered or moved, or partial sums reach an operator that is not a view: DTensor
            decides that by its own costs, and reduces partial sums as late as it can.
        unknown: values computed from these, up to the next border, whose layouts are therefore open.
        made: the layout in which each value is computed; views of partial sums are partial sums.
    """

    undecided: Sequence[Undecided]
    unknown: Collection[Ref]
    made: Mapping[Ref, Layout]


def between_borders(graph: OperatorGraph, plan: Plan, axes: Collection[str]) -> BetweenBorders:
    """What DTensor does over these axes of a plan whose modules' borders are declared."""
    inside = operators_inside(graph)
    said: dict[tuple[Ref, str], Layout] = {}
    for returns, table in enumerate(boundaries(graph, plan)):
        for path, entry in table.items():
            own = {one.id for one in inside[path]}
            users = (user.id for user, _ in graph.users[entry.ref])
            said |= {(entry.ref, user): entry.layout for user in users if (user in own) != returns}
    found: list[Undecided] = []
    unknown: set[Ref] = set()
    made: dict[Ref, Layout] = {}
    for source in graph.sources:
        made[Ref(source.id)] = (plan.inputs if source.kind == "input" else plan.tensors)[source.name]
    for operator in graph.operators:
        known, partial, views = True, frozenset[str](), traits(operator.op).result in KEEPING
        natural = rule_of(operator, graph).result_layouts(plan.operators[operator.name].assignment)
        sliced = {axis for layout in natural for axis in layout.axes}
        for ref, taken in zip(operator.operands, operand_layouts(operator, graph, plan), strict=True):
            comes = said.get((ref, operator.id), made[ref])
            summed = comes.partial & {*axes}
            moved = {axis for dim, used in enumerate(comes.dims) for axis in used if axis not in taken.dims[dim]}
            if ref in unknown and (ref, operator.id) not in said:
                known = False
            elif (summed and (summed & sliced or not views)) or moved & {*axes}:
                known = False
                found.append(Undecided(operator, ref, comes, taken))
            partial |= summed
        for index, layout in enumerate(natural):
            made[Ref(operator.id, index)] = replace(layout, partial=layout.partial | partial) if known else layout
            unknown |= set() if known else {Ref(operator.id, index)}
    return BetweenBorders(found, unknown, made)


def beyond_borders(graph: OperatorGraph, plan: Plan, unsliced: Unsliced) -> Iterator[str]:
    """The parameters of a plan that another axis than `tp` slices; and the operators that take an operand otherwise
    than borders mean or where DTensor decides, or in slices along dims that are `unsliced`."""
    yield from (source.name for source in graph.of_kind("parameter") if {*plan.tensors[source.name].axes} - {MODULES})
    yield from (one.operator.name for one in between_borders(graph, plan, {MODULES}).undecided)
    again = by_borders(graph, plan)
    for operator in graph.operators:
        taken, said = (operand_layouts(operator, graph, one) for one in (plan, again))
        dims, specs = unsliced.get(operator.label, ()), graph.operand_specs(operator)
        wanted = (unsliced_dims(operator, specs, place, dims) for place in range(len(specs)))
        if taken != said or any(layout.dims[dim] for layout, own in zip(taken, wanted, strict=True) for dim in own):
            yield operator.name
