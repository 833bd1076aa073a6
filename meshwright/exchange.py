"""Plans that others made, as plans here: priced, proven, explained, and compared with the best one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshwright.paths import path_of
from meshwright.plans import (
    Batch,
    Loss,
    Plan,
    config_of,
    entries_of,
    loss_module,
    planned,
    require_module,
    require_plan,
)
from runner.build.modules import target_names
from runner.commands.diff import differences
from runner.config.load import validated
from runner.config.origins import Origins
from runner.errors import ConfigError
from runner.export import autoparallel_placements
from strategies.capture.packed_weights import packed, sections_of
from strategies.core.addressing import segments_match
from strategies.core.graph import FusedSections, OperatorGraph, Source
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import Plan as OperatorPlans
from strategies.planner import module_styles
from strategies.planner.declared_layouts import Declared, declared_plan

_log = logging.getLogger("meshwright")

AXIS = "tp"
DECIDED = ("mode", "search", "plan", "strategies", "layouts", "set_data_parallel", "dataset_strategy")
"""Keys of the section `parallel` that say what a plan that is read says."""


def from_tp_plan(
    tp_plan: Mapping[str, Any] | str,
    module: nn.Module,
    batch: Batch,
    *,
    mesh: int | Mapping[str, int],
    ep_plan: Mapping[str, Any] | str | None = None,
    loss: Loss | None = None,
    **options: Any,
) -> Plan:
    """Read a plan by module: `tp_plan` of transformers, or the `parallelize_plan` of torch's `parallelize_module`.

    Args:
        tp_plan: {glob of modules or parameters: name of a style of transformers, or style of torch}; `auto`: that of
            the module, a model of transformers. A name counts before globs, of these the last. Of a style of torch the
            placements of the first input and output count.
        module: as for `meshwright.plan`.
        batch: as for `meshwright.plan`.
        loss: as for `meshwright.plan`.
        mesh: the number of ranks that share every module; or {axis: size} with the axis `tp` for them, whose other axes
            slice the batch.
        ep_plan: of transformers, {glob of experts or their parameters: name of a style}, or `auto`; over the same axis,
            so every rank has some of the experts, each complete. It replaces entries of `tp_plan` for the same modules.
        **options: `cluster`, `optimizer`, `seed`, `device`, `zero`, and further keys of the section `parallel`.

    Returns:
        The plan. What the entries leave open follows from the graph: operators take values as they come, and
        modules without an entry are replicated.

    Raises:
        ConfigError, StrategyError: a style without a layout here, an entry that matches nothing, or nothing that its
            style could slice, or a mesh without the axis.
    """
    require_module(module, "meshwright.from_tp_plan")
    by_expert = {} if ep_plan is None else _entries("ep_plan", ep_plan, module)
    given = by_expert if tp_plan == {} and by_expert else _entries("tp_plan", tp_plan, module)
    entries = module_styles.merged(given, by_expert)
    axes = {AXIS: mesh} if isinstance(mesh, int) else dict(mesh) if isinstance(mesh, Mapping) else {}
    if AXIS not in axes:
        raise ConfigError(
            "MW882",
            f"meshwright.from_tp_plan: the mesh {mesh!r} has no axis {AXIS!r}, the one that styles slice modules over; "
            f"name it so.",
        )

    def layouts(graph: OperatorGraph) -> Declared:
        return module_styles.declared(
            entries, graph, Mesh(tuple(axes.items())), (AXIS,), [name for name, _ in module.named_modules()]
        )

    return _declared(layouts, module, batch, axes, loss, options)


def _entries(name: str, given: Mapping[str, Any] | str, module: nn.Module) -> Mapping[str, Any]:
    """A plan by module; of `auto`, that of a model of transformers, whose family may have modules that it lacks.

    Raises:
        ConfigError: there is none, or it is empty.
    """
    found = given
    if given == "auto":
        names = [one for one, _ in (*module.named_modules(), *module.named_parameters())]
        own = dict(getattr(module, name, None) or {})
        found = {key: style for key, style in own.items() if any(segments_match(key, one) for one in names)}
    if not isinstance(found, Mapping) or not found or not all(isinstance(key, str) for key in found):
        example = {"tp_plan": '{"layers.*.attention.q_proj": "colwise"}', "ep_plan": '{"layers.*.up": "grouped_gemm"}'}
        raise ConfigError(
            "MW882",
            f"meshwright.from_tp_plan: there is no {name} to read; give a dict such as {example[name]}, or "
            f'"auto" with a model of transformers that has one.',
        )
    return found


def from_dtensor(
    sharded: nn.Module | Mapping[str, Any],
    module: nn.Module,
    batch: Batch,
    *,
    rows: str | Sequence[str] = (),
    mesh: Mapping[str, int] | None = None,
    loss: Loss | None = None,
    **options: Any,
) -> Plan:
    """Read the layouts of a module's DTensors: of `parallelize_module`, `fully_shard`, or made by hand.

    Args:
        sharded: the module that holds DTensors, or its state dict. Not collective: no tensor is sent.
        module: the same module without DTensors, whose hooks a capture could not follow; it may be on `meta`.
        batch: as for `meshwright.plan`.
        loss: as for `meshwright.plan`.
        rows: the axes of the device mesh that slice the batch, or the name of the only one. A parameter that is sliced
            over one of them, as by `fully_shard`, is gathered where it is used: ZeRO 3. Of a dim that was flattened
            from several axes, these, or its own name.
        mesh: {axis: size} of all ranks; None: the largest device mesh of any DTensor.
        **options: as for `from_tp_plan`.

    Returns:
        The plan. What modules receive and return follows from the graph; where a `parallelize_plan` says more,
        give that to `from_tp_plan`.

    Raises:
        ConfigError, StrategyError: there is no DTensor, one that the module lacks, or one on a mesh that is no part of
            the one given.
    """
    if not isinstance(sharded, nn.Module | Mapping):
        raise ConfigError("MW882", f"meshwright.from_dtensor: {sharded!r} is neither a module nor its state dict.")
    entries = dict(sharded.named_parameters()) if isinstance(sharded, nn.Module) else dict(sharded)
    tensors = {name: one for name, one in entries.items() if isinstance(one, DTensor)}
    if not tensors:
        raise ConfigError("MW882", "meshwright.from_dtensor: no parameter is a DTensor; shard the module before.")
    require_module(module, "meshwright.from_dtensor")
    own = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    for name, one in tensors.items():
        if name not in own or own[name].shape != one.shape:
            known = list(own[name].shape) if name in own else f"missing; its tensors are {', '.join(list(own)[:3])} ..."
            raise ConfigError(
                "MW882",
                f"meshwright.from_dtensor: {name} is a DTensor of shape {list(one.shape)}, and in the module {known}; "
                f"give the same module without DTensors, and a state dict with its names.",
            )
        if any(placed.is_partial() for placed in one.placements):
            raise ConfigError(
                "MW882",
                f"meshwright.from_dtensor: {name} is a sum that is not made yet ({one.placements}); redistribute it, "
                "as every rank needs its part of a parameter.",
            )
    if not isinstance(mesh, Mapping | None):
        raise ConfigError(
            "MW882", f"meshwright.from_dtensor: mesh = {mesh!r}; give the axes of all ranks, {{axis: size}}."
        )
    rows = (rows,) if isinstance(rows, str) else rows
    if not isinstance(rows, Sequence) or not all(isinstance(axis, str) for axis in rows):
        raise ConfigError("MW882", f"meshwright.from_dtensor: rows = {rows!r}; give the names of axes.")
    along = {name: _along(one.device_mesh, {*(mesh or ()), *rows}) for name, one in tensors.items()}
    meshes = {name: {axis: size for one in dims for axis, size in one.items()} for name, dims in along.items()}
    axes = dict(mesh or max(meshes.values(), key=len))
    for name, sizes in meshes.items():
        if not sizes.items() <= axes.items() or not {*rows} <= {*axes}:
            raise ConfigError(
                "MW882",
                f"meshwright.from_dtensor: {name} is on the device mesh {sizes}, and the rows of the batch on the axes "
                f"{list(rows)}, which are not all axes of the mesh {axes}; give the mesh of all ranks as mesh=.",
            )
    stored = {name: _layout(one, along[name]) for name, one in tensors.items()}
    found = {name: _without(layout, rows) for name, layout in stored.items()}
    if used := {*rows} & {axis for layout in stored.values() for axis in layout.axes}:
        options = {"zero": 3} | options
        if used != {*rows}:
            _log.warning(
                "meshwright.from_dtensor: parameters are sliced over %s of the axes %s (hybrid sharding), and read as "
                "ZeRO 3, which slices them over all of these: a rank needs more memory than this plan says.",
                *(", ".join(axis for axis in rows if axis in used), ", ".join(rows)),
            )
    grid = Mesh(tuple(axes.items()))
    slicing = grid.sorted(rows)

    def layouts(graph: OperatorGraph) -> Declared:
        inputs = {
            source.name: Layout(((slicing,) + ((),) * len(source.spec.shape))[: len(source.spec.shape)])
            for source in graph.of_kind("input")
        }
        marks = sections_of(graph)
        striped = {name for name, one in tensors.items() if name in marks and _striped(one, marks[name])}
        return Declared(grid, inputs, found, packed=frozenset(striped))

    return _declared(layouts, module, batch, axes, loss, options)


def from_autoparallel(
    file: str | Path, module: nn.Module, batch: Batch, *, loss: Loss | None = None, **options: Any
) -> Plan:
    """Read the placements file of AutoParallel: of its `save_placements`, or of an export here.

    Args:
        file: JSON with the mesh and the placements of every node. Those of parameters, buffers and the batch are read
            (`primals_1` and so on, in the order of the module's tensors); operators follow from the graph, as
            the file names them by a graph that only AutoParallel has.
        module: as for `meshwright.plan`.
        batch: as for `meshwright.plan`.
        loss: as for `meshwright.plan`.
        **options: as for `from_tp_plan`.

    Returns:
        The plan. Axes that slice the rows of the batch do not slice parameters: those are gathered where they are used,
        as by `fully_shard`, which is ZeRO 3.

    Raises:
        ConfigError, StrategyError: the file is none, or of another module.
    """
    require_module(module, "meshwright.from_autoparallel")
    axes, nodes, striped = autoparallel_placements.read(path_of(file, "meshwright.from_autoparallel"))
    names, tensors = entries_of(batch, "meshwright.from_autoparallel")
    config = config_of(module, tensors, loss, axes, None, torch.optim.AdamW, 0, "cpu", {})
    targets, grid = target_names(config, module, loss_module(loss), names), Mesh(tuple(axes.items()))
    given = [tensor for name, tensor in zip(names, tensors, strict=True) if name not in targets]
    own = [*module.parameters(), *module.buffers(), *given]
    taken = {int(name.rpartition("_")[2]): one for name, one in nodes.items() if name.startswith("primals_")}
    for number, tensor in enumerate(own, 1):
        if number not in taken or len(taken) != len(own) or len(taken[number].dims) > tensor.ndim:
            raise ConfigError(
                "MW885",
                f"meshwright.from_autoparallel: {str(file)!r} has {len(taken)} primals, and primals_{number} with "
                f"{len(taken[number].dims) if number in taken else 'no'} dims in slices; the module and its batch are "
                f"{len(own)} tensors, of which this is {list(tensor.shape)}. Give the module that the file is of.",
            )
    entries = [taken[number] for number in range(len(own) - len(given) + 1, len(own) + 1)]
    rows = grid.sorted({axis for layout in entries for axis in (layout.dims[0] if layout.dims else ())})
    if any({*rows} & {*taken[number].axes} for number, _ in enumerate(module.parameters(), 1)):
        options = {"zero": 3} | options

    def layouts(graph: OperatorGraph) -> Declared:
        sources = autoparallel_placements.primals(graph, names, targets)
        found = {one.name: _filled(taken[number], one) for number, one in enumerate(sources, 1) if one is not None}
        sliced = {one.name: _filled(Layout((rows,)), one) for one in graph.of_kind("input")}
        inputs = sliced | {name: found[name] for name in sliced if name in found}
        stored = {name: _without(layout, rows) for name, layout in found.items() if name not in inputs}
        names_of = {f"primals_{number}": one.name for number, one in enumerate(sources, 1) if one is not None}
        marked = {names_of[node] for node in striped if node in names_of} & {*sections_of(graph)}
        return Declared(grid, inputs, stored, packed=frozenset(marked))

    return _declared(layouts, module, batch, axes, loss, options)


def _filled(layout: Layout, source: Source) -> Layout:
    """The layout with all dims of a tensor."""
    dims = (*layout.dims, *((),) * len(source.spec.shape))
    return Layout(dims[: len(source.spec.shape)])


def _without(layout: Layout, axes: Sequence[str]) -> Layout:
    return Layout(tuple(tuple(axis for axis in used if axis not in axes) for used in layout.dims))


def _along(mesh: DeviceMesh, known: Collection[str]) -> list[dict[str, int]]:
    """The sizes of the axes along each dim of a device mesh: of those that were flattened into one dim, as
    `fully_shard` does, unless its name is a known one; axes without a name are numbered."""
    root = mesh._get_root_mesh()
    own, found = _named(root), list[dict[str, int]]()
    for number, (name, size) in enumerate(_named(mesh).items()):
        ranks = mesh.mesh.movedim(number, 0).reshape(size, -1)[:, 0]
        places = torch.isin(root.mesh, ranks).nonzero().unbind(-1)
        flattened = {axis: own[axis] for axis, at in zip(own, places, strict=True) if len({*at.tolist()}) > 1}
        found.append({name: size} if name in {*own, *known} or not flattened else flattened)
    return found


def _named(mesh: DeviceMesh) -> dict[str, int]:
    names = mesh.mesh_dim_names or tuple(f"d{number}" for number in range(mesh.ndim))
    return dict(zip(names, mesh.shape, strict=True))


def _layout(tensor: DTensor, along: Sequence[Mapping[str, int]]) -> Layout:
    """The layout of a DTensor, with the axes along each dim of its device mesh. One that is strided slices what those
    behind it in the mesh have sliced before, as `fully_shard` does with the parts of `parallelize_module`."""
    dims: list[list[tuple[str, int]]] = [[] for _ in range(tensor.ndim)]
    for axes, placed in reversed([*zip(along, tensor.placements, strict=True)]):
        if isinstance(placed, Shard | _StridedShard):
            outer, before = dims[placed.dim], 0
            if isinstance(placed, _StridedShard):
                parts = [*accumulate((size for _, size in outer), mul)]
                before = parts.index(placed.split_factor) + 1 if placed.split_factor in parts else 0
            outer[before:before] = axes.items()
    return Layout(tuple(tuple(axis for axis, _ in outer) for outer in dims))


def _striped(tensor: DTensor, packed: FusedSections) -> bool:
    """Whether a DTensor is sliced section by section: alone on its dim, with as many parts as sections."""
    placed = [one for one in tensor.placements if isinstance(one, Shard | _StridedShard) and one.dim == packed.dim]
    factors = [one.split_factor for one in placed if isinstance(one, _StridedShard)]
    return len(placed) == 1 and factors == [len(packed.sizes)] and len({*packed.sizes}) == 1


def _declared(
    layouts: Callable[[OperatorGraph], Declared],
    module: nn.Module,
    batch: Batch,
    axes: Mapping[str, int],
    loss: Loss | None,
    options: Mapping[str, Any],
) -> Plan:
    names, tensors = entries_of(batch, "meshwright")
    known = {"cluster": None, "optimizer": torch.optim.AdamW, "seed": 0, "device": "auto"}
    given = {name: options.get(name, value) for name, value in known.items()}
    parallel = {name: value for name, value in options.items() if name not in known}
    if decided := [name for name in DECIDED if name in parallel]:
        raise ConfigError(
            "MW882",
            f"meshwright: {decided[0]} is decided by the plan that is read; leave it out, or use meshwright.plan.",
        )
    config = config_of(module, tensors, loss, axes, parallel=parallel, **given)

    def plan_of(graph: OperatorGraph) -> tuple[OperatorGraph, OperatorPlans]:
        found = layouts(graph)
        blockwise = {name for name, layout in found.tensors.items() if layout.axes and name not in found.packed}
        sliced = packed(graph, {name: one for name, one in sections_of(graph).items() if name not in blockwise})
        return sliced, declared_plan(sliced, found)

    return planned(config, module, names, tensors, loss, plan_of)


@dataclass(frozen=True)
class Excess:
    """A plan beside another of the same step; printed, what differs.

    Attributes:
        plan, other: the two plans.
    """

    plan: Plan
    other: Plan

    @property
    def share(self) -> float:
        """The share by which a step of the plan takes longer than one of the other plan: 0.04 is 4 %."""
        return self.plan.cost / self.other.cost - 1

    def __str__(self) -> str:
        headline = f"the plan takes {abs(self.share):.1%} {'longer' if self.share >= 0 else 'less'} than the other"
        return f"{headline}\n{differences(self.plan.content, self.other.content)}"


def compare(plan: Plan, other: Plan | None = None) -> Excess:
    """Compare the layouts, seconds and bytes of two plans of one module.

    Args:
        plan: of `plan`, of one of the functions that read plans, or of `load` with a module.
        other: None: the best plan of the same step on as many ranks, which is searched, with its certificate.

    Raises:
        ConfigError: the plans are of two steps.
    """
    require_plan(plan, "meshwright.compare")
    if other is None:
        return Excess(plan, best(plan))
    require_plan(other, "meshwright.compare")
    shapes, others = ({one["name"]: one["shapes"] for one in each.content["operators"]} for each in (plan, other))
    for name in dict.fromkeys([*shapes, *others]):
        if shapes.get(name) != others.get(name):
            raise ConfigError(
                "MW421",
                f"meshwright.compare: the plans are of two steps: operator {name} works on {shapes.get(name)} in one "
                f"and on {others.get(name)} in the other; give plans of the same module and batch.",
            )
    return Excess(plan, other)


def best(plan: Plan) -> Plan:
    """The best plan of the step of another plan, on as many ranks in any mesh, with the same stage of ZeRO and the same
    recomputation; searched exactly, with a certificate, for batches that are sliced over all ranks, and for complete
    ones on each."""
    require_plan(plan, "meshwright.best")
    own = plan.planned("best")
    content = own.prepared.config.model_dump(mode="json")
    content["parallel"] |= {"mesh": None, "plan": None, "strategies": {}, "set_data_parallel": [], "layouts": {}}
    content["parallel"] |= {"search": "dynamic_programming", "memory_limit": None}

    def searched(dataset: str) -> Plan:
        parallel = content["parallel"] | {"dataset_strategy": dataset}
        config = validated({**content, "parallel": parallel}, Origins())
        return planned(config, own.objective.model, own.prepared.names, own.batch, own.loss)

    return min(map(searched, ("data_parallel", "full_batch")), key=lambda one: one.cost)
