"""A plan as the `DistributedConfig` of transformers: a style for every module that holds parameters.

Source: transformers.distributed.configuration_utils.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from runner.export.changes import Change, between, of_optimizer, sent
from runner.planning.clusters import cluster_of
from runner.planning.prepare import Prepared
from strategies.core.experts import experts
from strategies.core.graph import OperatorGraph, Source
from strategies.core.heads import splitting
from strategies.core.layout import Layout
from strategies.core.plan import Plan
from strategies.core.steps import LOCAL
from strategies.cost.collectives import step_seconds
from strategies.cost.styled_modules import RESIZING, is_within, sliceable
from strategies.lowering.lowering import lower
from strategies.planner.by_module import violated
from strategies.planner.declared_layouts import declared_plan, operand_layouts
from strategies.planner.module_styles import EXPERTS, FOR_TRANSFORMERS, axes_of, declared, numberless, tp_plan_of


def changes(prepared: Prepared) -> list[Change]:
    """What transformers lays out otherwise."""
    assert prepared.plan is not None
    copies = prepared.plan.mesh.others(axes_of(prepared.plan))
    return [*of_styles(prepared, FOR_TRANSFORMERS), *of_rows(prepared), *of_optimizer(prepared, {0, 3}, copies)]


def of_styles(prepared: Prepared, styles: Collection[str]) -> Iterator[Change]:
    """The changes of a plan that is declared by styles of modules for a trainer of local tensors, which moves no value
    to its use."""
    graph, plan = prepared.graph, prepared.plan
    assert graph is not None and plan is not None
    axes = axes_of(plan)
    again = declared_plan(graph, declared(styles_of(graph, plan, styles, axes), graph, plan.mesh, axes))
    found = {str(change): change for change in between(prepared, again)}
    yield from found.values()
    known = {change.name for change in found.values()}
    cluster = cluster_of(prepared.config, prepared.device, prepared.world_size)
    for operator in violated(graph, again, styles):
        (ref, *_), (layout, *_) = operator.operands, operand_layouts(operator, graph, plan)
        other = Layout(tuple(tuple(axis for axis in used if axis not in axes) for used in layout.dims))
        if operator.name not in known:
            yield sent("operator", operator.name, layout, other, graph.specs[ref], plan.mesh, cluster)


def styles_of(graph: OperatorGraph, plan: Plan, names: Collection[str], axes: tuple[str, ...]) -> dict[str, str]:
    """`tp_plan_of`, in which modules of rows slice their input where exports of others gather it. AutoTP,
    which has no packed styles, has half of the heads in an attention that has half of any weight: all of it is
    replicated where not all layers whose columns it splits are sliced, as are modules that compute with their sizes."""
    found = tp_plan_of(graph, plan, names, axes)
    unsliced = [numberless(path) for path in graph.unsliced_modules]
    for operator in graph.operators:
        if operator.op == "linear" and not sliceable(operator, graph):  # nor may a table be that is tied to its weight
            weight = graph.by_id[operator.operands[1].id]
            tied = (weight.name, *weight.aliases) if isinstance(weight, Source) else ()
            unsliced += [numberless(name.rpartition(".")[0]) for name in tied]
    found |= {key: "replicate" for key in found if is_within(key, unsliced)}
    for layers in splitting(graph).values() if RESIZING in names else ():
        split, others = ([numberless(one.module) for one in own] for own in (layers.split, layers.others))
        if any(found.get(key) != "colwise" for key in split):
            found |= {key: "replicate" for key in (*split, *others) if key in found}
    again = declared_plan(graph, declared(found, graph, plan.mesh, axes))
    after = tp_plan_of(graph, again, names, axes)
    return {key: after.get(key, style) if style == "rowwise" else style for key, style in found.items()}


def with_tied(styles: Mapping[str, str], graph: OperatorGraph) -> dict[str, str]:
    """`styles`, also of modules that no forward calls and whose parameter is tied to a sliced one (`shared` of T5): a
    trainer slices it under the name that it finds first."""
    found = dict(styles)
    for source in graph.of_kind("parameter"):
        modules = [numberless(name.rpartition(".")[0]) for name in (source.name, *source.aliases)]
        sliced = [styles[path] for path in modules if styles.get(path, "replicate") != "replicate"]
        if sliced:
            style = next((one for one in sliced if one.startswith("embedding")), sliced[0])  # rather than a head's
            found |= {path: style for path in modules if path not in styles}
    return found


def of_rows(prepared: Prepared) -> Iterator[Change]:
    """Operators that read the rows of all ranks, such as a batch norm: a trainer of local tensors, which adds nothing
    over the ranks of a batch but the loss and gradients, gives them those of one rank. Experts sort rows, and restore
    their order, so theirs may be of one rank."""
    graph, plan = prepared.graph, prepared.plan
    assert graph is not None and plan is not None
    cluster, modules = cluster_of(prepared.config, prepared.device, prepared.world_size), {*axes_of(plan)}
    routed = experts(graph)
    rowwise = {operator.name for operator in graph.operators if operator.module in routed}
    found: dict[str, tuple[int, float]] = {}
    for part in lower(graph, plan).redistributions:
        steps = [step for step in part.forward if step.kind not in LOCAL and not modules.issuperset(step.axes)]
        if steps and part.spec.elements > 1 and part.operator not in rowwise:  # the mean of a loss is one number
            bytes_, seconds = found.get(part.operator, (0, 0.0))
            sent_here = sum(step.busiest(plan.mesh) for step in steps) * part.spec.item_bytes
            seconds += sum(step_seconds(step, part.spec.item_bytes, plan.mesh, cluster) for step in steps)
            found[part.operator] = (bytes_ + int(sent_here), seconds)
    for name, (bytes_, seconds) in found.items():
        yield Change("operator", name, "of the rows of all ranks", "of the rows of one rank", -bytes_, -seconds)


def distributed_config(prepared: Prepared, title: str) -> str:
    """The JSON of a `DistributedConfig` of transformers, for `from_pretrained(..., distributed_config=...)`."""
    graph, plan = prepared.graph, prepared.plan
    assert graph is not None and plan is not None
    axes = axes_of(plan)
    data = plan.mesh.size // plan.mesh.product(axes)
    fsdp = prepared.config.parallel.zero.known == 3
    content: dict[str, Any] = {
        "title": f"{title}, by Meshwright",
        "tp_size": plan.mesh.product(axes),
        "fsdp_size": data if fsdp else 1,
        "dp_replicate_size": 1 if fsdp else data,
    }
    if axes:
        styles = with_tied(styles_of(graph, plan, FOR_TRANSFORMERS, axes), graph)
        content["tp_plan"] = {key: style for key, style in styles.items() if style not in EXPERTS}
        by_expert = {key: style for key, style in styles.items() if style in EXPERTS}
        if by_expert:  # all ranks that share a module have all of its rows, and add up what their experts make of them
            content |= {"ep_size": content["tp_size"], "ep_implementation": "all_reduce", "ep_plan": by_expert}
    return json.dumps(content, indent=2) + "\n"
