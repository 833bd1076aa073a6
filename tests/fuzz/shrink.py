"""From a failing case to a minimal one: fewer operators and outputs, a smaller mesh, fewer slices.

Greedy: of all smaller neighbours of a case the first that still fails takes its place, until none does. A neighbour
fails if it fails in the same way (wrong numbers, or the same kind of error).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from strategies.core.graph import Kind, Operator, OperatorGraph, Ref, Source, rewrite
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import OperatorPlan, Plan
from strategies.rules import rule_of
from tests.fuzz.cases import Case, Refused, eager, failure

SECONDS = 120.0
"""Time limit of shrinking in seconds."""


def shrink(case: Case, fails: Callable[[Case], str | None] = failure, seconds: float = SECONDS) -> tuple[Case, str]:
    """A smaller case that fails in the same way, and how it fails."""
    found = fails(case)
    if found is None:
        raise ValueError("The case does not fail.")
    until, kind = time.monotonic() + seconds, _kind(found)
    progress = True
    while progress and time.monotonic() < until:
        progress = False
        for smaller in _smaller(case):
            try:
                outcome = fails(smaller)
            except Refused:
                continue
            if outcome is not None and _kind(outcome) == kind:
                case, found, progress = smaller, outcome, True
                break
            if time.monotonic() > until:
                break
    return case, found


def _kind(failure: str) -> str:
    return "wrong" if " differs by " in failure else failure.partition(":")[0]


def _smaller(case: Case) -> Iterator[Case]:
    """Neighbours of a case, the greatest steps first."""
    graph = case.graph
    if len(graph.outputs) > 1:
        yield from (_trimmed(case, (ref,)) for ref in graph.outputs)
        yield from (_trimmed(case, tuple(o for o in graph.outputs if o != ref)) for ref in graph.outputs)
    yield from filter(None, (_starting_at(case, operator) for operator in graph.operators))
    yield from _ended(case)
    yield from (_without_axis(case, axis) for axis, size in case.plan.mesh.axes if size > 1)
    yield from (_with_half(case, axis) for axis, size in case.plan.mesh.axes if size > 2 and size % 2 == 0)
    if case.sharded_optimizer:
        yield replace(case, sharded_optimizer=False)
    yield from _less_sliced(case)
    yield from (_fixed(case, source) for source in graph.sources if source.trainable)


def _trimmed(case: Case, outputs: tuple[Ref, ...]) -> Case:
    """The part of a case that these outputs need."""
    wanted, kept = {ref.id for ref in outputs} | {ref.id for _, ref in case.graph.updates}, []
    for operator in reversed(case.graph.operators):
        if operator.id in wanted:
            kept.append(operator)
            wanted.update(ref.id for ref in operator.operands)
    wanted |= {buffer for buffer, _ in case.graph.updates}
    sources = tuple(source for source in case.graph.sources if source.id in wanted)
    graph = replace(case.graph, sources=sources, operators=tuple(reversed(kept)), outputs=outputs)
    return _restricted(case, graph, case.values)


def _restricted(case: Case, graph: OperatorGraph, values: Mapping[str, Tensor]) -> Case:
    """A case for another graph with the same plan, restricted to that graph."""
    names, plan = {source.name for source in graph.sources}, case.plan
    lying = {**plan.inputs, **plan.tensors}
    layouts = {s.name: lying.get(s.name, Layout.replicated(len(s.spec.shape))) for s in graph.sources}
    inputs = {s.name: layouts[s.name] for s in graph.of_kind("input")}
    tensors = {s.name: layouts[s.name] for s in graph.sources if s.kind != "input"}
    operators = {operator.name: plan.operators[operator.name] for operator in graph.operators}
    kept = {name: value for name, value in values.items() if name in names}
    return replace(case, graph=graph, values=kept, plan=Plan(plan.mesh, operators, inputs, tensors))


def _starting_at(case: Case, operator: Operator) -> Case | None:
    """The case with the operator's results as sources; their producers are no longer needed."""
    try:
        computed = _values(case, operator)
    except Refused:
        return None
    graph, fresh, values = case.graph, {}, dict(case.values)
    sources = list(graph.sources)
    for index, (spec, value) in enumerate(zip(operator.results, computed, strict=True)):
        id = f"{operator.id}_{index}"
        fresh[Ref(operator.id, index)] = Ref(id)
        kind: Kind = "parameter" if spec.floating else "input"
        sources.append(Source(id, kind, id, spec, spec.floating))
        values[id] = value
    operators = tuple(_renamed(o, fresh) for o in graph.operators if o is not operator)
    outputs = tuple(ref for ref in graph.outputs if ref not in fresh)
    started = replace(graph, sources=tuple(sources), operators=operators, outputs=outputs)
    return _trimmed(_restricted(case, started, values), outputs)


