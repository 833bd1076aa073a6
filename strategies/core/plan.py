"""The plan: for every operator which mesh axes slice which factor, for every source its layout. Search, explanation,
engine and checkpoints meet at this type; it is plain data, JSON in and out.

Invariant: together with the operator graph it determines the program of every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

from strategies.core.graph import Source, modules_around
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh, Share

Origin = Literal["configured", "data_parallel", "propagated", "searched", "default", "no rule", "copies"]


@dataclass(frozen=True)
class OperatorPlan:
    """`assignment`: factor -> axes. `outputs`: layouts in which the results are handed on, None for as they come
    (reduced at the first use). `origin` says who chose."""

    assignment: Mapping[str, tuple[str, ...]]
    origin: Origin
    outputs: tuple[Layout, ...] | None = None


@dataclass(frozen=True)
class Recompute:
    """What backward recomputes instead of storing it: the calls of `modules` (paths), except the operators `kept`
    (plan names) and, with `keeps_communication`, collectives; their results are stored. With `slices_inputs` each rank
    stores only its part of the modules' inputs that other ranks hold too."""

    modules: tuple[str, ...]
    kept: tuple[str, ...]
    keeps_communication: bool
    slices_inputs: bool

    @cached_property
    def _inside(self) -> frozenset[str]:
        return frozenset(self.modules)

    @cached_property
    def _stored(self) -> frozenset[str]:
        return frozenset(self.kept)

    def region(self, path: tuple[str, ...]) -> str | None:
        """The outermost of the modules that stands around an operator whose names of modules are `path`."""
        return next((module for module in modules_around(path) if module in self._inside), None)

    def repeated_in(self, name: str, path: tuple[str, ...]) -> str | None:
        """The same where backward runs the operator `name` again, collectives aside; else None."""
        return None if name in self._stored else self.region(path)


@dataclass(frozen=True)
class Plan:
    """`operators` by plan name, `inputs` by batch entry, `tensors` (parameters, buffers, constants) by full name.
    `batch_rows`: the rows of a micro-batch on each rank along the axis that slices the batch; () for equal slices."""

    mesh: Mesh
    operators: Mapping[str, OperatorPlan]
    inputs: Mapping[str, Layout]
    tensors: Mapping[str, Layout]
    search: Mapping[str, Any] = field(default_factory=dict)
    recompute: Recompute | None = None
    batch_rows: tuple[int, ...] = ()

    @property
    def batch_axes(self) -> frozenset[tuple[str, ...]]:
        """The axes that slice the rows of each batch entry; a scalar has none."""
        return frozenset(layout.dims[0] for layout in self.inputs.values() if layout.dims)

    def of_rank(self, rank: int) -> Plan:
        """The plan as `rank` sees it: its mesh has the share of the rank where the slices of the batch differ."""
        if not self.batch_rows:
            return self
        ((axis,),) = self.batch_axes
        own = self.mesh.coordinate(rank, axis)
        ends = tuple(accumulate(self.batch_rows))
        share = Share(axis, ends[own] - self.batch_rows[own], ends[own], ends[-1])
        return replace(self, mesh=replace(self.mesh, share=share))

    def local_bytes(self, source: Source) -> int:
        """Bytes of a rank's slice of a parameter, buffer or constant."""
        return self.tensors[source.name].local_elements(source.spec.shape, self.mesh) * source.spec.item_bytes

    def to_json(self) -> dict[str, Any]:
        """The fields from which the plan can be read again; reports add derived ones."""
        return {
            "mesh": dict(self.mesh.axes),
            "assignments": {
                name: {
                    "assignment": {factor: list(axes) for factor, axes in plan.assignment.items()},
                    "origin": plan.origin,
                    "outputs": None if plan.outputs is None else [layout_to_json(layout) for layout in plan.outputs],
                }
                for name, plan in self.operators.items()
            },
            "inputs": {name: layout_to_json(layout) for name, layout in self.inputs.items()},
            "tensors": {name: layout_to_json(layout) for name, layout in self.tensors.items()},
            "search": dict(self.search),
            "recompute": None if self.recompute is None else asdict(self.recompute),
        } | ({"batch_rows": list(self.batch_rows)} if self.batch_rows else {})

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Plan:
        """The inverse of `to_json`."""
        return Plan(
            Mesh(tuple(data["mesh"].items())),
            {
                name: OperatorPlan(
                    {factor: tuple(axes) for factor, axes in plan["assignment"].items()},
                    plan["origin"],
                    None if plan["outputs"] is None else tuple(map(layout_from_json, plan["outputs"])),
                )
                for name, plan in data["assignments"].items()
            },
            {name: layout_from_json(layout) for name, layout in data["inputs"].items()},
            {name: layout_from_json(layout) for name, layout in data["tensors"].items()},
            data["search"],
            _recompute_from_json(data.get("recompute")),
            tuple(data.get("batch_rows", ())),
        )


def layout_to_json(layout: Layout) -> dict[str, Any]:
    """A layout in plan.json: axes per dim, and those over which it is partial."""
    return {"dims": [list(dim) for dim in layout.dims], "partial": sorted(layout.partial)}


def layout_from_json(data: Mapping[str, Any]) -> Layout:
    """The inverse of `layout_to_json`."""
    return Layout(tuple(tuple(dim) for dim in data["dims"]), frozenset(data["partial"]))


def _recompute_from_json(data: Mapping[str, Any] | None) -> Recompute | None:
    if data is None:
        return None
    return Recompute(tuple(data["modules"]), tuple(data["kept"]), data["keeps_communication"], data["slices_inputs"])
