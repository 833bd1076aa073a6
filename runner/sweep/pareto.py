"""The Pareto front of a sweep's plans: step time against peak memory per rank.

Time is measured by every run that trains, memory with `train.measure_memory=true`; what was not measured is predicted,
and the table says which. A plan is on the front if no other is at least as good in both and better in one. The sweep's
folder is all that is read, so any sweeper and launcher of Hydra will do.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner.report.units import shown_bytes, shown_seconds
from runner.run_folder.metrics import records
from runner.sweep.scale import BELOW, HEIGHT, LEFT, WIDTH, Scale

FIRST = 5
"""Steps that are left out where more follow: memory may be counted in them, and the first ones warm up."""


@dataclass(frozen=True)
class ComparedPlan:
    """A plan of a sweep: seconds of a step and peak bytes of a rank, measured (None: not) and predicted (None: there is
    no plan, as in hybrid mode); `best` on the Pareto front."""

    title: str
    seconds: float | None
    bytes: float | None
    predicted_seconds: float | None
    predicted_bytes: float | None
    best: bool = False

    @property
    def costs(self) -> tuple[float, float] | None:
        """Seconds and bytes, measured or else predicted; None where either is unknown."""
        seconds = self.predicted_seconds if self.seconds is None else self.seconds
        size = self.predicted_bytes if self.bytes is None else self.bytes
        return None if seconds is None or size is None else (seconds, size)


def compared(jobs: Iterable[tuple[str, Path]]) -> list[ComparedPlan]:
    """The plans of jobs, by title and folder, cheapest first; none where a sweep varies something else.

    A sweep varies the plan if two jobs have plans of different predicted costs.
    """
    plans = [one for title, folder in jobs if (one := _read(title, folder)).costs is not None]
    if len({(one.predicted_seconds, one.predicted_bytes) for one in plans}) < 2:
        return []
    front = pareto_front([costs for one in plans if (costs := one.costs) is not None])
    return sorted((replace(one, best=one.costs in front) for one in plans), key=lambda one: one.costs or ())


def pareto_front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other is at least as good as in both values and better in one, by rising first value."""
    front: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def _read(title: str, folder: Path) -> ComparedPlan:
    from strategies.core.bounded_files import read_json  # the front end does without it

    def content(name: str) -> Any:
        """Empty where there is no such file, or a killed job has damaged it."""
        try:
            return read_json(folder / name)
        except (OSError, ValueError):
            return {}

    plan, memory = content("plan.json"), content("memory.json")
    prediction = plan.get("prediction", {}) if isinstance(plan, dict) else {}
    measured = memory.get("measured", []) if isinstance(memory, dict) else []
    steps = [line["seconds"] for line in records(folder) if isinstance(line.get("seconds"), int | float)]
    steps = steps[FIRST:] or steps[1:] or steps
    return ComparedPlan(
        title,
        statistics.median(steps) if steps else None,
        max((one["peak"] for one in measured), default=None),
        prediction.get("seconds"),
        prediction.get("memory"),
    )


def front_table(plans: Sequence[ComparedPlan]) -> list[list[str]]:
    """A heading, and a line per plan."""

    def shown(value: float | None, unit: Any) -> str:
        return "" if value is None else str(unit(value))

    rows = [["plan", "step", "predicted", "peak memory", "predicted", "Pareto front"]]
    for one in plans:
        seconds = shown(one.seconds, shown_seconds), shown(one.predicted_seconds, shown_seconds)
        sizes = shown(one.bytes, shown_bytes), shown(one.predicted_bytes, shown_bytes)
        rows.append([one.title, *seconds, *sizes, "yes" if one.best else ""])
    return rows


def front_chart(plans: Sequence[ComparedPlan]) -> dict[str, Any]:
    """Seconds to the right and bytes upwards, for the template: a point per plan, the front as steps, and a line to the
    prediction where both are known."""
    every = [costs for one in plans if (costs := one.costs) is not None]
    predicted = {
        one.title: (one.predicted_seconds, one.predicted_bytes)
        for one in plans
        if one.predicted_seconds is not None and one.predicted_bytes is not None and one.seconds is not None
    }
    seconds, sizes = zip(*every, *predicted.values(), strict=True)
    x, y = Scale(seconds, LEFT + 20, WIDTH - 20), Scale(sizes, HEIGHT - 10, 20)
    points = []
    for one, (time, size) in zip(plans, every, strict=True):
        to = predicted.get(one.title)
        points.append(
            {
                "title": f"{one.title}: {shown_seconds(time)}, {shown_bytes(size)}",
                "x": x(time),
                "y": y(size),
                "best": one.best,
                "predicted": None if to is None else (x(to[0]), y(to[1])),
            }
        )
    front = [(x(time), y(size)) for time, size in pareto_front(every)]
    path = f"M{front[0][0]} {front[0][1]}" + "".join(f" H{right} V{below}" for right, below in front[1:])
    ticks = [(0.0, y(size) + 4, shown_bytes(size)) for size in y.ticks]
    ticks += [(x(time) - 20, HEIGHT + 18, shown_seconds(time)) for time in x.ticks]
    return {"width": WIDTH + 60, "height": HEIGHT + BELOW, "points": points, "front": path, "ticks": ticks}
