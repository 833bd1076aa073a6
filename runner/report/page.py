"""The report of a plan as one file of HTML that needs no network.

Made from the content of plan.json alone, repeated layers shown once, so its size does not grow with the depth.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, product
from math import prod
from typing import Any

from runner.report import text, units
from runner.report.html import COLOURS, render
from runner.report.layers import LayerKind, Row, kinds
from runner.report.schedule import drawing, spans_of
from runner.report.units import shown_bytes
from strategies.core.steps import LOCAL
from strategies.rules.traits import traits

BAR = 960
"""Width of a bar."""
CELL, GAP, MOST = 30, 10, 8
"""Of the mesh: the side of a rank, the gap between blocks, and the largest number of ranks along an axis."""
NODE_WIDTH, NODE_HEIGHT, LANE, STEP, MARGIN = 196, 22, 212, 40, 40
AXIS = re.compile(r"[\w.]+")
RESULT = -1
"""The operand of redistributions behind an operator."""
LARGEST = 120
"""Operators of a layer beyond which only those are visible that have parameters or communicate."""


Drawing = dict[str, Any]


def bar(amounts: Mapping[str, float], show: Callable[[float], str]) -> list[Drawing]:
    """Positive amounts side by side, to scale, as segments with their entries in the legend; `show` formats one."""
    amounts = {name: amount for name, amount in amounts.items() if amount > 0}
    total, x, segments = sum(amounts.values()), 0.0, []
    for (name, amount), colour in zip(amounts.items(), cycle(COLOURS), strict=False):
        segment = {"name": name, "text": show(amount), "share": amount / total, "colour": colour}
        width = BAR * amount / total
        segments.append(segment | {"x": round(x, 2), "width": round(width, 2)})
        x += width
    return segments


def gauge(used: float, limit: float) -> Drawing:
    """The widths of a limit, of the used part, and of the excess, to scale."""
    widths = {"limit": limit, "used": min(used, limit), "beyond": max(used - limit, 0.0)}
    return {name: round(width * BAR / max(used, limit), 2) for name, width in widths.items()}


def mesh_drawing(mesh: Mapping[str, int]) -> Drawing:
    """Every rank as a cell: the last axis runs across, the one before down, the others in blocks. Long axes are cut
    short, and axes of size 1 left out."""
    sizes = [size for size in mesh.values() if size > 1]
    sizes = [1] * (2 - len(sizes)) + sizes
    shown = [min(size, MOST) for size in sizes]
    while prod(shown) > MOST * MOST * 2:
        shown[max(range(len(shown)), key=lambda axis: shown[axis])] -= 1
    strides = [prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    *outer, down, across = shown
    width, height = across * CELL + GAP, down * CELL + GAP
    per_row = max(1, 640 // width)
    cells = []
    for block, position in enumerate(product(*(range(size) for size in outer))):
        left, top = block % per_row * width, block // per_row * height
        for row, column in product(range(down), range(across)):
            rank = sum(c * stride for c, stride in zip((*position, row, column), strides, strict=True))
            cells.append({"rank": rank, "x": left + column * CELL, "y": top + row * CELL})
    blocks = prod(outer)
    size = {"width": min(blocks, per_row) * width, "height": -(-blocks // per_row) * height}
    return {**size, "cells": cells, "omitted": prod(sizes) - prod(shown)}


def layer_drawing(kind: LayerKind, axes: Sequence[str]) -> Drawing:
    """The operators of one layer, with a stripe of its colour for each axis that slices them; views only if they
    communicate."""
    rows = kind.rows
    visible = [row for row in rows if row.matters or not traits(row.first["op"]).view]
    if len(visible) > LARGEST:
        visible = [row for row in rows if row.matters]
    by_name = {row.first["name"]: row for row in rows}
    names = {row.first["name"] for row in visible}
    origins = {row.first["name"]: _origins(row.first, by_name, names) for row in visible}
    places, size = _placed({name: [other for other in producers if other] for name, producers in origins.items()})
    nodes, edges = [], []
    for row in visible:
        entry, (x, y) = row.first, places[row.first["name"]]
        used = set(AXIS.findall(row.layouts))
        stripes = [colour for axis, colour in zip(axes, cycle(COLOURS), strict=False) if axis in used]
        title = f"{entry['name']} ({entry['op']}, {entry['source']}): {row.layouts}"
        nodes.append(_node(row.name, title, (x, y), bool(entry["predicted"]["parameters"]), stripes))
        for other, operands in origins[entry["name"]].items():
            sent = "; ".join(_sends(entry, operands))
            if other or sent:
                edges.append(_edge(places[other] if other else (x, y - STEP), (x, y), sent))
    return {**size, "nodes": nodes, "edges": edges}


def flow_drawing(layers: Sequence[LayerKind]) -> Drawing:
    """The kinds of layers and the data flow between them, except between successive layers of one kind."""
    owner = {entry["name"]: at for at, kind in enumerate(layers) for layer in kind.instances for entry in layer}
    producers: dict[str, list[str]] = {kind.name: [] for kind in layers}
    for at, kind in enumerate(layers):
        before = {owner.get(name, at) for layer in kind.instances for entry in layer for name in entry["inputs"]}
        producers[kind.name] = [layers[other].name for other in sorted(before) if other < at]
    places, size = _placed(producers)
    nodes = [_node(kind.title, "", places[kind.name], has_parameters=True) for kind in layers]
    edges = [_edge(places[other], places[name], "") for name, others in producers.items() for other in others]
    return {**size, "nodes": nodes, "edges": edges}


def _placed(producers: Mapping[str, Sequence[str]]) -> tuple[dict[str, tuple[int, int]], dict[str, int]]:
    """The places of a graph's nodes, given in topological order, a line per depth; and the size of the drawing."""
    depth: dict[str, int] = {}
    lanes: Counter[int] = Counter()
    places: dict[str, tuple[int, int]] = {}
    for name, others in producers.items():
        depth[name] = max((depth[other] + 1 for other in others), default=0)
        places[name] = (lanes[depth[name]] * LANE + MARGIN, depth[name] * STEP + 4)
        lanes[depth[name]] += 1
    width = max(lanes.values(), default=1) * LANE + MARGIN
    return places, {"width": width, "height": (max(depth.values(), default=0) + 1) * STEP}


