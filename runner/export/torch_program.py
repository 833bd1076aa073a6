"""A plan as a file of plain torch: the tables of a plan, in front of the functions of `plain_torch`.

DTensor propagates layouts from operator to operator by its own rules. So parameters and the batch are placed, and what
modules with parameters receive and return is laid out as in the plan; `changes` lists what the file cannot say.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from runner.export.changes import Change, of_optimizer, sent
from runner.planning.clusters import cluster_of
from runner.planning.prepare import Prepared
from strategies.core.graph import OperatorGraph, Source, TensorSpec
from strategies.core.layout import Layout, stored
from strategies.core.plan import Plan
from strategies.cost.collectives import path_seconds
from strategies.planner.boundaries import boundaries
from strategies.planner.declared_layouts import operand_layouts
from strategies.resharding.path import resharding_path
from strategies.rules.packed import taken_apart, unsliced_dims
from strategies.runtime.dtensors import OPAQUE, gathered, placements, unknown

SKELETON = Path(__file__).with_name("plain_torch.py")
BEGIN, END = "# The plan\n", "# The end of the plan\n"
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
BLOCK = re.compile(r"(?:(?:[^.]*[^.\d][^.]*\.)*\d+\.)?")
"""The layer of a list in which a parameter is; empty for others."""


def changes(prepared: Prepared) -> list[Change]:
    """What the exported program lays out otherwise than the plan; empty where it says all of it."""
    graph, plan = prepared.graph, prepared.plan
    assert graph is not None and plan is not None
    return [
        *_of_sources(prepared, graph, plan),
        *_of_dtypes(_sharded(prepared, graph, plan), graph, plan),
        *of_operators(prepared, graph, plan, stripes=in_stripes(prepared)),
        *of_optimizer(prepared, {0, 3}, replicas(graph, plan)),
    ]


def in_stripes(prepared: Prepared) -> bool:
    """Whether the target says slices of every section; `fully_shard` would slice their rows again."""
    return prepared.config.parallel.zero.known != 3


def replicas(graph: OperatorGraph, plan: Plan) -> tuple[str, ...]:
    """The axes over which no parameter is sliced, so that `fully_shard` may slice all of them: the most ranks along
    neighbouring axes, since it (torch 2.13) flattens no others."""
    mesh, used = plan.mesh, {axis for one in graph.of_kind("parameter") for axis in plan.tensors[one.name].axes}
    runs = [tuple(run) for free, run in groupby(mesh.names, lambda axis: axis not in used) if free]
    most = max(runs, key=mesh.product, default=())
    return most if mesh.product(most) > 1 else ()


def _sharded(prepared: Prepared, graph: OperatorGraph, plan: Plan) -> tuple[str, ...]:
    return replicas(graph, plan) if prepared.config.parallel.zero.known == 3 else ()


def program(prepared: Prepared, title: str) -> str:
    """The file."""
    graph, plan = prepared.graph, prepared.plan
    assert graph is not None and plan is not None
    received, returned = boundaries(graph, plan)
    laid_out = partial(placed, prepared)
    sources = [source for source in graph.sources if source.kind == "parameter"]
    parameters = {one.name: laid_out(plan.tensors[one.name], one.spec) for one in sources}
    inputs = {one.name: laid_out(plan.inputs[one.name], one.spec) for one in graph.of_kind("input")}
    batch = [_text(inputs[name]) for name in prepared.names]
    tables = [
        f"MESH: dict[str, int] = {dict(plan.mesh.axes)!r}".replace("'", '"'),
        f"BATCH: tuple[Placed, ...] = ({', '.join(batch)},)  # {', '.join(prepared.names)}",
        _table("PARAMETERS", parameters),
        _table("INPUTS", {name: laid_out(one.layout, graph.specs[one.ref]) for name, one in received.items()}),
        _table("OUTPUTS", {name: laid_out(one.layout, graph.specs[one.ref]) for name, one in returned.items()}),
    ]
    names = tuple(sorted({name for found in unknown(graph, prepared.device).values() for name in found}))
    tables.append(f"SHARDED: tuple[str, ...] = {_sharded(prepared, graph, plan)!r}".replace("'", '"'))
    tables.append(f"REPLICATED: tuple[str, ...] = {names!r}".replace("'", '"'))
    return filled(SKELETON, '"""A plan of Meshwright', f'"""{title},', tables)


def filled(skeleton: Path, begin: str, title: str, tables: Sequence[str]) -> str:
    """A skeleton with a plan's tables, and another begin of its docstring."""
    head, rest = skeleton.read_text(encoding="utf-8").split(BEGIN)
    _, tail = rest.split(END)
    return head.replace(begin, title, 1) + "\n".join(tables) + "\n" + tail


