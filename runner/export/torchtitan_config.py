"""A plan as the sharding configs of torchtitan: a Python file with a `ShardingConfig` for every module, in which every
axis is declared.

torchtitan names three axes: `dp` slices the rows of a batch, `tp` parameters, and `cp` whatever is sliced beside. Of a
replicated value it says whether the ranks' gradients of it are to be added (`spmd.R`) or are the same (`spmd.I`).
Source: torchtitan.protocols.sharding, torchtitan.distributed.parallel_dims.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from runner.export.changes import Change, between, of_optimizer, sent
from runner.export.tensor_parallel import of_rows
from runner.export.torch_program import of_operators
from runner.planning.clusters import cluster_of
from runner.planning.prepare import Prepared
from strategies.core.graph import Operator, OperatorGraph, Ref
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import Plan
from strategies.planner.boundaries import Boundary, boundaries, operators_inside
from strategies.planner.by_module import BetweenBorders, between_borders, by_borders
from strategies.rules import rule_of

ROLES = ("dp", "cp", "tp")
"""The axes of torchtitan, outermost first."""
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

HEAD = '''\
"""{title}, as sharding configs of torchtitan, by Meshwright.

    parallel_dims = ParallelDims(**PARALLEL_DIMS, spmd_backend="partial_dtensor")
    set_sharding_configs(model)  # a model of torchtitan's modules, built and not yet parallelized
    model.parallelize(parallel_dims)

