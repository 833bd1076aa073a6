"""Plans by module: the tensor-parallel plans of transformers, {glob of modules: name of a style}, and of torch,
{module: ParallelStyle}. Read, they declare layouts; a plan is written as those of transformers.

A style slices a module's parameters over one mesh axis and says how the module takes its input and hands on its result.
Source: transformers.distributed.tensor_parallel, torch.distributed.tensor.parallel.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from strategies.core.addressing import segments_match
from strategies.core.errors import StrategyError, closest
from strategies.core.experts import experts, matrices_of
from strategies.core.graph import Operator, OperatorGraph, Ref, Source, modules_around
from strategies.core.layout import Layout
from strategies.core.mesh import Mesh
from strategies.core.plan import Plan
from strategies.cost.styled_modules import RESIZING, halves, of_own_parameters, packable, returned_by, sliceable
from strategies.planner.declared_layouts import Declared, Placed, operand_layouts
from strategies.rules import rule_of

NUMBER = re.compile(r"\.\d+(\.|$)")
"""The names in which transformers sees a layer's number."""
Dim = int | None
"""The dim that the axis slices, counted from the end where negative; None: replicated."""
Kept = Literal["kept"]
"""As it comes."""


@dataclass(frozen=True)
class Style:
    """Dims that the axis slices.

    Attributes:
        weight: of every parameter but the bias.
        bias: of the bias.
        received, returned: of the module's input and result.
        packed: whether a rank has a stripe of each section of a weight.
    """

    weight: Dim = None
    bias: Dim = None
    received: Dim | Kept = "kept"
    returned: Dim | Kept = "kept"
    packed: bool = False


COLWISE, ROWWISE = Style(-2, -1, None, -1), Style(-1, None, -1, None)
GATHERED = Style(-2, -1, None, None)
STYLES = {
    "colwise": COLWISE,
    "colwise_gather_output": GATHERED,
    "colwise_rep": GATHERED,
    "rowwise": ROWWISE,
    "rowwise_split_input": ROWWISE,
    "rowwise_rep": ROWWISE,
    "embedding_rowwise": Style(0, None, None, None),
    "embedding_colwise": Style(1, None, None, None),
    "sequence_parallel": Style(received=1, returned=1),
    "packed_colwise": replace(COLWISE, packed=True),
    "packed_rowwise": Style(-1, None, packed=True),
    "moe_tp_experts": Style(received=None, returned=None),
    "ep_dispatch_experts": Style(received=None, returned=None),
    "grouped_gemm": Style(0, 0),
    "all_reduce": Style(returned=None),
    "replicate": Style(),
    "replicated_with_grad_allreduce": Style(),
    "local_params": Style(),
    "mla_kv_a_proj": Style(),
    "moe_identity_expert": Style(),
}
"""By the names of transformers."""
COMMON = ("colwise", "colwise_gather_output", "replicate", "replicated_with_grad_allreduce", "rowwise")
"""Those that all trainers have."""
AUTOTP = (*COMMON, RESIZING)
"""Those for which AutoTP of DeepSpeed has a word."""
OF_TORCH = (*COMMON, "embedding_colwise", "embedding_rowwise", "rowwise_split_input")
"""Those for which torch's `parallelize_module` has one."""
WRITTEN = (*OF_TORCH, "packed_colwise")
"""Those of a `tp_plan` for transformers."""
WITHIN = ("moe_tp_experts", "packed_rowwise")
"""Further ones for experts of which every rank has a slice."""
EXPERTS = ("ep_dispatch_experts", "grouped_gemm")
"""Those of an `ep_plan`: of a module of experts, and of its parameters."""
VALUES_ALONE = (PrepareModuleInput, PrepareModuleOutput, PrepareModuleInputOutput)
"""Styles of torch that leave the weights of a module as another entry has them."""
GLOB = re.compile(r"[*?\[]")
FOR_TRANSFORMERS = (*WRITTEN, *WITHIN, *EXPERTS)
"""Those of a `DistributedConfig`."""