def _origins(entry: Mapping[str, Any], rows: Mapping[str, Row], visible: set[str]) -> dict[str, set[int]]:
    """The visible operators of the layer from which an operator's operands come, through the invisible ones, with the
    positions of these operands; those from outside of the layer, and the result, are under an empty name."""
    origins: dict[str, set[int]] = {"": {RESULT}}
    for position, operand in enumerate(entry["inputs"]):
        queue = [operand]
        while queue:
            name = queue.pop(0)
            if name in visible or name not in rows:
                origins.setdefault(name if name in visible else "", set()).add(position)
            else:
                queue += rows[name].first["inputs"]
    return origins


def _sends(entry: Mapping[str, Any], operands: set[int]) -> list[str]:
    """The communication for some operands of an operator, step by step."""
    return [
        f"{'result' if sent['operand'] == RESULT else 'operand'}, {pass_}: {step['step']}, {shown_bytes(step['bytes'])}"
        for sent in entry["redistributions"]
        if sent["operand"] in operands
        for pass_ in ("forward", "backward")
        for step in sent[pass_]
        if step["collective"] not in LOCAL
    ]


def _node(label: str, title: str, place: tuple[int, int], has_parameters: bool, stripes: Sequence[str] = ()) -> Drawing:
    short = label if len(label) <= 26 else f"{label[:12]}…{label[-13:]}"
    x, y = place
    return {"label": short, "title": title, "x": x, "y": y, "has_parameters": has_parameters, "stripes": stripes}


def _edge(start: tuple[int, int], end: tuple[int, int], sent: str) -> Drawing:
    """An edge from one node down to another, which bends around nodes in between; `sent` is communicated on it."""
    (x1, y1), (x2, y2) = start, end
    if y2 - y1 > STEP and x1 == x2:
        side, out, back = x1 - 0.6 * MARGIN, y1 + NODE_HEIGHT / 2, y2 + NODE_HEIGHT / 2
        return {"path": f"M{x1} {out} C{side} {out} {side} {back} {x2} {back}", "sent": sent}
    return {"path": f"M{x1 + NODE_WIDTH / 2} {y1 + NODE_HEIGHT} L{x2 + NODE_WIDTH / 2} {y2}", "sent": sent}


