"""The report of a plan as one file of HTML that needs no network.

Made from the content of plan.json alone, repeated layers shown once, so its size does not grow with the depth.
"""

from __future__ import annotations

import math
from itertools import cycle
from typing import Any

from runner.report import drawings, text, units
from runner.report.html import COLOURS, render
from runner.report.layers import kinds


def plan_page(content: text.Content, title: str) -> str:
    """The report of a plan.

    Args:
        content: that of plan.json with its predictions.
        title: names the run.
    """
    layers, axes = kinds(content["operators"]), list(content["mesh"])
    memory, prediction, search = content["memory"], content["prediction"], content["search"]

    def by_layer(amounts: list[float], show: Any) -> list[drawings.Drawing]:
        return drawings.bar(dict(zip((kind.title for kind in layers), amounts, strict=True)), show)

    sums = [kind.sums for kind in layers]
    return render(
        "plan.html",
        bar_width=drawings.BAR,
        node=(drawings.NODE_WIDTH, drawings.NODE_HEIGHT),
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
        step_time=drawings.bar(text.step_parts(content["cost"]), units.shown_seconds),
        limits=drawings.bar(prediction["shares"], units.shown_seconds),
        all_stages=", all stages together" if "pipeline" in content else "",
        memory=memory,
        memory_limit=prediction["memory_limit"],
        memory_parts=drawings.bar({part: memory[part] for part in text.MEMORY}, units.shown_bytes),
        memory_gauge=drawings.gauge(memory["peak"], prediction["memory_limit"]),
        mesh=drawings.mesh_drawing(content["mesh"]),
        mesh_axes=_mesh_axes(content),
        meshes=prediction["ranks"] // math.prod(content["mesh"].values()),
        search_lines=text.search_lines(search),
        layer_bars={
            "time": by_layer([one.seconds for one in sums], units.shown_seconds),
            "parameters of a rank": by_layer([one.parameters for one in sums], units.shown_bytes),
            "results of operators, of a rank": by_layer([one.results for one in sums], units.shown_bytes),
        },
        axis_colours=list(zip(axes, cycle(COLOURS), strict=False)),
        flow=drawings.flow_drawing(layers),
        layers=[(kind, drawings.layer_drawing(kind, axes)) for kind in layers],
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
