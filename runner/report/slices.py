"""Which slice of a tensor every rank holds: parameters, buffers, batch entries and operator results, under the plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from runner.errors import ConfigError
from runner.planning.lowering import pipeline_groups
from runner.planning.prepare import Prepared
from strategies.core.addressing import addresses
from strategies.core.errors import closest
from strategies.core.graph import OperatorGraph, TensorSpec
from strategies.core.layout import Layout
from strategies.core.plan import Plan
from strategies.rules import rule_of


@dataclass(frozen=True)
class _Tensor:
    """`known` are all names that mean it; `stage` is None without a pipeline."""

    name: str
    kind: str
    spec: TensorSpec
    layout: Layout
    known: tuple[str, ...]
    stage: int | None


def slices(prepared: Prepared, pattern: str) -> str:
    """A table per tensor that `pattern` means (a name or globs): for every rank the start and stop of its slice of each
    dim, and the axes over which it holds a term of a sum. Raises ConfigError for a pattern that means none."""
    assert prepared.graph is not None and prepared.plan is not None
    tensors: list[_Tensor] = []
    for stage in prepared.stages:
        tensors += _tensors(stage.graph, stage.plan, stage.number)
    if not prepared.stages:
        tensors += _tensors(prepared.graph, prepared.plan, None)
    chosen = [tensor for tensor in tensors if any(fnmatchcase(name, pattern) for name in tensor.known)]
    if not chosen:
        names = [name for tensor in tensors for name in tensor.known]
        raise ConfigError(
            "MW211",
            f"explain.slices = {pattern!r} is no parameter, buffer, batch entry or operator of the model."
            f"{closest(pattern, names)}",
        )
    mesh, zero = prepared.plan.mesh, prepared.config.parallel.zero.known
    lines = [f"mesh {' '.join(f'{axis} {size}' for axis, size in mesh.axes)}; slices are start:stop"]
    if zero == 3 and any(tensor.kind == "parameter" for tensor in chosen):
        lines.append("ZeRO stage 3 divides what is shown of a parameter among the ranks that hold the same")
    return "\n\n".join(["\n".join(lines), *("\n".join(_table(prepared, tensor)) for tensor in chosen)])


def _tensors(graph: OperatorGraph, plan: Plan, stage: int | None) -> Iterator[_Tensor]:
    for source in graph.sources:
        if source.kind == "input":
            if source.name in plan.inputs:
                layout, known = plan.inputs[source.name], (source.name, f"input.{source.name}")
                yield _Tensor(source.name, "entry of a micro-batch", source.spec, layout, known, stage)
        elif source.name in plan.tensors:
            yield _Tensor(source.name, source.kind, source.spec, plan.tensors[source.name], (source.name,), stage)
    for operator in graph.operators:
        planned = plan.operators[operator.name]
        layouts = planned.outputs or rule_of(operator, graph).result_layouts(planned.assignment)
        number = operator.name.partition("@")[2]
        names = tuple(dict.fromkeys((operator.name, *addresses(operator))))
        names += tuple(f"{name}@{number}" for name in names if number and "@" not in name)
        for index, (spec, layout) in enumerate(zip(operator.results, layouts, strict=True)):
            several = f" {index}" if len(operator.results) > 1 else ""
            yield _Tensor(operator.name, f"result{several} of {operator.where}", spec, layout, names, stage)


def _table(prepared: Prepared, tensor: _Tensor) -> Iterator[str]:
    assert prepared.plan is not None
    mesh, shape = prepared.plan.mesh, tensor.spec.shape
    first = 0 if tensor.stage is None else tensor.stage % pipeline_groups(prepared.config) * mesh.size
    held = "" if tensor.stage is None else f", stage {tensor.stage}"
    yield f"{tensor.name} {list(shape)} {tensor.spec.dtype}, {tensor.kind}{held}"
    partial = " ".join(mesh.sorted(tensor.layout.partial)) or "-"
    rows = [("rank", *(f"dim {dim}" for dim in range(len(shape))), "partial over")]
    for rank in range(mesh.size):
        block = tensor.layout.block(shape, mesh, rank)
        rows.append((str(first + rank), *(f"{start}:{stop}" for start, stop in block), partial))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