def _renamed(operator: Operator, fresh: Mapping[Ref, Ref]) -> Operator:
    change = lambda leaf: fresh.get(leaf, leaf) if isinstance(leaf, Ref) else leaf  # noqa: E731
    return replace(operator, args=rewrite(operator.args, change), kwargs=rewrite(operator.kwargs, change))


def _values(case: Case, operator: Operator) -> tuple[Tensor, ...]:
    """An operator's results on one device."""
    refs = tuple(Ref(operator.id, i) for i in range(len(operator.results)))
    return tuple(value.clone() for value in eager(replace(case, graph=replace(case.graph, outputs=refs))).outputs)


def _ended(case: Case) -> Iterator[Case]:
    """Without one operator that produces outputs: its operands become outputs."""
    made = {ref.id for ref in case.graph.outputs}
    computed = {operator.id for operator in case.graph.operators}
    for operator in case.graph.operators:
        before = [ref for ref in operator.operands if ref.id in computed]
        if operator.id in made and before:
            rest = [ref for ref in case.graph.outputs if ref.id != operator.id]
            yield _trimmed(case, tuple(dict.fromkeys([*rest, *before])))


def _replanned(case: Case, mesh: Mesh, keep: Callable[[str], bool]) -> Case:
    """The case on another mesh, sliced only by the axes to keep."""

    def lying(layout: Layout) -> Layout:
        return Layout(tuple(tuple(axis for axis in dim if keep(axis)) for dim in layout.dims))

    operators = {
        name: OperatorPlan(
            {f: left for f, axes in plan.assignment.items() if (left := tuple(axis for axis in axes if keep(axis)))},
            plan.origin,
            None if plan.outputs is None else tuple(map(lying, plan.outputs)),
        )
        for name, plan in case.plan.operators.items()
    }
    inputs = {name: lying(layout) for name, layout in case.plan.inputs.items()}
    tensors = {name: lying(layout) for name, layout in case.plan.tensors.items()}
    return replace(case, plan=Plan(mesh, operators, inputs, tensors))


def _without_axis(case: Case, gone: str) -> Case:
    mesh = Mesh(tuple((axis, size) for axis, size in case.plan.mesh.axes if axis != gone))
    return _replanned(case, mesh, lambda axis: axis != gone)


def _with_half(case: Case, name: str) -> Case:
    """Half as many slices over one axis; strategies that become illegal (padded slices) are dropped."""
    mesh = Mesh(tuple((axis, size // 2 if axis == name else size) for axis, size in case.plan.mesh.axes))
    found = _replanned(case, mesh, lambda _: True)
    operators = {
        o.name: planned if rule_of(o, case.graph).legal(planned.assignment, mesh) else replace(planned, assignment={})
        for o in case.graph.operators
        for planned in [found.plan.operators[o.name]]
    }
    return replace(found, plan=replace(found.plan, operators=operators))


def _less_sliced(case: Case) -> Iterator[Case]:
    """One operator, result or source sliced by one axis less."""
    plan = case.plan
    for name, planned in plan.operators.items():
        changes = [replace(planned, outputs=None)] if planned.outputs is not None else []
        for factor, axes in planned.assignment.items():
            for gone in axes:
                left = {**planned.assignment, factor: tuple(axis for axis in axes if axis != gone)}
                changes.append(replace(planned, assignment={f: kept for f, kept in left.items() if kept}))
        for changed in changes:
            yield replace(case, plan=replace(plan, operators={**plan.operators, name: changed}))
    for field in ("inputs", "tensors"):
        layouts: Mapping[str, Layout] = getattr(plan, field)
        for name, layout in layouts.items():
            for dim, axes in enumerate(layout.dims):
                for gone in axes:
                    dims = list(layout.dims)
                    dims[dim] = tuple(axis for axis in axes if axis != gone)
                    yield replace(case, plan=replace(plan, **{field: {**layouts, name: Layout(tuple(dims))}}))


def _fixed(case: Case, source: Source) -> Case:
    """One trainable parameter fewer."""
    sources = tuple(replace(s, trainable=False) if s is source else s for s in case.graph.sources)
    return replace(case, graph=replace(case.graph, sources=sources))
