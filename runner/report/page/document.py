"""The report as a page: what the plan promises, where time and memory go, the mesh, and every kind of layer.

Made from the content of plan.json alone, repeated layers told once, so its size does not grow with the depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any

from runner.report import search_summary as search_lines
from runner.report.decision_table import HEAD, counted, decision_rows
from runner.report.layer_table import arrow, next_better, shown_bytes, shown_rate, shown_seconds, shown_share
from runner.report.layers import Kind, Row, Sums, kinds
from runner.report.page.markup import Markup, element, joined
from runner.report.page.pictures import bar, flow_picture, gauge, layer_picture, mesh_picture
from runner.report.page.shell import section, shell
from runner.report.page.style import COLOURS

Content = Mapping[str, Any]
MEMORY = ("parameters", "gradients", "optimizer", "activations", "buffers")
COLUMNS = ("operator", "layouts", "chosen", "compute", "communication", "sent", "parameters", "results")
TEXTS = 3
"""Columns of text; the others are numbers."""


def page(content: Content, title: str) -> str:
    """The whole file. `content` is that of plan.json with its predictions; `title` names the run."""
    found = kinds(content["operators"])
    together = ", all stages together" if "pipeline" in content else ""
    body = (
        element("h1", title),
        element("p", _subtitle(content), class_="note"),
        _tiles(content["prediction"]),
        *(element("p", line) for line in next_better(content)),
        *([section("Decided", _decided(content["search"]["decided"]))] if content["search"].get("decided") else []),
        section(
            "Time of a step",
            bar(_times(content["cost"]), title="time of a step by part"),
            element("h3", f"by what limits it{together}"),
            bar(_limits(content["prediction"]["shares"]), title="time of a step by limit"),
        ),
        section("Memory of a rank", _memory(content)),
        section("Mesh", _mesh(content)),
        section(
            "Layers",
            element("h3", f"time{together}"),
            bar(_by_layer(found, lambda sums: sums.seconds, shown_seconds), title="time by layer"),
            element("h3", f"parameters of a rank{together}"),
            bar(_by_layer(found, lambda sums: float(sums.parameters), shown_bytes), title="parameters by layer"),
            element("h3", f"results of operators, of a rank{together}"),
            bar(_by_layer(found, lambda sums: float(sums.results), shown_bytes), title="results by layer"),
            element("h3", "graph"),
            _axes(list(content["mesh"])),
            element("div", flow_picture(found), class_="wide"),
            *(_layer(kind, list(content["mesh"])) for kind in found),
        ),
        section("Operators", element("div", _table(found), class_="wide")),
    )
    return shell(f"Plan of {title}", *body)


def _subtitle(content: Content) -> str:
    mesh = " x ".join(f"{axis} {size}" for axis, size in content["mesh"].items())
    search = content["search"]
    where = f"loaded from {search['loaded_from']}" if "loaded_from" in search else f"found in {search['seconds']:.2f} s"
    gap = "" if search.get("gap") is None else f"; at most {search['gap']:.2%} above the cheapest"
    return f"{len(content['operators'])} operators on the mesh {mesh}; {search['algorithm']}, {where}{gap}"


def _tiles(told: Content) -> Markup:
    used = f"{told['ranks']} of {told['devices']}" if told["ranks"] < told["devices"] else str(told["ranks"])
    tiles = [(f"{used} devices", told["cluster"]), (shown_seconds(told["seconds"]), "per step")]
    if told["seconds"]:
        tiles.append((shown_rate(told["samples_per_second"]), "samples per second"))
        if told["tokens_per_second"]:
            tiles.append((shown_rate(told["tokens_per_second"]), "tokens per second"))
        tiles.append((shown_share(told["mfu"]), "of peak flops (MFU)"))
    tiles += [(shown_bytes(told["memory"]), f"of {shown_bytes(told['memory_limit'])} memory per device")]
    tiles += [(told["binding"], "is the limit that binds")]
    return element(
        "div",
        *(element("div", element("b", value), element("span", what), class_="tile") for value, what in tiles),
        class_="tiles",
    )


def _times(cost: Content) -> dict[str, tuple[float, str]]:
    """The parts of a step that add up to its time."""
    parts = {name: cost[name] for name in ("forward", "backward", "recomputed")}
    parts |= dict(cost["redistributions"])
    parts["gradients beyond backward"] = cost["gradients_exposed"]
    parts |= {f"ZeRO's {kind}": seconds for kind, seconds in cost["zero"].items()}
    parts |= {name: cost[name] for name in ("send", "waiting", "optimizer") if name in cost}
    return {name: (seconds, shown_seconds(seconds)) for name, seconds in parts.items()}


def _limits(shares: Mapping[str, float]) -> dict[str, tuple[float, str]]:
    return {name: (seconds, shown_seconds(seconds)) for name, seconds in shares.items()}


def _by_layer(
    found: Sequence[Kind], amount: Callable[[Sums], float], show: Callable[[float], str]
) -> dict[str, tuple[float, str]]:
    """An amount of every kind of layers, summed over its layers."""
    amounts = {_heading(kind): amount(kind.sums()) for kind in found}
    return {name: (one, show(one)) for name, one in amounts.items()}


def _heading(kind: Kind) -> str:
    return kind.name + (f" x {kind.count}" if kind.count > 1 else "")


def _memory(content: Content) -> Markup:
    needed, limit = content["memory"], content["prediction"]["memory_limit"]
    parts = {name: (float(needed[name]), shown_bytes(needed[name])) for name in MEMORY}
    told = f"At most {shown_bytes(needed['peak'])} of {shown_bytes(limit)} are needed at once, in {needed['peak_in']}:"
    return joined(
        bar(parts, title="memory of a rank by part"),
        element("p", told),
        gauge(needed["peak"], limit, "memory of a device that is needed"),
    )


def _mesh(content: Content) -> Markup:
    levels = content["prediction"]["axes"]
    lines: list[Markup] = []
    long = [axis for axis, size in content["mesh"].items() if size > 1]
    for axis, way in zip(reversed(long), ("across", "down", *["in blocks"] * len(long)), strict=False):
        size = content["mesh"][axis]
        lines.insert(0, element("li", element("b", axis), f": {size} ranks {way}, over the {levels[axis]} link"))
    told = [element("p", line, class_="note") for line in search_lines.lines(content["search"])]
    groups = content["prediction"]["ranks"] // math.prod(content["mesh"].values())
    note = f"{groups} such meshes follow one another, a group of the pipeline's ranks each." if groups > 1 else None
    shown = [element("p", note, class_="note")] if note else []
    return joined(mesh_picture(content["mesh"]), *shown, element("ul", *lines, class_="legend"), *told)


def _decided(told: Content) -> Markup:
    """What auto decided beside the plan, its runner-up and the difference."""
    heads = element("tr", *(element("th", name) for name in HEAD))
    rows = [element("tr", *(element("td", cell) for cell in row)) for row in decision_rows(told)]
    return joined(element("table", heads, *rows), element("p", counted(told), class_="note"))


def _axes(axes: list[str]) -> Markup:
    """Which stripe of an operator stands for which axis."""
    swatches = zip(axes, cycle(COLOURS), strict=False)
    lines = [
        element("li", element("span", "", class_="swatch", style=f"background:{colour}"), f"sliced over {axis}")
        for axis, colour in swatches
    ]
    return element("ul", *lines, element("li", "thick red: something is sent (hover)"), class_="legend")


def _layer(kind: Kind, axes: list[str]) -> Markup:
    found = kind.sums()
    told = (
        f"compute {shown_seconds(found.compute)}, "
        f"communication {shown_seconds(found.communication + found.gradients)}, "
        f"{shown_bytes(found.parameters)} of parameters per rank"
    )
    title = element("b", _heading(kind))
    inner = element("div", layer_picture(kind, axes), class_="wide")
    return element("details", element("summary", title, f": {told}"), inner, open="" if kind.count > 1 else None)


def _table(found: list[Kind]) -> Markup:
    rows = [element("tr", *(element("th", name, class_=_class(at)) for at, name in enumerate(COLUMNS)))]
    for kind in found:
        rows.append(_line(_heading(kind), "", "", kind.sums(), class_="kind"))
        rows += [_operator(row) for row in kind.rows()]
    return element("table", *rows)


def _operator(row: Row) -> Markup:
    return _line(row.name, arrow(row), row.first["origin"], row.sums(), class_=None)


def _line(name: str, layouts: str, chosen: str, found: Sums, *, class_: str | None) -> Markup:
    seconds = found.compute, found.communication + found.gradients
    numbers = [shown_seconds(one) if one else "" for one in seconds]
    numbers += [shown_bytes(one) if one else "" for one in (found.sent, found.parameters, found.results)]
    first = element("td", name, class_=None if class_ else "name")
    cells = [first, element("td", element("code", layouts)), element("td", chosen)]
    return element("tr", *cells, *(element("td", number, class_="number") for number in numbers), class_=class_)


def _class(column: int) -> str | None:
    return "number" if column >= TEXTS else None
