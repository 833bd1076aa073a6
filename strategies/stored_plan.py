"""A plan read back from plan.json, instead of searched.

Invariant: what is read fits the graph: the same operators on the same shapes, as many ranks, every slicing legal. The
first difference is told by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strategies.errors import StrategyError
from strategies.graph import OperatorGraph
from strategies.plan import Plan
from strategies.rules import rule_of


def read_plan(content: Any, graph: OperatorGraph, ranks: int, name: str) -> Plan:
    """The plan of `graph` on a mesh of `ranks` in the content of a plan.json that is known to the user as `name`.

    Raises StrategyError for content that is no plan.json, and where it belongs to another model, other shapes or
    another number of ranks.
    """
    try:
        plan = Plan.from_json(content)
        told = {entry["name"]: (entry["op"], entry["shapes"]) for entry in content["operators"]}
        parameters = {key: tuple(entry["shape"]) for key, entry in content["parameters"].items()}
    except (LookupError, ArithmeticError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise StrategyError(f"{name} is not a plan.json ({type(error).__name__}: {error}).") from None
    if plan.mesh.size != ranks:
        mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.axes)
        raise StrategyError(
            f"{name} is for a mesh of {plan.mesh.size} ranks ({mesh}), but this one has {ranks}; set world_size (and "
            "parallel.pipeline.stages) as in the run that made the plan, or plan anew."
        )
    _check_operators(plan, told, parameters, graph, name)
    _check_slices(plan, graph, name)
    return plan


def _check_operators(
    plan: Plan,
    told: Mapping[str, tuple[str, list[list[int]]]],
    parameters: Mapping[str, tuple[int, ...]],
    graph: OperatorGraph,
    name: str,
) -> None:
    other = "so it belongs to another model; plan anew."
    for operator in graph.operators:
        if operator.name not in plan.operators or operator.name not in told:
            raise StrategyError(f"{name} has no operator {operator.where}, {other}")
        op, shapes = told[operator.name]
        if op != operator.op:
            raise StrategyError(f"{name}: operator {operator.name} is {op} there and {operator.op} here, {other}")
        own = [list(spec.shape) for spec in graph.operand_specs(operator)]
        if shapes != own:
            raise StrategyError(
                f"{name}: operator {operator.where} works on shapes {_text(shapes)} there and {_text(own)} here; plan "
                "anew, or choose the sizes of model and batch as in the run that made the plan."
            )
    for extra in sorted(plan.operators.keys() - graph.by_name.keys()):
        raise StrategyError(f"{name} has an operator {extra} that this model lacks, {other}")
    for source in graph.sources:
        layouts = plan.inputs if source.kind == "input" else plan.tensors
        if source.name not in layouts or len(layouts[source.name].dims) != len(source.spec.shape):
            raise StrategyError(
                f"{name} does not say how {source.kind} {source.name} {source.spec.shape} lies, {other}"
            )
        if source.kind == "parameter" and parameters.get(source.name) != source.spec.shape:
            raise StrategyError(
                f"{name}: parameter {source.name} is {parameters.get(source.name)} there and {source.spec.shape} here, "
                f"{other}"
            )


def _check_slices(plan: Plan, graph: OperatorGraph, name: str) -> None:
    for operator in graph.operators:
        assignment, sharding = plan.operators[operator.name].assignment, rule_of(operator, graph)
        axes = [axis for used in assignment.values() for axis in used]
        known = set(axes) <= set(plan.mesh.names) and len(set(axes)) == len(axes)
        if not known or not sharding.legal(assignment, plan.mesh):
            raise StrategyError(
                f"{name} slices {operator.where} as {dict(assignment)}, which its rule does not allow on the mesh "
                f"{dict(plan.mesh.axes)}; the file was changed, or made by another version; plan anew."
            )


def _text(shapes: list[list[int]]) -> str:
    return ", ".join("x".join(map(str, shape)) or "()" for shape in shapes)