def placed(prepared: Prepared, layout: Layout, spec: TensorSpec) -> tuple[Placement, ...]:
    """The placements of a layout, of blocks where they cannot be those of stripes; those of a replicated tensor where
    it has none."""
    assert prepared.plan is not None
    mesh, stripes = prepared.plan.mesh, in_stripes(prepared)
    for one in (stored(layout, spec, mesh), layout, Layout.replicated(len(spec.shape))):
        if (found := placements(one, spec.shape, mesh, stripes=stripes)) is not None:
            break
    assert found is not None
    return found


def _text(placed: Iterable[Placement]) -> str:
    words = [_word(one) for one in placed]
    return f"({', '.join(words)}{',' * (len(words) == 1)})"


def _word(placed: Placement) -> str:
    if isinstance(placed, _StridedShard):
        return f"_StridedShard({placed.dim}, split_factor={placed.split_factor})"
    return f"Shard({placed.dim})" if isinstance(placed, Shard) else "Replicate()"


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


def _of_sources(prepared: Prepared, graph: OperatorGraph, plan: Plan) -> Iterator[Change]:
    cluster = cluster_of(prepared.config, prepared.device, prepared.world_size)
    for source in graph.sources:
        shape, kind = source.spec.shape, source.kind
        if kind == "constant":
            continue
        layout = (plan.inputs if kind == "input" else plan.tensors)[source.name]
        replicated = Layout.replicated(len(shape))
        if layout == replicated or (kind != "buffer" and placements(layout, shape, plan.mesh) is not None):
            continue
        path = resharding_path(layout, replicated, shape, plan.mesh)
        more = source.spec.elements - layout.local_elements(shape, plan.mesh)
        seconds = 0.0 if kind != "input" else path_seconds(path, source.spec.item_bytes, plan.mesh, cluster)
        yield Change(kind, source.name, str(layout), str(replicated), more * source.spec.item_bytes, seconds)


def _of_dtypes(sharded: tuple[str, ...], graph: OperatorGraph, plan: Plan) -> Iterator[Change]:
    """Parameters that `fully_shard` leaves complete, since a module has them beside those of another dtype."""
    by_part: dict[str, list[Source]] = defaultdict(list)
    trained = [source for source in graph.of_kind("parameter") if source.trainable and source.spec.shape]
    for source in trained if sharded else ():
        by_part[BLOCK.match(source.name)[0]].append(source)  # type: ignore[index]
    for part in by_part.values():
        sizes: Counter[str] = Counter()
        for source in part:
            sizes[source.spec.dtype] += source.spec.elements
        usual = max(sizes, key=lambda one: sizes[one])
        for source in (one for one in part if one.spec.dtype != usual):
            module = source.name[: source.name.rfind(".") + 1]
            beside = [one for one in trained if one.name.startswith(module)]
            if any(one.spec.dtype != source.spec.dtype or "." in one.name.removeprefix(module) for one in beside):
                more = plan.local_bytes(source) * (1 - 1 / plan.mesh.product(sharded))
                axes = f"sliced over {', '.join(sharded)}"
                yield Change("parameter", source.name, axes, f"on all ranks, in {source.spec.dtype}", int(more), 0.0)


def of_operators(prepared: Prepared, graph: OperatorGraph, plan: Plan, *, stripes: bool = False) -> Iterator[Change]:
    """Operators with an operand in a layout that no DTensor has, or that DTensor does not keep there, as for those that
    it does not know; modules that are one operator, and lines that the graph computes by other operators, since DTensor
    has none whose shapes values decide and runs no transforms.
    `stripes`: sections of one size are taken apart as they are."""
    cluster, mesh = cluster_of(prepared.config, prepared.device, prepared.world_size), plan.mesh
    unsliced = gathered(graph, prepared.device)
    for line in sorted(graph.rewritten):
        yield Change("operator", line, "other operators", "operators of DTensor, which may lack them", 0, 0.0)
    for operator in graph.operators:
        if operator.op in OPAQUE:
            yield Change("operator", operator.name, "one operator", "operators of DTensor, which may lack them", 0, 0.0)
        specs, wanted = graph.operand_specs(operator), unsliced.get(operator.label, ())
        layouts = operand_layouts(operator, graph, plan)
        for position, (layout, spec) in enumerate(zip(layouts, specs, strict=True)):
            dims = list(layout.dims)
            for dim in unsliced_dims(operator, specs, position, wanted):
                dims[dim] = ()
            packed = spec.packed
            if packed is not None and not stripes and taken_apart(operator, specs, packed) is not None:
                dims[packed.dim] = ()
            kept = Layout(tuple(dims))
            if placements(kept, spec.shape, mesh) is None:
                kept = Layout.replicated(len(dims))
            if kept != layout:
                yield sent("operator", operator.name, layout, kept, spec, mesh, cluster)