def declared(
    tp_plan: Mapping[str, Any],
    graph: OperatorGraph,
    mesh: Mesh,
    axes: Sequence[str],
    names: Collection[str] = (),
) -> Declared:
    """The layouts that a plan by module declares. The other axes of the mesh slice the rows of a batch.

    Args:
        tp_plan: of globs of modules or parameters (`*` stands for one name between dots): names of styles of
            transformers, or styles of torch, of which the placements of the first input and output count; None leaves
            a module as it is. A name counts before globs, of these the last, and the entry of a parameter before that
            of its module.
        graph: of a training step.
        mesh: of all ranks.
        axes: that slice modules, together.
        names: further modules of the model, which compute nothing.

    Raises:
        StrategyError: a style that has no layout here, or a key that matches nothing, or nothing that its style could
            slice.
    """
    parameters = {name: source for source in graph.of_kind("parameter") for name in (source.name, *source.aliases)}
    modules = {path for operator in graph.operators for path in modules_around(tuple(operator.module.split(".")))}
    modules |= {name.rpartition(".")[0] for name in parameters} | {*names}
    tables = {operator.module for operator in graph.operators if operator.op == "embedding"}
    tensors: dict[str, Layout] = {}
    decided: dict[str, tuple[str, bool]] = {}
    """The name under which each tensor has an entry, and whether that is one of the tensor itself."""
    packed: set[str] = set()
    received: dict[str, Placed] = {}
    returned: dict[str, Placed] = {}
    for key, given in sorted(tp_plan.items(), key=lambda entry: not GLOB.search(entry[0])):
        matched = [name for name in (*sorted(modules), *parameters) if segments_match(key, name)]
        if not matched:
            known = sorted({numberless(name) for name in (*modules, *parameters) if name})
            raise StrategyError("MW881", f"tp_plan: {key!r} matches no module or parameter.{closest(key, known)}")
        kept, slicing, owning = isinstance(given, VALUES_ALONE), False, False
        for name in matched:
            style = style_of(given, key, name in tables)
            owned = [name] if name in parameters else [one for one in parameters if one.rpartition(".")[0] == name]
            slicing, owning = slicing or style.weight is not None, owning or bool(owned)
            for full in owned:
                dim = style.bias if full.endswith("bias") else style.weight
                source = parameters[full]
                by, own = decided.get(source.name, (full, False))
                if full == name or not (own or by != full or (kept and source.name in tensors)):
                    decided[source.name] = full, full == name
                    tensors[source.name] = _sliced(len(source.spec.shape), dim, axes)
                    packed.discard(source.name)
                    if style.packed and dim is not None:
                        _check_packed(key, source, dim)
                        packed.add(source.name)
            for table, placed in ((received, style.received), (returned, style.returned)):
                if given is None:
                    table.pop(name, None)
                elif name in modules and placed != "kept":
                    table[name] = dict.fromkeys(axes, placed)
        if slicing and not owning:
            raise StrategyError(
                "MW881",
                f"tp_plan: {key!r} has a style that slices weights, but the modules that it matches have no parameters "
                f"of their own ({', '.join(name or 'the model' for name in matched[:3])}); name the layers in them.",
            )
    rows = mesh.others(axes)
    inputs = {
        source.name: Layout(((rows,) + ((),) * len(source.spec.shape))[: len(source.spec.shape)])
        for source in graph.of_kind("input")
    }
    return Declared(mesh, inputs, tensors, received, returned, frozenset(packed))


def merged(tp_plan: Mapping[str, Any], ep_plan: Mapping[str, Any]) -> dict[str, Any]:
    """Both plans as one: what has an entry in the second has none in the first, nor has anything in it.

    Source: transformers.distributed.mixin.
    """
    others = {
        key: style for key, style in tp_plan.items() if not any(f"{key}.".startswith(f"{one}.") for one in ep_plan)
    }
    return others | dict(ep_plan)


def numberless(name: str) -> str:
    """A name as transformers writes it in plans, with stars for the numbers of layers."""
    return NUMBER.sub(r".*\1", name)


def _sliced(rank: int, dim: Dim, axes: Sequence[str]) -> Layout:
    """The layout of a parameter; transformers slices vectors for a style that slices rows of a matrix, too."""
    if dim is None or rank == 0:
        return Layout.replicated(rank)
    sliced = max(0, rank + dim) if dim < 0 else dim
    return Layout(tuple(tuple(axes) if place == sliced else () for place in range(rank)))