def plan_page(content: text.Content, title: str) -> str:
    """The report of a plan: of the content of plan.json, with its predictions."""
    layers, axes = kinds(content["operators"]), list(content["mesh"])
    memory, prediction, search = content["memory"], content["prediction"], content["search"]

    def by_layer(amounts: list[float], show: Any) -> list[Drawing]:
        return bar(dict(zip((kind.title for kind in layers), amounts, strict=True)), show)

    sums = [kind.sums for kind in layers]
    return render(
        "plan.html",
        bar_width=BAR,
        node=(NODE_WIDTH, NODE_HEIGHT),
        title=title,
        subtitle=_subtitle(content),
        tiles=_tiles(prediction),
        notes=text.next_better(content),
        decision=search.get("decided")
        and {
            "head": text.DECISION,
            "rows": text.decision_rows(search["decided"]),
            "counts": text.decision_counts(search["decided"]),
        },
        step_time=bar(text.step_parts(content["cost"]), units.shown_seconds),
        limits=bar(prediction["shares"], units.shown_seconds),
        all_stages=", all stages together" if "pipeline" in content else "",
        schedule=drawing(spans_of(content["pipeline"])) if "actions" in content.get("pipeline", {}) else None,
        memory=memory,
        memory_limit=prediction["memory_limit"],
        memory_parts=bar({part: memory[part] for part in text.MEMORY}, units.shown_bytes),
        memory_gauge=gauge(memory["peak"], prediction["memory_limit"]),
        mesh=mesh_drawing(content["mesh"]),
        mesh_axes=_mesh_axes(content),
        meshes=prediction["ranks"] // math.prod(content["mesh"].values()),
        search_lines=text.search_lines(search),
        layer_bars={
            "time": by_layer([one.seconds for one in sums], units.shown_seconds),
            "parameters of a rank": by_layer([one.parameters for one in sums], units.shown_bytes),
            "results of operators, of a rank": by_layer([one.results for one in sums], units.shown_bytes),
        },
        axis_colours=list(zip(axes, cycle(COLOURS), strict=False)),
        flow=flow_drawing(layers),
        layers=[(kind, layer_drawing(kind, axes)) for kind in layers],
    )


def _subtitle(content: text.Content) -> str:
    mesh = " x ".join(f"{axis} {size}" for axis, size in content["mesh"].items())
    search = content["search"]
    gap = "" if search.get("gap") is None else f"; optimality gap {text.shown_gap(search['gap'])}"
    return (
        f"{len(content['operators'])} operators on the mesh {mesh}; {search['algorithm']}, {text.source(search)}{gap}"
    )


def _tiles(prediction: text.Content) -> list[tuple[str, str]]:
    """The key figures at the top, each with its label."""
    limit = units.shown_bytes(prediction["memory_limit"])
    tiles = [(f"{text.used_devices(prediction)} devices", prediction["cluster"])]
    tiles.append((units.shown_seconds(prediction["seconds"]), "per step"))
    if prediction["seconds"]:
        for unit in ("samples", "tokens"):
            if rate := prediction[f"{unit}_per_second"]:
                tiles.append((units.shown_rate(rate), f"{unit} per second"))
        tiles.append((units.shown_share(prediction["mfu"]), "of peak flops (MFU)"))
    if (taken := prediction.get("training")) is not None:
        time, hours, *price = text.training_amounts(taken)
        tiles.append((time, f"for {taken['steps']} steps: {', '.join([hours, *price])}"))
    tiles.append((units.shown_bytes(prediction["memory"]), f"of {limit} memory per device"))
    return [*tiles, (prediction["binding"], "is the bottleneck")]


def _mesh_axes(content: text.Content) -> list[tuple[str, str]]:
    """The axes in the drawing, each with the placement of its ranks."""
    links = content["prediction"]["axes"]
    axes = [axis for axis, size in content["mesh"].items() if size > 1]
    directions = zip(reversed(axes), ("across", "down", *["in blocks"] * len(axes)), strict=False)
    lines = [
        (axis, f"{content['mesh'][axis]} ranks {where}, over the {links[axis]} link") for axis, where in directions
    ]
    return lines[::-1]
