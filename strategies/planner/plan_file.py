"""Load a plan from plan.json instead of searching for one.

Invariant: a loaded plan matches the graph: the same operators on the same shapes, as many ranks, every sharding legal.
The first difference is reported by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from strategies.core.errors import StrategyError
from strategies.core.graph import FusedSections, OperatorGraph
from strategies.core.layout import Layout
from strategies.core.plan import Origin, Plan
from strategies.rules import rule_of


class Form(BaseModel):
    """The fields of a section of plan.json that are read again; fields that reports add are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


Count = Annotated[int, Field(ge=0, lt=2**31)]
Size = Annotated[int, Field(ge=1, lt=2**31)]


class _Layout(Form):
    dims: list[list[str]]
    partial: list[str]


class _Assignment(Form):
    assignment: dict[str, list[str]]
    origin: Origin
    outputs: list[_Layout] | None


class ChoiceForm(Form):
    stages: Size
    zero: Annotated[int, Field(ge=0, le=3)]
    micro_batches: Size
    recompute: str
    seconds: float
    modules: list[str] | None = None


class DecidedForm(ChoiceForm):
    tried: Count
    pruned: Count
    over: Count
    refused: Count
    runner_up: ChoiceForm | None


class SearchForm(Form):
    algorithm: str
    seconds: float
    cost: float | None
    lower_bound: float | None
    gap: float | None = None
    bytes: float | None = None
    decided: DecidedForm | None = None
    context_parallel: Literal["ring"] | None = None


class PlanRecomputeForm(Form):
    modules: list[str]
    kept: list[str]
    keeps_communication: bool
    slices_inputs: bool


class OperatorForm(Form):
    name: str
    op: str
    shapes: list[list[int]]


class _Packed(Form):
    dim: Count
    sizes: list[Size]


class _Parameter(Form):
    shape: list[int]
    packed: _Packed | None = None


class _Config(Form):
    data: dict[str, Any]
    parallel: dict[str, Any]


class PlanForm(Form):
    mesh: dict[str, Size]
    assignments: dict[str, _Assignment]
    inputs: dict[str, _Layout]
    tensors: dict[str, _Layout]
    search: SearchForm
    recompute: PlanRecomputeForm | None
    operators: list[OperatorForm]
    parameters: dict[str, _Parameter]
    config: _Config | None = None


def check_form(content: Any, name: str, form: type[Form] = PlanForm) -> None:
    """Raises StrategyError, with the place in the file, where `content` does not have the form of a plan.json."""
    try:
        form.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        given = repr(first["input"])
        shown = f", not {given if len(given) <= 60 else f'{given[:57]}...'}" if first["type"] != "missing" else ""
        wrong = re.sub(" or instance of .*", "", first["msg"])
        problem = f"{place}: {wrong[0].lower()}{wrong[1:]}{shown}" if place else wrong
        raise StrategyError("MW420", f"{name} is not a plan.json ({problem}).") from None


def packed_in(content: Any, name: str) -> dict[str, FusedSections]:
    """The parameters that the content of a plan.json slices section by section. Raises StrategyError as `read_plan`."""
    check_form(content, name)
    found = {key: entry.get("packed") for key, entry in content["parameters"].items()}
    return {key: FusedSections(one["dim"], tuple(one["sizes"])) for key, one in found.items() if one is not None}


def read_plan(content: Any, graph: OperatorGraph, ranks: int, name: str) -> Plan:
    """The plan of `graph` on a mesh of `ranks` in the content of a plan.json that is known to the user as `name`.

    Raises StrategyError for content that is no plan.json, and where it belongs to another model, other shapes or
    another number of ranks.
    """
    check_form(content, name)
    try:
        plan = Plan.from_json(content)
        problem = {entry["name"]: (entry["op"], entry["shapes"]) for entry in content["operators"]}
        parameters = {key: tuple(entry["shape"]) for key, entry in content["parameters"].items()}
        packed = packed_in(content, name)
    except (StrategyError, ValueError) as error:
        raise StrategyError("MW420", f"{name} is not a plan.json ({str(error).rstrip('.')}).") from None
    if plan.mesh.size != ranks:
        mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.axes)
        raise StrategyError(
            "MW421",
            f"{name} is for a mesh of {plan.mesh.size} ranks ({mesh}), but this one has {ranks}; set world_size (and "
            "parallel.pipeline.stages) as in the run that made the plan, or plan anew.",
        )
    for difference in _differences(plan, problem, parameters, packed, graph):
        raise StrategyError("MW421", f"{name}{difference}")
    return plan