A `*` in a name stands for the number of a layer. An input is that of the first argument of `forward`.
"""

import inspect
import re
from dataclasses import replace

import spmd_types as spmd
from torch import nn
from torchtitan.distributed.parallel_dims import MeshAxisName, SpmdLayout
from torchtitan.protocols.sharding import LocalMapConfig, ShardingConfig

DP, CP, TP = MeshAxisName.DP, MeshAxisName.CP, MeshAxisName.TP

'''
TAIL = '''

def set_sharding_configs(model: nn.Module) -> None:
    """Give every module of a model its config, before `model.parallelize`."""
    for path, module in model.named_modules():
        config = SHARDINGS.get(path, SHARDINGS.get(re.sub(r"(?<![^.])\\d+(?![^.])", "*", path)))
        if config is None:
            continue
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        everywhere = SpmdLayout({DP: spmd.R, CP: spmd.R, TP: spmd.R})
        states = {name: config.state_shardings.get(name, everywhere) for name, _ in own}
        first = next((name for name in inspect.signature(type(module).forward).parameters if name != "self"), "input")
        module._sharding_config = replace(
            config,
            state_shardings=states,
            in_src_shardings=config.in_src_shardings and {first: config.in_src_shardings["input"]},
            in_dst_shardings=config.in_dst_shardings and {first: config.in_dst_shardings["input"]},
        )
'''


@dataclass(frozen=True)
class Typed:
    """A value at a border of a module.

    Attributes:
        layout: by roles.
        summed: the roles over which the ranks' gradients of it are added, where it is replicated.
    """

    layout: Layout
    summed: frozenset[str] = frozenset()


def changes(prepared: Prepared) -> list[Change]:
    """What torchtitan lays out otherwise: where the plan that its configs declare differs, operators that DTensor
    gathers for or that read the rows of all ranks, and stages of ZeRO between 0 and 3."""
    graph, plan = prepared.graph, prepared.plan
    assert graph is not None and plan is not None
    roles = Roles.of(plan)
    again = by_borders(graph, plan, roles.said)
    gathered = (
        change
        for change in of_operators(prepared, graph, plan)
        if graph.by_name[change.name].label != "cross_entropy_loss"  # torchtitan computes it on slices of classes
    )
    cluster = cluster_of(prepared.config, prepared.device, prepared.world_size)
    decided = (
        sent("operator", one.operator.name, one.taken, one.comes.reduced, graph.specs[one.ref], plan.mesh, cluster)
        for one in roles.between_borders(graph, plan).undecided
    )
    found = {str(change): change for change in (*between(prepared, again), *gathered, *decided)}
    shared = (*roles.axes["dp"], *roles.axes["cp"])  # its mesh for FSDP
    return [*found.values(), *of_rows(prepared), *of_optimizer(prepared, {0, 3}, shared)]


def config(prepared: Prepared, title: str) -> str:
    """The Python file."""
    graph, plan = prepared.graph, prepared.plan
    assert graph is not None and plan is not None
    roles = Roles.of(plan)
    sizes = {role: plan.mesh.product(axes) for role, axes in roles.axes.items()}
    sharded = prepared.config.parallel.zero.known == 3
    degrees = {"dp_replicate": 1 if sharded else sizes["dp"], "dp_shard": sizes["dp"] if sharded else 1}
    degrees |= {"cp": sizes["cp"], "tp": sizes["tp"], "pp": 1, "ep": 1, "world_size": plan.mesh.size}
    entries: dict[str, dict[str, str]] = defaultdict(dict)
    for path, text in _configs(graph, plan, roles):
        entries[NUMBER.sub("*", path)][path] = text
    lines = []
    for glob, found in entries.items():
        shared = {glob: next(iter(found.values()))} if len({*found.values()}) == 1 else found
        lines += [f'    "{key}": {text},' for key, text in shared.items()]
    dims = ", ".join(f'"{name}": {size}' for name, size in degrees.items())
    tables = [f"PARALLEL_DIMS = {{{dims}}}", "", "SHARDINGS: dict[str, ShardingConfig] = {", *lines, "}", ""]
    return HEAD.format(title=title) + "\n".join(tables) + TAIL


@dataclass(frozen=True)
class Roles:
    """The mesh axes of a plan by the axis of torchtitan that they are."""

    axes: Mapping[str, tuple[str, ...]]
    mesh: Mesh

    @staticmethod
    def of(plan: Plan) -> Roles:
        tp = {axis for layout in plan.tensors.values() for axis in layout.axes}
        dp = {axis for axes in plan.batch_axes for axis in axes} - tp
        slicing = {axis for one in plan.operators.values() for axes in one.assignment.values() for axis in axes}
        cp = slicing - tp - dp
        tp |= {*plan.mesh.names} - dp - cp  # what slices nothing would slice sequences in torchtitan's trainer as cp
        return Roles({role: plan.mesh.sorted(axes) for role, axes in zip(ROLES, (dp, cp, tp), strict=True)}, plan.mesh)

    def by_role(self, layout: Layout) -> Layout:
        """A layout in the axes of torchtitan, without what it cannot say: a dim sliced by some axes of a role only, or
        in another order than the mesh's."""
        dims = []
        for used in layout.dims:
            found = [role for role in ROLES if self.axes[role] and {*self.axes[role]} <= {*used}]
            while found and tuple(axis for role in found for axis in self.axes[role]) != used[: self._count(found)]:
                found.pop()
            dims.append(tuple(found))
        partial = {role for role, axes in self.axes.items() if axes and {*axes} <= layout.partial}
        return Layout(tuple(dims), frozenset(partial))

    def _count(self, roles: Iterable[str]) -> int:
        return sum(len(self.axes[role]) for role in roles)

    def typed(self, layout: Layout, summed: Iterable[str] = ()) -> Typed:
        """A value by role; over an axis of one rank its gradients may as well be added."""
        return Typed(
            self.by_role(layout), frozenset((*summed, *(role for role, axes in self.axes.items() if not axes)))
        )

    def between_borders(self, graph: OperatorGraph, plan: Plan) -> BetweenBorders:
        """What DTensor does between borders, over the axes that slice no rows alone."""
        return between_borders(graph, plan, {*self.axes["cp"], *self.axes["tp"]})

    def said(self, layout: Layout) -> Layout:
        """`by_role` in the axes of the plan."""
        dims = [tuple(axis for role in used for axis in self.axes[role]) for used in self.by_role(layout).dims]
        return Layout(tuple(dims))


def _configs(graph: OperatorGraph, plan: Plan, roles: Roles) -> Iterator[tuple[str, str]]:
    """The text of the config of every module that has one."""
    states = _states(graph, plan, roles)
    received, returned = boundaries(graph, plan)
    between = roles.between_borders(graph, plan)
    returned = {path: _handed(path, entry, received, graph, between.made) for path, entry in returned.items()}
    inside = operators_inside(graph)
    taken: dict[str, Typed] = {}
    for path in sorted({*states, *received, *returned}):  # a module comes before those in it
        fields = []
        if path in states:
            own = ", ".join(f'"{name}": {_text(one)}' for name, one in states[path].items())
            fields.append(f"state_shardings={{{own}}}")
        if (entry := received.get(path)) is not None:
            source = _arriving(path, entry, received, returned, taken, between, roles)
            taken[path] = roles.typed(entry.layout, _summed(entry.ref, inside[path], graph, plan, roles))
            if not graph.specs[entry.ref].floating:
                taken[path] = source = Typed(taken[path].layout, frozenset(ROLES))
            if source is not None:  # otherwise the placements that DTensor has chosen stand
                fields.append(f'in_src_shardings={{"input": {_text(source)}}}')
            fields.append(f'in_dst_shardings={{"input": {_text(taken[path])}}}')
        if (entry := returned.get(path)) is not None:
            last = [name for name, one in returned.items() if name.startswith(f"{path}.") and one.ref == entry.ref]
            made = returned[min(last, key=len)].layout if last else between.made[entry.ref]
            if last or entry.ref not in between.unknown:
                fields.append(f"out_src_shardings={_text(roles.typed(made))}")
            fields.append(f"out_dst_shardings={_text(roles.typed(entry.layout))}")
            if made.partial and any(one.op == "embedding" for one in inside[path] if one.module == path):
                fields.append("local_map=LocalMapConfig(in_grad_placements=None)")  # its tables look up their own rows
        yield path, "ShardingConfig(\n" + "".join(f"        {field},\n" for field in fields) + "    )"


