"""The pictures of the page: bars against goals, curves, predicted against measured. SVG, the same for the same data.

Rendered by matplotlib (`pip install "meshwright[bench]"`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

matplotlib.use("svg")
matplotlib.rcParams |= {"svg.hashsalt": "search", "svg.fonttype": "none", "axes.spines.top": False}
matplotlib.rcParams |= {"axes.spines.right": False, "font.size": 9, "legend.frameon": False}
BLUE, RED = "#3b7dd8", "#d64562"
Points = Sequence[tuple[float, float]]


def goals(file: Path, rows: Sequence[tuple[str, float, float]], unit: str) -> None:
    """A bar per (name, measured, goal) on a logarithmic axis, and a mark where the goal is."""
    figure = Figure(figsize=(8, 0.45 * len(rows) + 1), layout="constrained")
    axes = figure.subplots()
    names, measured, wanted = zip(*rows, strict=True)
    places = range(len(rows))
    axes.barh(places, measured, color=[BLUE if a <= b else RED for a, b in zip(measured, wanted, strict=True)])
    axes.scatter(wanted, places, marker="|", s=220, color="black", label="goal", zorder=3)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel(unit)
    axes.legend()
    _write(figure, file)


def curves(file: Path, panels: Mapping[str, Mapping[str, Points]], unit: str) -> None:
    """Panels side by side, each titled by its x axis; both axes are logarithmic."""
    figure = Figure(figsize=(5 * len(panels), 3.6), layout="constrained")
    for axes, (title, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for name, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
        axes.set(xscale="log", yscale="log", xlabel=title, ylabel=unit)
        axes.legend()
    _write(figure, file)


def lines(file: Path, measured: Mapping[str, Points], predicted: Points, labels: tuple[str, str]) -> None:
    """A line per name through what was measured, crosses where it was predicted; linear axes from 0."""
    figure = Figure(figsize=(5.4, 3.6), layout="constrained")
    axes: Axes = figure.subplots()
    for name, points in measured.items():
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=name)
    axes.scatter(*zip(*predicted, strict=True), marker="x", s=40, color="black", label="predicted", zorder=3)
    axes.set(xlabel=labels[0], ylabel=labels[1], xlim=(0, None), ylim=(0, None))
    axes.legend()
    _write(figure, file)


def against(file: Path, groups: Mapping[str, Points], unit: str) -> None:
    """Predicted (y) against measured (x), logarithmic, a colour per group; the line marks equality."""
    figure = Figure(figsize=(5.4, 4.6), layout="constrained")
    axes: Axes = figure.subplots()
    values = [value for points in groups.values() for point in points for value in point]
    axes.plot([min(values), max(values)], [min(values), max(values)], color="grey", linewidth=1)
    for name, points in groups.items():
        axes.scatter(*zip(*points, strict=True), s=16, label=name)
    axes.set(xscale="log", yscale="log", xlabel=f"measured, {unit}", ylabel=f"predicted, {unit}")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    axes.legend()
    _write(figure, file)


def pairs(file: Path, rows: Sequence[tuple[str, float, float]], labels: tuple[str, str], unit: str) -> None:
    """Two bars per (name, first, second)."""
    figure = Figure(figsize=(8, 0.5 * len(rows) + 1), layout="constrained")
    axes = figure.subplots()
    names, first, second = zip(*rows, strict=True)
    axes.barh([place - 0.2 for place in range(len(rows))], first, 0.4, color="grey", label=labels[0])
    axes.barh([place + 0.2 for place in range(len(rows))], second, 0.4, color=BLUE, label=labels[1])
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.legend()
    _write(figure, file)


def _write(figure: Figure, file: Path) -> None:
    figure.savefig(file, format="svg", metadata={"Date": None})