def _differences(
    plan: Plan,
    problem: Mapping[str, tuple[str, list[list[int]]]],
    parameters: Mapping[str, tuple[int, ...]],
    packed: Mapping[str, FusedSections],
    graph: OperatorGraph,
) -> Iterator[str]:
    """What makes a plan unfit for a graph, as sentences that follow the file's name."""
    yield from _operator_differences(plan, problem, graph)
    other = "so it belongs to another model; plan anew."
    for source in graph.sources:
        layouts, shape = plan.inputs if source.kind == "input" else plan.tensors, source.spec.shape
        if source.name not in layouts or len(layouts[source.name].dims) != len(shape):
            yield f" does not say how {source.kind} {source.name} {shape} is laid out, {other}"
        if source.kind == "parameter" and parameters.get(source.name) != shape:
            yield f": parameter {source.name} is {parameters.get(source.name)} there and {shape} here, {other}"
        if source.kind == "parameter" and packed.get(source.name) != source.spec.packed:
            there, here = (_sections(one) for one in (packed.get(source.name), source.spec.packed))
            yield f": parameter {source.name} is sliced {there} there and {here} here, {other}"
    for operator in graph.operators:
        assignment, sharding = plan.operators[operator.name].assignment, rule_of(operator, graph)
        axes = [axis for used in assignment.values() for axis in used]
        known = set(axes) <= set(plan.mesh.names) and len(set(axes)) == len(axes)
        if not known or not sharding.legal(assignment, plan.mesh):
            yield (
                f" slices {operator.where} as {dict(assignment)}, which its rule does not allow on the mesh "
                f"{dict(plan.mesh.axes)}; the file was changed, or made by another version; plan anew."
            )
    yield from _layout_differences(plan, graph)


def _operator_differences(
    plan: Plan, problem: Mapping[str, tuple[str, list[list[int]]]], graph: OperatorGraph
) -> Iterator[str]:
    other = "so it belongs to another model; plan anew."
    for operator in graph.operators:
        if operator.name not in plan.operators or operator.name not in problem:
            yield f" has no operator {operator.where}, {other}"
        op, shapes = problem[operator.name]
        if op != operator.op:
            yield f": operator {operator.name} is {op} there and {operator.op} here, {other}"
        own = [list(spec.shape) for spec in graph.operand_specs(operator)]
        if shapes != own:
            yield (
                f": operator {operator.where} works on shapes {_text(shapes)} there and {_text(own)} here; plan "
                "anew, or choose the sizes of model and batch as in the run that made the plan."
            )
    for extra in sorted(plan.operators.keys() - graph.by_name.keys()):
        yield f" has an operator {extra} that this model lacks, {other}"


def _layout_differences(plan: Plan, graph: OperatorGraph) -> Iterator[str]:
    """Layouts are of tensors with as many dims, on the mesh, and those of sources are without partial sums."""
    layouts: list[tuple[str, Layout, int, bool]] = []
    for source in graph.sources:
        layout = (plan.inputs if source.kind == "input" else plan.tensors)[source.name]
        layouts.append((f"{source.kind} {source.name}", layout, len(source.spec.shape), False))
    for operator in graph.operators:
        outputs = plan.operators[operator.name].outputs
        if outputs is not None and len(outputs) != len(operator.results):
            yield f" has {len(outputs)} outputs of {operator.where}, which has {len(operator.results)}; plan anew."
        for layout, result in zip(outputs or (), operator.results, strict=False):
            layouts.append((f"an output of {operator.where}", layout, len(result.shape), True))
    for where, layout, dims, may_be_partial in layouts:
        unknown = sorted((layout.axes | layout.partial) - set(plan.mesh.names))
        if unknown:
            yield f": the layout of {where} has the axis {unknown[0]!r}, which its mesh lacks."
        if len(layout.dims) != dims or (layout.partial and not may_be_partial):
            yield f": the layout of {where} is {layout}, which does not fit it; plan anew."


def _sections(packed: FusedSections | None) -> str:
    return "as one" if packed is None else f"in sections of {list(packed.sizes)} along dim {packed.dim}"


def _text(shapes: list[list[int]]) -> str:
    return ", ".join("x".join(map(str, shape)) or "()" for shape in shapes)
