"""Coordinates of a sweep's figures, in pixels: the loss of every job by step, and the results as bars."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from runner.report.html import COLOURS
from runner.run_folder.metrics import records

WIDTH, HEIGHT, LEFT, BELOW = 900, 320, 70, 24
POINTS = 300
"""The maximum number of points per curve."""
DECADES = 1.5
"""Losses that span more have a logarithmic scale."""


@dataclass(frozen=True)
class Curve:
    """The losses of a job as a path."""

    title: str
    path: str
    colour: str


@dataclass(frozen=True)
class Curves:
    """The losses of all jobs; `ticks` are x, y and label."""

    curves: tuple[Curve, ...]
    ticks: tuple[tuple[float, float, str], ...]
    logarithmic: bool
    width: int = WIDTH
    height: int = HEIGHT + BELOW


def curves(folders: Mapping[str, Path]) -> Curves | None:
    """The loss of every job, by its title, over the steps; None where no job has two steps."""
    points = {title: _losses(folder) for title, folder in folders.items()}
    points = {title: one for title, one in points.items() if len(one) > 1}
    if not points:
        return None
    losses = [loss for one in points.values() for _, loss in one]
    low, high = min(losses), max(losses)
    logarithmic = low > 0 and math.log10(high / low) > DECADES
    steps = [step for one in points.values() for step, _ in one]
    first, last = min(steps), max(steps)

    def y(loss: float) -> float:
        at, bottom, top = (math.log(value) if logarithmic else value for value in (loss, low, high))
        return round(HEIGHT - (at - bottom) / ((top - bottom) or 1) * (HEIGHT - 20), 1)

    def x(step: float) -> float:
        return round(LEFT + (step - first) / ((last - first) or 1) * (WIDTH - LEFT - 10), 1)

    paths = {title: "M" + " L".join(f"{x(step)} {y(loss)}" for step, loss in one) for title, one in points.items()}
    middle = math.sqrt(low * high) if logarithmic else (low + high) / 2
    ticks = [(0.0, y(loss) + 4, f"{loss:.4g}") for loss in sorted({low, middle, high})]
    ticks += [(x(step) - 40 * (step == last), HEIGHT + 18, f"step {step:g}") for step in sorted({first, last})]
    colours = zip(paths.items(), cycle(COLOURS), strict=False)
    return Curves(tuple(Curve(title, path, colour) for (title, path), colour in colours), tuple(ticks), logarithmic)


@dataclass(frozen=True)
class Bar:
    """The result of a job."""

    text: str
    width: float
    colour: str


def bars(values: Mapping[str, float]) -> list[Bar]:
    """A bar per job, to the scale of the largest."""
    scale = max((abs(value) for value in values.values()), default=0.0) or 1.0
    return [
        Bar(f"{value:.6g}  {title}", max(1.0, round(abs(value) / scale * WIDTH / 2, 1)), colour)
        for (title, value), colour in zip(values.items(), cycle(COLOURS), strict=False)
    ]


def _losses(folder: Path) -> list[tuple[float, float]]:
    """(step, loss), thinned out."""
    points = [(one["step"], one["loss"]) for one in records(folder) if isinstance(one.get("loss"), int | float)]
    stride = -(-len(points) // POINTS) or 1
    return points[::stride] + (points[-1:] if (len(points) - 1) % stride else [])