def _check_packed(key: str, source: Source, dim: int) -> None:
    """Raises StrategyError where the model does not take a tensor apart along the dim that a style says is packed."""
    shape, packed = source.spec.shape, source.spec.packed
    if packed is None or packed.dim != dim % len(shape):
        raise StrategyError(
            "MW880",
            f"tp_plan: {key!r} has a style of packed weights, but the model does not take {source.name} "
            f"{list(shape)} apart into sections along dim {dim % len(shape)}. Use colwise or rowwise for a weight of "
            "one section, or leave the entry out: the module is replicated then.",
        )


def style_of(given: Any, key: str, table: bool = False) -> Style:
    """What a plan says of the modules `key`, tables or not.

    Raises:
        StrategyError: a style that has no layout here.
    """
    if given is None:
        return Style()
    if isinstance(given, str) and given in STYLES:
        return STYLES[given]
    if isinstance(given, ColwiseParallel):
        first = Style(1, None, None) if table else COLWISE
        return replace(first, returned=_dim(given.output_layouts, key))
    if isinstance(given, RowwiseParallel):
        first = Style(0, None, None) if table else ROWWISE
        return replace(first, returned=_dim(given.output_layouts, key))
    if isinstance(given, SequenceParallel):
        return Style(received=_dim(given.sequence_sharding, key), returned=_dim(given.sequence_sharding, key))
    if isinstance(given, PrepareModuleInputOutput):
        first, last = (style_of(one, key, table) for one in (given.prepare_module_input, given.prepare_module_output))
        return Style(received=first.received, returned=last.returned)
    if isinstance(given, PrepareModuleInput):
        return Style(received=_dim(given.desired_input_layouts, key))
    if isinstance(given, PrepareModuleOutput):
        return Style(returned=_dim(given.desired_output_layouts, key))
    shown = repr(given) if isinstance(given, str) else type(given).__name__
    if isinstance(given, type):
        shown = f"{given.__name__} (the class, not an instance)"
    raise StrategyError(
        "MW880",
        f"tp_plan: {key!r} has the style {shown}, which has no layout here.{closest(str(given), STYLES)} Give "
        "a style of torch.distributed.tensor.parallel, or leave out this entry and those of the module around it, "
        "which is replicated then.",
    )


def _dim(placed: Sequence[Placement | None] | None, key: str) -> Dim | Kept:
    """What a style of torch says of its first tensor. Raises StrategyError for a partial sum."""
    first = next(iter(placed or ()), None)
    if first is None:
        return "kept"
    if not isinstance(first, Shard | Replicate):
        raise StrategyError("MW880", f"tp_plan: {key!r} has the placement {first}; modules take Shard and Replicate.")
    return first.dim if isinstance(first, Shard) else None


def tp_plan_of(graph: OperatorGraph, plan: Plan, names: Collection[str], axes: tuple[str, ...]) -> dict[str, str]:
    """A plan as {glob of modules: name of a style}, for the axes that slice modules; where layers differ, as most of
    them have it, since transformers knows globs alone. Modules whose style is none of `names` are replicated."""
    parameters = {source.id for source in graph.of_kind("parameter")}
    found: dict[str, Counter[str]] = defaultdict(Counter)
    by_module: dict[str, list[Operator]] = defaultdict(list)
    made = of_own_parameters(graph)
    for operator in graph.operators:
        if any(ref.id in parameters or ref.id in made for ref in operator.operands):
            by_module[operator.module].append(operator)
    routed, matrices = (experts(graph), matrices_of(graph)) if axes else ({}, {})
    for path, operators in by_module.items():
        own = routed.get(path, ())
        if own and _by_expert(own, plan, axes):
            entries = [(path, "ep_dispatch_experts"), *((source.name, "grouped_gemm") for source in own)]
        elif "moe_tp_experts" in names and (within := _within_experts(matrices.get(path, ()), plan, axes)):
            entries = [(path, "moe_tp_experts"), *within]
        else:
            entries = [*_styles_of(path, operators, graph, plan, axes, made)]
        for key, style in entries:
            found[numberless(key)][style] += 1
    styles = {key: counts.most_common(1)[0][0] for key, counts in found.items()}
    return {key: style if style in names else "replicate" for key, style in styles.items()}


