"""The program as text: before slicing (every operator with its strategies) and after (local shapes, collectives and
their cause)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from strategies.core.graph import Operator, OperatorGraph, Ref, TensorSpec, rewrite
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import Plan
from strategies.core.program import Compute, Copy, Fused, Program, RankValue, Redistribute, Start, Wait
from strategies.core.steps import ReshardingPath
from strategies.rules import rule_of


def begin(graph: OperatorGraph, plan: Plan) -> str:
    """`step_parallel_begin.ir`: the global program with in and out strategies, module paths and source lines."""
    lines = [f"# mesh {dict(plan.mesh.axes)}, {plan.mesh.size} ranks"]
    for source in graph.sources:
        layout = plan.inputs[source.name] if source.kind == "input" else plan.tensors[source.name]
        lines.append(f"%{source.id} = {source.kind} {source.name} : {_spec(source.spec)}  layout {layout}")
    for operator in graph.operators:
        results = ", ".join(_spec(spec) for spec in operator.results)
        lines.append(
            f"%{operator.id} = {operator.target}({_arguments(operator.args, dict(operator.kwargs))}) : {results}"
        )
        lines.append(f"    name {operator.name}  module {operator.module or '-'}  {_strategies(operator, graph, plan)}")
        lines.append(f"    chosen {plan.operators[operator.name].origin}  source {operator.source or '-'}")
    lines += [f"%{buffer} <- {_word(value)}" for buffer, value in graph.updates]
    lines.append(f"return {', '.join(f'%{ref.id}' for ref in graph.outputs)}")
    return "\n".join(lines) + "\n"


def end(graph: OperatorGraph, plan: Plan, program: Program, rank: int) -> str:
    """`step_parallel_end.ir` of `rank`: what it runs, with local shapes, the strategies and the source line of every
    operator; collectives name their group and the operator behind them."""
    mesh = program.mesh
    lines = [
        f"# rank {rank} of {mesh.size}, mesh {dict(mesh.axes)}, coordinate "
        f"{tuple(mesh.coordinate(rank, a) for a in mesh.names)}"
    ]
    for source in program.sources:
        shape = program.layouts[source.id].local_shape(source.spec.shape, mesh)
        lines.append(f"%{source.id} = {source.kind} {source.name} : {_spec(TensorSpec(shape, source.spec.dtype))}")
    for instruction in program.instructions:
        if isinstance(instruction, Compute):
            lines += _compute(instruction, graph, plan, mesh, rank)
        elif isinstance(instruction, Start):
            lines.append(f"%{instruction.id} = start({', '.join(map(_word, instruction.operands))})")
        elif isinstance(instruction, Copy):
            side, use = "host" if instruction.host else "device", instruction.operator or "an output"
            lines.append(f"%{instruction.id} = copy_to_{side}({_word(instruction.value)})  for {use}")
        else:
            lines += [f"# wait for %{instruction.start}"] if isinstance(instruction, Wait) else []
            lines += _redistribution(instruction.of if isinstance(instruction, Wait) else instruction, mesh, rank)
    for name, axes in program.reductions.items():
        if axes:
            lines.append(
                f"# gradient of {name}: sum over {'*'.join(axes)}, group {mesh.group(rank, axes)}, after backward"
            )
    lines += [f"%{buffer} <- {_word(value)}" for buffer, value in program.updates]
    lines.append(f"return {', '.join(f'%{ref.id}' for ref in program.outputs)}")
    return "\n".join(lines) + "\n"


def _compute(instruction: Compute, graph: OperatorGraph, plan: Plan, mesh: Mesh, rank: int) -> list[str]:
    operator = graph.by_name[instruction.operator]
    assignment, sharding = plan.operators[operator.name].assignment, rule_of(operator, graph)
    operands = zip(sharding.operand_layouts(assignment), graph.operand_specs(operator), strict=True)
    results = zip(sharding.result_layouts(assignment), operator.results, strict=True)
    into, out = (", ".join(_local(layout, spec, mesh) for layout, spec in pairs) for pairs in (operands, results))
    local = lambda leaf: leaf.of(mesh, rank) if isinstance(leaf, RankValue) else leaf  # noqa: E731
    arguments = _arguments(rewrite(instruction.args, local), rewrite(dict(instruction.kwargs), local))
    return [
        f"%{instruction.id} = {instruction.target}({arguments})",
        f"    of {operator.name}: ({into}) -> {out}{'  on the host' * instruction.host}",
        f"    {_strategies(operator, graph, plan)}  source {operator.source or '-'}",
    ]


def _strategies(operator: Operator, graph: OperatorGraph, plan: Plan) -> str:
    """The number of slices of each dim of the operands and of the results."""
    chosen, sharding = plan.operators[operator.name], rule_of(operator, graph)
    into = [layout.counts(plan.mesh) for layout in sharding.operand_layouts(chosen.assignment)]
    out = [layout.counts(plan.mesh) for layout in chosen.outputs or sharding.result_layouts(chosen.assignment)]
    return f"in_strategy {_counts(into)}  out_strategy {_counts(out)}"


def _redistribution(instruction: Redistribute | Fused, mesh: Mesh, rank: int) -> list[str]:
    if isinstance(instruction, Fused):
        names = [_word(Ref(instruction.id, index)).removeprefix("%") for index in range(len(instruction.parts))]
        parts = [replace(part, id=name) for part, name in zip(instruction.parts, names, strict=True)]
        head = f"# {len(parts)} redistributions by the same calls, %{instruction.id}"
        return [head, *(line for part in parts for line in _redistribution(part, mesh, rank))]
    use = f"operand {instruction.operand}" if instruction.operand >= 0 else "results"
    lines = [f"%{instruction.id} = redistribute(%{instruction.value.id})  for {use} of {instruction.operator}"]
    lines += _steps("forward", instruction.forward, instruction.spec, mesh, rank)
    if instruction.differentiable:
        lines += _steps("backward", instruction.backward, instruction.spec, mesh, rank)
        if instruction.scale != 1:
            lines.append(f"    backward: gradient times {instruction.scale:g}")
    return lines


def _steps(direction: str, path: ReshardingPath, spec: TensorSpec, mesh: Mesh, rank: int) -> list[str]:
    lines = []
    for step in path:
        group, sent = step.group(mesh, rank), step.elements(mesh, rank) * spec.item_bytes
        lines.append(
            f"    {direction}: {step}  {_local(step.before, spec, mesh)} -> {_local(step.after, spec, mesh)}"
            + (f"  group {group}, {sent} bytes sent" if len(group) > 1 else "")
        )
    return lines


def _arguments(args: Any, kwargs: dict[str, Any]) -> str:
    words = [repr(rewrite(arg, _word)) for arg in args]
    return ", ".join([*words, *(f"{name}={rewrite(value, _word)!r}" for name, value in kwargs.items())])


def _word(leaf: Any) -> _Word:
    if isinstance(leaf, Ref):
        return _Word(f"%{leaf.id}" + (f".{leaf.index}" if leaf.index else ""))
    return _Word(repr(leaf))


class _Word(str):
    """The printed form of a leaf, without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _spec(spec: TensorSpec) -> str:
    return f"{spec.dtype}[{','.join(map(str, spec.shape))}]"


def _local(layout: Layout, spec: TensorSpec, mesh: Mesh) -> str:
    return _spec(TensorSpec(layout.local_shape(spec.shape, mesh), spec.dtype)) + (" partial" if layout.partial else "")


def _counts(counts: list[tuple[int, ...]]) -> str:
    return "(" + ", ".join(f"({', '.join(map(str, count))})" for count in counts) + ")"
