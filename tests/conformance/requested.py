"""Translates a case into a planner request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from strategies.core.graph import OperatorGraph
from strategies.core.request import SEARCHES, NamedMatrix, OperatorStrategy, Request
from tests.conformance.forms import Form, Forms, NotMapped, Recorded, wanted
from tests.conformance.network import Case, Step, dataset_strategy, devices, name_of
from tests.conformance.numbers import Built
from tests.conformance.operators import TABLE

INTERLEAVED = "interleaved_parallel"
"""An axis of a device matrix that is not devices: halves of a micro-batch, whose communication overlaps."""


def request_of(case: Case, graph: OperatorGraph, built: Built) -> Request:
    """Raises NotMapped for a mode, a search or a strategy that has no counterpart."""
    layouts: dict[str, NamedMatrix] = {}
    strategies: dict[str, OperatorStrategy] = {}
    for node, step in zip(built.network.nodes, built.network.steps, strict=True):
        strategies |= wanted_of(node, step, graph, layouts, built.seen[node["id"]], devices(case))
    mode = case["mode"]
    if mode not in ("semi_auto", "auto", "data_parallel"):
        raise NotMapped(f"mode {mode}")
    if mode == "auto" and not searched(case):
        mode = "semi_auto"
    return Request(
        mode,
        devices(case),
        case["search_mode"] if mode == "auto" else SEARCHES[0],
        strategies=strategies,
        layouts=layouts,
        dataset_strategy=dataset_of(case, layouts),
    )


def searched(case: Case) -> bool:
    """Whether our search of the same name supports the case: it must exist, and propagation starts from
    configured operators. Otherwise the planner's defaults replace it."""
    search = case["search_mode"]
    configured = any(node.get("in_strategy") or node.get("out_strategy") for node in case["network"])
    return search in SEARCHES and (configured or search != "sharding_propagation")


def dataset_of(case: Case, layouts: dict[str, NamedMatrix]) -> Any:
    strategy = dataset_strategy(case)
    if isinstance(strategy, str):
        return strategy
    return tuple(form_of(entry, layouts).operand() for entry in strategy)


def form_of(entry: Any, layouts: dict[str, NamedMatrix]) -> Form:
    """Counts, or a layout: device matrix, a name per axis, and a name, several or None per dim."""
    if isinstance(entry, list):
        return Form(tuple(entry))
    layout = entry["layout"]
    axes = [(a, n) for a, n in zip(layout["alias"], layout["device_matrix"], strict=True) if a != INTERLEAVED]
    matrix = NamedMatrix(tuple(n for _, n in axes), tuple(a for a, _ in axes))
    name = next((n for n, known in layouts.items() if known == matrix), f"l{len(layouts)}")
    layouts[name] = matrix
    dims = [[dim] if isinstance(dim, str) else dim or [] for dim in layout["map"]]
    return Form(tuple(tuple(axis for axis in dim if axis not in ("None", INTERLEAVED)) for dim in dims), name)


def numbered(matrix: list[int], maps: list[list[int]], layouts: dict[str, NamedMatrix]) -> Forms:
    """Layouts written as numbers of axes, counted from the right; -1 is not sliced."""
    alias = [f"a{i}" for i in range(len(matrix))]
    return tuple(
        form_of(
            {
                "layout": {
                    "device_matrix": matrix,
                    "alias": alias,
                    "map": [alias[-1 - n] if n >= 0 else [] for n in dims],
                }
            },
            layouts,
        )
        for dims in maps
    )


def wanted_of(
    node: Mapping[str, Any],
    step: Step,
    graph: OperatorGraph,
    layouts: dict[str, NamedMatrix],
    seen: tuple[tuple[int, ...], ...],
    ranks: int,
) -> dict[str, OperatorStrategy]:
    """The strategies of one node's torch operators, by plan name."""
    parts = any(name.startswith("shard.") for name in step.attrs)
    if not node.get("in_strategy") and not node.get("out_strategy") and not parts:
        return {}
    if not node.get("in_strategy") and not parts:
        raise NotMapped("an output strategy without an input strategy")
    inputs = tuple(form_of(entry, layouts) for entry in node.get("in_strategy") or [])
    config = step.attrs.get("layout") or {}
    if config.get("input_tensor_map"):
        inputs = numbered(config["dev_matrix"], config["input_tensor_map"], layouts)
    outputs = tuple(form_of(entry, layouts) for entry in node["out_strategy"]) if node.get("out_strategy") else None
    operators = tuple(o for o in graph.operators if o.module == name_of(node))
    if not operators:
        raise NotMapped(f"a strategy for {node['op']}, which torch does not compute here")
    shapes = tuple(tuple(spec.shape for spec in graph.operand_specs(o)) for o in operators)
    arguments = step.arguments(tuple(torch.empty(shape, device="meta") for shape in seen))
    record = Recorded(inputs, outputs, arguments, step.attrs, operators, shapes, ranks)
    try:
        return TABLE[node["op"]].spread(record)
    except IndexError:  # entries for other dims than the operand has: passed unchanged, for the planner to reject
        return {operators[-1].name: wanted(inputs, outputs)}
