"""The pictures of a sweep, as SVG: the loss of every job by step, and what came of each as bars."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path

from runner.report.page.markup import Markup, element, joined
from runner.report.page.shell import drawing
from runner.report.page.style import COLOURS
from runner.sweep.job import records

WIDTH, HEIGHT, LEFT, BELOW = 900, 320, 70, 24
POINTS = 300
"""At most so many per curve."""
DECADES = 1.5
"""Losses that span more are drawn on a logarithmic scale."""
LINE = 24
"""Height of a bar with its text."""

Point = tuple[float, float]


def curves(folders: Mapping[str, Path]) -> Markup | None:
    """The loss of every job, by its title, over the steps, with a legend; None where no job has two steps."""
    points = {title: _losses(folder) for title, folder in folders.items()}
    drawn = {title: one for title, one in points.items() if len(one) > 1}
    if not drawn:
        return None
    losses = [loss for one in drawn.values() for _, loss in one]
    low, high = min(losses), max(losses)
    logarithmic = low > 0 and math.log10(high / low) > DECADES
    steps = [step for one in drawn.values() for step, _ in one]
    first, last = min(steps), max(steps)

    def height(loss: float) -> float:
        at, bottom, top = (math.log(x) if logarithmic else x for x in (loss, low, high))
        return round(HEIGHT - (at - bottom) / ((top - bottom) or 1) * (HEIGHT - 20), 1)

    def across(step: float) -> float:
        return round(LEFT + (step - first) / ((last - first) or 1) * (WIDTH - LEFT - 10), 1)

    lines, legend = [], []
    for (title, one), colour in zip(drawn.items(), cycle(COLOURS), strict=False):
        way = "M" + " L".join(f"{across(step)} {height(loss)}" for step, loss in one)
        curve = element("path", d=way, stroke=colour, stroke_width=1.6)
        lines.append(element("g", element("title", title), curve))
        legend.append(element("li", element("span", "", class_="swatch", style=f"background:{colour}"), title))
    middle = math.sqrt(low * high) if logarithmic else (low + high) / 2
    ticks = [element("text", f"{loss:.4g}", x=0, y=height(loss) + 4) for loss in {low, middle, high}]
    ticks += [
        element("text", f"step {step:g}", x=across(step) - 40 * (step == last), y=HEIGHT + 18) for step in {first, last}
    ]
    picture = drawing(WIDTH, HEIGHT + BELOW, *ticks, *lines, title="loss by step")
    scale = element("p", "The scale of the loss is logarithmic.", class_="note") if logarithmic else Markup("")
    return joined(picture, scale, element("ul", *legend, class_="legend"))


def bars(values: Mapping[str, float]) -> Markup:
    """A number per job, as a bar whose length is its share of the largest."""
    scale = max(abs(value) for value in values.values()) or 1.0
    lines = []
    for number, (title, value) in enumerate(values.items()):
        y, width = number * LINE, max(1.0, round(abs(value) / scale * WIDTH / 2, 1))
        lines.append(
            element("rect", x=0, y=y + 3, width=width, height=LINE - 6, rx=3, fill=COLOURS[number % len(COLOURS)])
        )
        lines.append(element("text", f"{value:.6g}  {title}", x=width + 8, y=y + 16))
    return element("div", drawing(WIDTH * 1.5, LINE * len(values), *lines, title="results"), class_="wide")


def _losses(folder: Path) -> list[Point]:
    """(step, loss), thinned out."""
    found = [(one["step"], one["loss"]) for one in records(folder) if isinstance(one.get("loss"), int | float)]
    stride = -(-len(found) // POINTS) or 1
    return found[::stride] + (found[-1:] if (len(found) - 1) % stride else [])