def axes_of(plan: Plan) -> tuple[str, ...]:
    """The axes that slice parameters; without any, those that slice no rows of the batch."""
    used = {axis for layout in plan.tensors.values() for axis in layout.axes}
    return plan.mesh.sorted(used) or plan.mesh.others({axis for axes in plan.batch_axes for axis in axes})


def _by_expert(parameters: Sequence[Source], plan: Plan, axes: tuple[str, ...]) -> bool:
    """Whether every rank has the parameters of as many experts."""
    return all(
        plan.mesh.sorted(plan.tensors[source.name].dims[0]) == axes
        and source.spec.shape[0] % plan.mesh.product(axes) == 0
        for source in parameters
    )


def _within_experts(parameters: Sequence[Source], plan: Plan, axes: tuple[str, ...]) -> list[tuple[str, str]]:
    """The styles of the matrices of experts of which every rank has a slice; none where there is no such style."""
    found = []
    for source in parameters:
        dims = [dim for dim, used in enumerate(plan.tensors[source.name].dims) if plan.mesh.sorted(used) == axes]
        if dims not in ([1], [2]):
            return []
        style = ("colwise", "rowwise")[dims[0] - 1]
        if source.spec.packed is not None:
            if not halves(source.spec, dims[0]):
                return []
            style = f"packed_{style}"
        found.append((source.name, style))
    return found


def _styles_of(
    path: str,
    operators: Sequence[Operator],
    graph: OperatorGraph,
    plan: Plan,
    axes: tuple[str, ...],
    made: Collection[str],
) -> Iterator[tuple[str, str]]:
    """The entries of a module whose `operators` use parameters, or what operators `made` of them alone."""
    partial = False
    for operator in operators:
        gradients = rule_of(operator, graph).gradient_layouts(plan.operators[operator.name].assignment)
        for ref, gradient in zip(operator.operands, gradients, strict=True):
            source = graph.by_id[ref.id]
            if isinstance(source, Operator):
                partial = partial or (source.id in made and source.module == path and bool(gradient.partial & {*axes}))
                continue
            if source.kind != "parameter":
                continue
            layout, shape = plan.tensors[source.name], source.spec.shape
            sliced = [dim for dim, used in enumerate(layout.dims) if axes and plan.mesh.sorted(used) == axes]
            if sliced and len(shape) == 2 and sliceable(operator, graph):
                yield path, _style_of(operator, source, sliced[0], graph, plan, axes)
                return
            partial = partial or bool(gradient.partial & {*axes})
            if len(shape) > 1 and operator.op not in ("linear", "embedding"):
                yield source.name, "replicate"  # a model's own plan may have an entry for it
    yield path, "replicated_with_grad_allreduce" if partial else "replicate"


def _style_of(
    operator: Operator, weight: Source, dim: int, graph: OperatorGraph, plan: Plan, axes: tuple[str, ...]
) -> str:
    """The style of a product or table whose weight is sliced along `dim`."""
    if operator.op == "embedding":
        return ("embedding_rowwise", "embedding_colwise")[dim]
    if dim == 0:
        users = graph.users[Ref((returned_by(graph, operator) or operator).id)]
        taken = (operand_layouts(user, graph, plan)[position] for user, position in users)
        sliced = any(plan.mesh.sorted(layout.dims[-1]) == axes for layout in taken if layout.dims)
        if weight.spec.packed is not None:
            copies = plan.mesh.product(axes) < plan.mesh.size
            return "packed_colwise" if sliced and packable(operator, weight, copies) else "colwise_gather_output"
        return "colwise" if sliced else "colwise_gather_output"
    producer = graph.by_id[operator.operands[0].id]
    if not isinstance(producer, Operator):
        return "rowwise_split_input"
    made = plan.operators[producer.name]
    layouts = made.outputs or rule_of(producer, graph).result_layouts(made.assignment)
    comes = layouts[operator.operands[0].index]
    return "rowwise" if plan.mesh.sorted(comes.dims[-1]) == axes else "rowwise_split_input"
