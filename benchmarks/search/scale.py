"""Recursive programming on the largest problems, and its time against operators and devices."""

from __future__ import annotations

import math

from benchmarks.search import charts
from benchmarks.search.outcome import Claim, Outcome, Setting
from benchmarks.search_scale import by_devices, by_operators, large

TITLE = "Recursive programming at scale"
SLOPE = 1.1
"""Of the seconds against the operators, both logarithmic, over the last decade: 1 is linear."""


def measure(setting: Setting) -> Outcome:
    """The shape of 405B on 16,384 devices, then chains of up to 10,000 operators."""
    shape = large(8 if setting.quick else 126, 1 if setting.quick else 3)
    operators = by_operators(1000 if setting.quick else 10_000)
    devices = by_devices(64 if setting.quick else 16_384)
    charts.curves(setting.pictures / "scale.svg", {"operators": operators, "devices": devices}, "CPU seconds")
    repeated, *_ = operators.values()
    (few, fast), (many, slow) = next(point for point in repeated if point[0] >= repeated[-1][0] / 10), repeated[-1]
    slope = math.log(slow / fast) / math.log(many / few)
    claims = (
        Claim(
            f"405B shape, {shape.layers} layers, {shape.operators} operators, 16,384 devices: at most 1 s",
            f"{shape.seconds:.2f} s",
            shape.seconds <= 1,
        ),
        Claim(f"linear in operators: slope at most {SLOPE} to {many:,.0f} operators", f"{slope:.2f}", slope <= SLOPE),
    )
    rows = [
        (name, f"{size:,.0f} {what}", f"{seconds:.3f}")
        for what, series in (("operators", operators), ("devices", devices))
        for name, points in series.items()
        for size, seconds in points
    ]
    return Outcome(claims, ("problem", "size", "CPU seconds"), tuple(rows), ("search/scale.svg",))
