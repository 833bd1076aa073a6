"""A case as text: sources with shapes and layouts, operators with their calls and strategies, and the line that repeats
it."""

from __future__ import annotations

from collections.abc import Mapping

from strategies.core.graph import Operator, Ref, rewrite
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import OperatorPlan
from strategies.rules import rule_of
from tests.fuzz.cases import Case


def listing(case: Case, failure: str) -> str:
    """The description of a case, one line per source and operator."""
    mesh, plan = case.plan.mesh, case.plan
    lines = [f"# seed {case.seed}: {failure}", f"# mesh {dict(mesh.axes)}{_sharded(case)}"]
    layouts = {**plan.inputs, **plan.tensors}
    for source in case.graph.sources:
        kind = source.kind if source.kind != "parameter" or source.trainable else "frozen parameter"
        lines.append(
            f"{source.id} = {kind} {source.spec.dtype}{list(source.spec.shape)}{_layout_of(layouts[source.name])}"
        )
    for operator in case.graph.operators:
        lines.append(_line(operator, plan.operators[operator.name], mesh))
        known = rule_of(operator, case.graph).known
        lines[-1] += "" if known else "  # no rule: replicated"
    lines.append(f"return {', '.join(map(_name, case.graph.outputs))}")
    lines.append(f"# again: python -m tests.fuzz --only {case.seed}")
    return "\n".join(lines)


def _sharded(case: Case) -> str:
    return ", sharded optimizer" if case.sharded_optimizer else ""


def _name(ref: Ref) -> str:
    return f"{ref.id}[{ref.index}]" if ref.index else ref.id


def _layout_of(layout: Layout) -> str:
    return f"  # layout {layout}" if layout.axes else ""


def _line(operator: Operator, planned: OperatorPlan, mesh: Mesh) -> str:
    show = lambda leaf: _Name(_name(leaf)) if isinstance(leaf, Ref) else leaf  # noqa: E731
    arguments = [repr(rewrite(value, show)) for value in operator.args]
    arguments += [f"{key}={rewrite(value, show)!r}" for key, value in operator.kwargs]
    shapes = ", ".join(f"{spec.dtype}{list(spec.shape)}" for spec in operator.results)
    text = f"{operator.id} = {operator.target}({', '.join(arguments)})  # {shapes}"
    if planned.assignment:
        text += f", sliced {_slices(planned.assignment)}"
    if planned.outputs is not None and any(layout.axes for layout in planned.outputs):
        text += f", handed on {', '.join(map(str, planned.outputs))}"
    return text


def _slices(assignment: Mapping[str, tuple[str, ...]]) -> str:
    return ", ".join(f"{factor} by {'*'.join(axes)}" for factor, axes in assignment.items())


class _Name(str):
    """A name printed in an argument list without quotation marks."""

    def __repr__(self) -> str:
        return str(self)
