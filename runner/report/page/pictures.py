"""The pictures of the report, as SVG: the mesh, bars of time and memory, and the operators of a layer as a graph."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import cycle, product
from math import prod
from typing import Any

from runner.report.layer_table import shown_bytes
from runner.report.layers import Kind, Row
from runner.report.page.markup import Markup, element, joined
from runner.report.page.shell import drawing
from runner.report.page.style import COLOURS
from strategies.core.steps import LOCAL
from strategies.rules.traits import traits

BAR = 960
CELL, GAP, MOST = 30, 10, 8
"""Of the mesh: the side of a rank in pixels, the gap between blocks, and how many ranks are drawn along an axis."""
NODE_WIDTH, NODE_HEIGHT, LANE, STEP, MARGIN = 196, 22, 212, 40, 40
AXIS = re.compile(r"[\w.]+")
RESULT = -1
"""The operand of redistributions that stand behind their operator."""
LARGEST = 120
"""Operators of a layer beyond which only those are drawn that hold parameters or send."""


def mesh_picture(mesh: Mapping[str, int]) -> Markup:
    """Every rank as a cell: the last axis runs across, the one before down, the others in blocks. Long axes are cut
    short, and axes of one rank left out."""
    sizes = [size for size in mesh.values() if size > 1] or [1]
    shown = [min(size, MOST) for size in sizes]
    while prod(shown) > MOST * MOST * 2:
        shown[max(range(len(shown)), key=lambda axis: shown[axis])] -= 1
    strides = [prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
    across, down = shown[-1], shown[-2] if len(shown) > 1 else 1
    outer = shown[:-2]
    width, height = across * CELL + GAP, down * CELL + GAP
    per_row = max(1, 640 // width)
    cells = []
    for block, place in enumerate(product(*(range(size) for size in outer))):
        left, top = block % per_row * width, block // per_row * height
        for row, column in product(range(down), range(across)):
            inner = (row, column) if len(shown) > 1 else (column,)
            rank = sum(c * stride for c, stride in zip((*place, *inner), strides, strict=True))
            x, y = left + column * CELL, top + row * CELL
            cells.append(element("rect", x=x, y=y, width=CELL - 2, height=CELL - 2, rx=4, class_="rank"))
            cells.append(element("text", str(rank), x=x + CELL / 2 - 1, y=y + CELL / 2 + 3, class_="rank"))
    blocks = prod(outer)
    mesh_drawing = drawing(min(blocks, per_row) * width, -(-blocks // per_row) * height, *cells, title="the mesh")
    left_out = prod(sizes) - prod(shown)
    note = element("p", f"{left_out} more ranks are not drawn.", class_="note") if left_out else Markup("")
    return joined(mesh_drawing, note)


def bar(parts: Mapping[str, tuple[float, str]], *, title: str) -> Markup:
    """A bar of amounts with their texts, side by side, and a legend."""
    shown = {name: part for name, part in parts.items() if part[0] > 0}
    total = sum(amount for amount, _ in shown.values())
    x, pieces, legend = 0.0, [], []
    for (name, (amount, text)), colour in zip(shown.items(), cycle(COLOURS), strict=False):
        width = BAR * amount / total
        piece = element("rect", x=round(x, 2), y=2, width=round(width, 2), height=26, fill=colour)
        pieces.append(element("g", element("title", f"{name}: {text}"), piece))
        swatch = element("span", "", class_="swatch", style=f"background:{colour}")
        legend.append(element("li", swatch, f"{name} {text} ({amount / total:.0%})"))
        x += width
    return joined(
        element("div", drawing(BAR, 30, *pieces, title=title), class_="bar"), element("ul", *legend, class_="legend")
    )


def gauge(used: float, limit: float, title: str) -> Markup:
    """How much of a limit is used; beyond the limit the rest is marked."""
    scale = BAR / max(used, limit)
    parts = [element("rect", x=0, y=2, width=round(limit * scale, 2), height=10, rx=5, class_="plain")]
    parts.append(element("rect", x=0, y=2, width=round(min(used, limit) * scale, 2), height=10, rx=5, fill=COLOURS[0]))
    if used > limit:
        over = {"x": round(limit * scale, 2), "width": round((used - limit) * scale, 2)}
        parts.append(element("rect", y=2, height=10, fill=COLOURS[5], **over))
    return element("div", drawing(BAR, 14, *parts, title=title), class_="bar")


def layer_picture(kind: Kind, axes: Sequence[str]) -> Markup:
    """The operators of one layer, in the order of their depth. An edge over which something is sent is marked; its
    collectives are its tooltip. Operators that only show elements in another shape are drawn where they send."""
    rows = kind.rows()
    drawn = [row for row in rows if row.telling or not traits(row.first["op"]).view]
    if len(drawn) > LARGEST:
        drawn = [row for row in rows if row.telling]
    by_name = {row.first["name"]: row for row in rows}
    keep = {row.first["name"] for row in drawn}
    origins = {row.first["name"]: _origins(row.first, by_name, keep) for row in drawn}
    places, size = _placed({name: [other for other in found if other] for name, found in origins.items()})
    nodes = [_node(row.first, row.name, places[row.first["name"]], axes) for row in drawn]
    edges = []
    for row in drawn:
        x, y = places[row.first["name"]]
        for other, operands in origins[row.first["name"]].items():
            sent = "; ".join(_sends(row.first, operands))
            if other or sent:
                edges.append(_edge(places[other] if other else (x, y - STEP), (x, y), sent))
    return drawing(*size, *edges, *nodes, title=f"operators of {kind.name}")


def flow_picture(found: Sequence[Kind]) -> Markup:
    """The kinds of layers and which takes values of which; those of one layer of a kind to the next are not drawn."""
    owner = {entry["name"]: at for at, kind in enumerate(found) for layer in kind.instances for entry in layer}
    roots: dict[str, list[str]] = {kind.name: [] for kind in found}
    for at, kind in enumerate(found):
        before = {owner.get(name, at) for layer in kind.instances for entry in layer for name in entry["inputs"]}
        roots[kind.name] = [found[other].name for other in sorted(before) if other < at]
    places, size = _placed(roots)
    nodes = []
    for kind in found:
        (x, y), label = places[kind.name], kind.name + (f" x {kind.count}" if kind.count > 1 else "")
        box = element("rect", x=x, y=y, width=NODE_WIDTH, height=NODE_HEIGHT, rx=4, class_="holds")
        nodes.append(element("g", box, element("text", _short(label), x=x + 8, y=y + 15, class_="node")))
    edges = [_edge(places[other], places[name], "") for name, others in roots.items() for other in others]
    return drawing(*size, *edges, *nodes, title="layers")


def _placed(roots: Mapping[str, Sequence[str]]) -> tuple[dict[str, tuple[int, int]], tuple[int, int]]:
    """Where the nodes of a graph are drawn, given in an order in which producers come first: a line per depth. And the
    size of the drawing."""
    depth: dict[str, int] = {}
    lanes: dict[int, int] = {}
    places: dict[str, tuple[int, int]] = {}
    for name, others in roots.items():
        depth[name] = max((depth[other] + 1 for other in others), default=0)
        lane = lanes.get(depth[name], 0)
        lanes[depth[name]] = lane + 1
        places[name] = (lane * LANE + MARGIN, depth[name] * STEP + 4)
    return places, (max(lanes.values(), default=1) * LANE + MARGIN, (max(depth.values(), default=0) + 1) * STEP)


def _origins(entry: Mapping[str, Any], rows: Mapping[str, Row], keep: set[str]) -> dict[str, set[int]]:
    """The drawn operators of the layer from which an operator's operands come, through those that are not drawn, with
    the positions of these operands; those from outside of the layer, and the result, are under an empty name."""
    found: dict[str, set[int]] = {"": {RESULT}}
    for position, operand in enumerate(entry["inputs"]):
        waiting = [operand]
        while waiting:
            name = waiting.pop(0)
            if name in keep or name not in rows:
                found.setdefault(name if name in keep else "", set()).add(position)
            else:
                waiting += rows[name].first["inputs"]
    return found


def _sends(entry: Mapping[str, Any], operands: set[int]) -> list[str]:
    """What is sent for some operands of an operator, step by step."""
    return [
        f"{'result' if one['operand'] == RESULT else 'operand'}, {way}: {step['step']}, {shown_bytes(step['bytes'])}"
        for one in entry["redistributions"]
        if one["operand"] in operands
        for way in ("forward", "backward")
        for step in one[way]
        if step["collective"] not in LOCAL
    ]


def _node(entry: Mapping[str, Any], label: str, place: tuple[int, int], axes: Sequence[str]) -> Markup:
    x, y = place
    layouts = f"{' '.join(entry['in_layouts'])} -> {' '.join(entry['out_layouts'])}"
    told = f"{entry['name']} ({entry['op']}, {entry['source']}): {layouts}"
    words = set(AXIS.findall(layouts))
    used = [axis for axis in axes if axis in words]
    stripes = [
        element(
            "rect",
            x=x + 3 + 7 * number,
            y=y + 3,
            width=5,
            height=NODE_HEIGHT - 6,
            fill=COLOURS[axes.index(axis) % len(COLOURS)],
        )
        for number, axis in enumerate(used)
    ]
    held = "holds" if entry["predicted"]["parameters"] else "plain"
    box = element("rect", x=x, y=y, width=NODE_WIDTH, height=NODE_HEIGHT, rx=4, class_=held)
    text = element("text", _short(label), x=x + 8 + 7 * len(used), y=y + 15, class_="node")
    return element("g", element("title", told), box, *stripes, text)


def _short(label: str) -> str:
    return label if len(label) <= 26 else f"{label[:12]}…{label[-13:]}"


def _edge(start: tuple[int, int], end: tuple[int, int], sent: str) -> Markup:
    """From one node down to another; past nodes in between it bends to the side."""
    (x1, y1), (x2, y2) = start, end
    if y2 - y1 > STEP and x1 == x2:
        side, down = x1 - 0.6 * MARGIN, y1 + NODE_HEIGHT / 2
        way = f"M{x1} {down} C{side} {down} {side} {y2 + NODE_HEIGHT / 2} {x2} {y2 + NODE_HEIGHT / 2}"
    else:
        way = f"M{x1 + NODE_WIDTH / 2} {y1 + NODE_HEIGHT} L{x2 + NODE_WIDTH / 2} {y2}"
    line = element("path", d=way, class_="sent" if sent else "edge")
    return element("g", element("title", sent), line) if sent else line