def _states(graph: OperatorGraph, plan: Plan, roles: Roles) -> dict[str, dict[str, Typed]]:
    """Parameters and buffers by module and name, under all their names."""
    found: dict[str, dict[str, Typed]] = defaultdict(dict)
    for source in graph.sources:
        if source.kind in ("parameter", "buffer"):
            users = [operator for operator, _ in graph.users[Ref(source.id)]]
            summed = _summed(Ref(source.id), users, graph, plan, roles) if source.trainable else frozenset(ROLES)
            for name in (source.name, *source.aliases):
                path, _, leaf = name.rpartition(".")
                found[path][leaf] = roles.typed(plan.tensors[source.name], summed)
    return found


def _summed(ref: Ref, users: Iterable[Operator], graph: OperatorGraph, plan: Plan, roles: Roles) -> frozenset[str]:
    """The roles over which the gradient of a value is partial in some of its users."""
    axes: set[str] = set()
    for operator in users:
        gradients = rule_of(operator, graph).gradient_layouts(plan.operators[operator.name].assignment)
        for operand, gradient in zip(operator.operands, gradients, strict=True):
            axes |= gradient.partial if operand == ref else set()
    return frozenset(role for role, own in roles.axes.items() if {*own} & axes)


def _arriving(
    path: str,
    entry: Boundary,
    received: Mapping[str, Boundary],
    returned: Mapping[str, Boundary],
    taken: Mapping[str, Typed],
    between: BetweenBorders,
    roles: Roles,
) -> Typed | None:
    """How the value that a module receives comes: as the innermost module around it has taken it, else as the outermost
    that made it has returned it. None where DTensor decides it."""
    around = [name for name in taken if path.startswith(f"{name}.") and received[name].ref == entry.ref]
    if around:
        return taken[max(around, key=len)]
    makers = [name for name, one in returned.items() if one.ref == entry.ref and not path.startswith(f"{name}.")]
    if makers:
        return roles.typed(returned[min(makers, key=len)].layout)
    return None if entry.ref in between.unknown else roles.typed(between.made[entry.ref])


def _handed(
    path: str, entry: Boundary, received: Mapping[str, Boundary], graph: OperatorGraph, layouts: Mapping[Ref, Layout]
) -> Boundary:
    """What a module returns as it was made, where all users lay it out when they receive it: their gradients are then
    added and sliced in one collective. Partial sums are added where they are returned."""
    made = layouts[entry.ref]
    takers = [name for name, one in received.items() if one.ref == entry.ref]
    users = [user.module for user, _ in graph.users[entry.ref] if not f"{user.module}.".startswith(f"{path}.")]
    laid_out = all(any(f"{user}.".startswith(f"{name}.") for name in takers) for user in users)
    return replace(entry, layout=made) if laid_out and not made.partial else entry


def _text(typed: Typed) -> str:
    """A SpmdLayout; with a partition spec where a dim is sliced by several axes."""
    layout, types = typed.layout, {}
    several = any(len(used) > 1 for used in layout.dims)
    dim_of = {role: dim for dim, used in enumerate(layout.dims) for role in used}
    for role in ROLES:
        if role in dim_of:
            types[role] = "spmd.V" if several else f"spmd.S({dim_of[role]})"
        else:
            types[role] = "spmd.P" if role in layout.partial else "spmd.R" if role in typed.summed else "spmd.I"
    axes = ", ".join(f"{role.upper()}: {word}" for role, word in types.items())
    if not several:
        return f"SpmdLayout({{{axes}}})"
    words = [", ".join(role.upper() for role in used) or "None" for used in layout.dims]
    spec = ", ".join(f"({word})" if "," in word else word for word in words)
    return f"SpmdLayout({{{axes}}}, partition_spec=({spec}{',' * (len(words) == 1)}))"
