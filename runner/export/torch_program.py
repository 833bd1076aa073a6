"""A plan as a file of plain torch: the tables of a plan, in front of the functions of `plain_torch`.

DTensor propagates layouts from operator to operator by its own rules. So parameters and the batch are placed, and what
modules with parameters receive and return is laid out as in the plan; `changes` lists what the file cannot say.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from torch.distributed.tensor import Placement

from runner.export.changes import Change, of_optimizer, operand_layouts, sent
from runner.planning.clusters import cluster_of
from runner.planning.prepare import Prepared
from strategies.core.graph import Operator, OperatorGraph, Ref, modules_around
from strategies.core.layout import Layout
from strategies.core.plan import Plan
from strategies.cost.collectives import path_seconds
from strategies.resharding.path import resharding_path
from strategies.runtime.dtensors import GATHERED, placements

SKELETON = Path(__file__).with_name("plain_torch.py")
BEGIN, END = "# The plan\n", "# The end of the plan\n"
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def changes(prepared: Prepared) -> list[Change]:
    """What the exported program lays out otherwise than the plan; empty where it says all of it."""
    graph, plan = prepared.graph, prepared.plan
    assert graph is not None and plan is not None
    return [*_of_sources(prepared, graph, plan), *_of_operators(prepared, graph, plan), *of_optimizer(prepared, {0})]


def program(prepared: Prepared, title: str) -> str:
    """The file."""
    graph, plan = prepared.graph, prepared.plan
    assert graph is not None and plan is not None
    received, returned = _boundaries(graph, plan)
    sources = [source for source in graph.sources if source.kind == "parameter"]
    parameters = {one.name: (plan.tensors[one.name], one.spec.shape) for one in sources}
    inputs = {one.name: (plan.inputs[one.name], one.spec.shape) for one in graph.of_kind("input")}
    batch = [_text(_placed(*inputs[name], plan)) for name in prepared.names]
    tables = [
        f"MESH: dict[str, int] = {dict(plan.mesh.axes)!r}".replace("'", '"'),
        f"BATCH: tuple[Placed, ...] = ({', '.join(batch)},)  # {', '.join(prepared.names)}",
        _table("PARAMETERS", {name: _placed(*entry, plan) for name, entry in parameters.items()}),
        _table("INPUTS", {name: _placed(*entry, plan) for name, entry in received.items()}),
        _table("OUTPUTS", {name: _placed(*entry, plan) for name, entry in returned.items()}),
    ]
    head, rest = SKELETON.read_text(encoding="utf-8").split(BEGIN)
    _, tail = rest.split(END)
    head = head.replace('"""A plan of Meshwright in plain torch:', f'"""{title}, in plain torch:', 1)
    return head + "\n".join(tables) + "\n" + tail


def _placed(layout: Layout, shape: tuple[int, ...], plan: Plan) -> tuple[Placement, ...]:
    """The placements of a layout; those of a replicated tensor where it has none."""
    found = placements(layout, shape, plan.mesh) or placements(Layout.replicated(len(shape)), shape, plan.mesh)
    assert found is not None
    return found


def _text(placed: Iterable[Placement]) -> str:
    words = [f"Shard({one.dim})" if one.is_shard() else "Replicate()" for one in placed]  # type: ignore[attr-defined]
    return f"({', '.join(words)}{',' * (len(words) == 1)})"


def _table(name: str, entries: Mapping[str, tuple[Placement, ...]]) -> str:
    """A table of the file; layers whose entries are the same share one."""
    by_layer: dict[str, dict[str, str]] = defaultdict(dict)
    for key, placed in entries.items():
        by_layer[NUMBER.sub("*", key)][key] = _text(placed)
    lines = []
    for glob, found in by_layer.items():
        shared = {glob: next(iter(found.values()))} if len({*found.values()}) == 1 else found
        lines += [f"    {key!r}: {text},".replace("'", '"') for key, text in shared.items()]
    return "\n".join([f"{name}: dict[str, Placed] = {{", *lines, "}"])


Boundary = tuple[Layout, tuple[int, ...]]
"""A layout, and the global shape."""


def _boundaries(graph: OperatorGraph, plan: Plan) -> tuple[dict[str, Boundary], dict[str, Boundary]]:
    """What modules with parameters of their own receive and return, by path; those with one value each way."""
    owners = {source.name.rpartition(".")[0] for source in graph.sources if source.kind == "parameter"}
    owners |= {alias.rpartition(".")[0] for source in graph.sources for alias in source.aliases}
    tensors = {source.id for source in graph.sources if source.kind != "input"}
    inside: dict[str, list[Operator]] = defaultdict(list)
    for operator in graph.operators:
        for path in owners.intersection(modules_around(operator.path)):
            inside[path].append(operator)
    received, returned = {}, {}
    for path, operators in inside.items():
        made = {operator.id for operator in operators}
        taken = [
            (ref, layout)
            for operator in operators
            for ref, layout in zip(operator.operands, operand_layouts(operator, graph, plan), strict=True)
            if ref.id not in made and ref.id not in tensors
        ]
        if len({ref for ref, _ in taken}) == 1:
            ref, layout = taken[0]
            received[path] = layout, graph.specs[ref].shape
        used = list(_uses_outside(graph, plan, made))
        if len({ref for ref, _ in used}) == 1:
            ref, layout = used[0]
            returned[path] = layout, graph.specs[ref].shape
    return received, returned


def _uses_outside(graph: OperatorGraph, plan: Plan, made: set[str]) -> Iterator[tuple[Ref, Layout]]:
    """Every use of what the operators `made` return by others, with the layout in which it is used."""
    for operator in graph.operators:
        if operator.id not in made:
            layouts = operand_layouts(operator, graph, plan)
            yield from ((ref, layout) for ref, layout in zip(operator.operands, layouts, strict=True) if ref.id in made)


def _of_sources(prepared: Prepared, graph: OperatorGraph, plan: Plan) -> Iterator[Change]:
    cluster = cluster_of(prepared.config, prepared.device, prepared.world_size)
    for source in graph.sources:
        shape, kind = source.spec.shape, source.kind
        if kind == "constant":
            continue
        layout = (plan.inputs if kind == "input" else plan.tensors)[source.name]
        whole = Layout.replicated(len(shape))
        if layout == whole or (kind != "buffer" and placements(layout, shape, plan.mesh) is not None):
            continue
        path = resharding_path(layout, whole, shape, plan.mesh)
        more = source.spec.elements - layout.local_elements(shape, plan.mesh)
        seconds = 0.0 if kind != "input" else path_seconds(path, source.spec.item_bytes, plan.mesh, cluster)
        yield Change(kind, source.name, str(layout), str(whole), more * source.spec.item_bytes, seconds)


def _of_operators(prepared: Prepared, graph: OperatorGraph, plan: Plan) -> Iterator[Change]:
    """Operators with an operand in a layout that no DTensor has, or that DTensor does not keep there."""
    cluster, mesh = cluster_of(prepared.config, prepared.device, prepared.world_size), plan.mesh
    for operator in graph.operators:
        for ref, layout in zip(operator.operands, operand_layouts(operator, graph, plan), strict=True):
            spec, dims = graph.specs[ref], list(layout.dims)
            for dim in GATHERED.get(operator.label, ()) if len(dims) > 1 else ():
                dims[dim] = ()
            kept = Layout(tuple(dims))
            if placements(kept, spec.shape, mesh) is None:
                kept = Layout.replicated(len(dims))
            if kept != layout:
                yield sent("operator", operator.name, layout, kept, spec, mesh, cluster)
