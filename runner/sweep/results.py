"""The results of a sweep: a table of its jobs, printed and as `results.csv`; the Pareto front of their plans; and a
page with curves.

Made from the folder alone, by the command that started the sweep, when all of its jobs have ended.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle
from pathlib import Path
from typing import Any

from runner.report.html import COLOURS, render
from runner.report.units import shown_path, text_table
from runner.run_folder.lock import SWEEP, Occupant, leave, occupy
from runner.run_folder.metrics import records
from runner.sweep.job import STARTED, SweepJob, jobs
from runner.sweep.pareto import ComparedPlan, compared, front_chart, front_table
from runner.sweep.scale import BELOW, HEIGHT, LEFT, WIDTH, Scale

TABLE, PAGE = "results.csv", "report.html"
VALUES = {
    "train": "loss",
    "predict": "loss",
    "plan": "seconds per step",
    "explain": "seconds per step",
    "export": "seconds per step",
    "verify": "difference",
}
"""What the value of a verb is."""
ERROR = 60
"""Characters of an error in the printed table."""
POINTS = 300
"""The maximum number of points per curve."""


@dataclass(frozen=True)
class Sweep:
    """One start of a sweep: its folder, the mark that identifies its jobs, and the number of jobs; None if the sweeper
    decides that on the fly."""

    folder: Path
    mark: str
    count: int | None = None

    @classmethod
    def begin(cls, folder: Path, count: int | None = None, recipe: str | None = None) -> Sweep:
        """Create the folder, or continue in it, and hold it until `end`. Raises ConfigError where another sweep
        does."""
        now = Occupant.now("sweep", recipe)
        mark = f"{now.started} {now.run}"
        occupy(folder, now, key=SWEEP)
        (folder / STARTED).write_text(json.dumps({"started": mark}) + "\n", encoding="utf-8")
        return cls(folder, mark, count)

    def end(self) -> bool:
        """Write and print the results, and release the folder. Returns whether every job that this start requested is
        done."""
        try:
            return self._results()
        finally:
            leave(self.folder)

    def _results(self) -> bool:
        all_jobs = jobs(self.folder)
        if not all_jobs:
            return True
        rows = table([job for _, job in all_jobs], [folder.relative_to(self.folder) for folder, _ in all_jobs])
        with (self.folder / TABLE).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)
        plans = compared([(titled(job, rows[0]), folder) for folder, job in all_jobs if job.status == "done"])
        (self.folder / PAGE).write_text(page(self.folder, rows, all_jobs, plans), encoding="utf-8")
        print(printed(rows))
        if plans:
            print(f"\n{text_table(front_table(plans), numbers=range(1, 5))}")
            print(
                f"Pareto front of step time and peak memory: {sum(one.best for one in plans)} of {len(plans)} plans\n"
            )
        mine = [job.status for _, job in all_jobs if job.sweep == self.mark]
        done, count, excluded = mine.count("done"), self.count or len(mine), mine.count("excluded")
        left_out = f", {excluded} left out, whose keys exclude each other" if excluded else ""
        print(
            f"sweep: {done} of {count} jobs done{left_out}; results in {shown_path(self.folder / TABLE)} and "
            f"{shown_path(self.folder / PAGE)}",
            flush=True,
        )
        return done + excluded == count and done > 0


def mark_of(folder: Path) -> str:
    """The mark of the sweep that was started last in `folder`."""
    mark: str = json.loads((folder / STARTED).read_text(encoding="utf-8"))["started"]
    return mark


def table(all_jobs: Sequence[SweepJob], folders: Sequence[Path]) -> list[list[str]]:
    """A heading, and a line per job: the varied values, the results, and the error if it failed."""
    given = [{key: value for key, _, value in (word.partition("=") for word in job.overrides)} for job in all_jobs]
    keys = [key for key in dict.fromkeys(chain(*given)) if len({values.get(key) for values in given}) > 1]
    names = list(dict.fromkeys(name for job in all_jobs for name in job.evaluation or {}))
    values = sorted({VALUES.get(job.verb, "value") for job in all_jobs})
    tests = [f"test {name}" for name in names]
    rows = [["job", "folder", "status", *keys, *values, *tests, "seconds", "error"]]
    for job, folder, overrides in zip(all_jobs, folders, given, strict=True):
        own = {VALUES.get(job.verb, "value"): job.value}
        numbers = [own.get(name) for name in values] + [(job.evaluation or {}).get(name) for name in names]
        status = "unfinished" if job.status == "running" else job.status
        row = [str(job.number), str(folder), status, *(overrides.get(key, "") for key in keys)]
        row += ["" if number is None else f"{number:.6g}" for number in numbers]
        rows.append([*row, "" if job.seconds is None else f"{job.seconds:.1f}", job.error or ""])
    return rows


def printed(rows: Sequence[Sequence[str]]) -> str:
    """The table as text in columns; long errors are cut."""
    return text_table([[*row[:-1], row[-1] if len(row[-1]) <= ERROR else f"{row[-1][: ERROR - 3]}..."] for row in rows])


def titled(job: SweepJob, head: Sequence[str]) -> str:
    """A job by its number and what was varied, the keys in the `head` of the table."""
    return " ".join((f"#{job.number}", *(word for word in job.overrides if word.partition("=")[0] in head)))


def page(
    folder: Path,
    rows: Sequence[Sequence[str]],
    all_jobs: Sequence[tuple[Path, SweepJob]],
    plans: Sequence[ComparedPlan],
) -> str:
    """The report of a sweep."""
    titles = [titled(job, rows[0]) for _, job in all_jobs]
    values = {title: job.value for title, (_, job) in zip(titles, all_jobs, strict=True) if job.value is not None}
    return render(
        "sweep.html",
        name=folder.name,
        rows=rows,
        plans=front_table(plans) if plans else None,
        front=front_chart(plans) if plans else None,
        curves=curves(dict(zip(titles, (place for place, _ in all_jobs), strict=True))),
        value=VALUES.get(all_jobs[0][1].verb, "value"),
        bars=bars(values),
        bars_width=1.5 * WIDTH,
    )


def curves(folders: Mapping[str, Path]) -> dict[str, Any] | None:
    """The loss of every job, by its title, over the steps, for the template; None where no job has two steps."""
    points = {title: _losses(folder) for title, folder in folders.items()}
    points = {title: curve for title, curve in points.items() if len(curve) > 1}
    if not points:
        return None
    steps, losses = [step for step, _ in chain(*points.values())], [loss for _, loss in chain(*points.values())]
    first, last = min(steps), max(steps)
    y, x = Scale(losses, HEIGHT, 20), Scale(steps, LEFT, WIDTH - 10, linear=True)
    ticks = [(0.0, y(loss) + 4, f"{loss:.4g}") for loss in y.ticks]
    ticks += [(x(step) - 40 * (step == last), HEIGHT + 18, f"step {step:g}") for step in sorted({first, last})]
    paths = [
        {"title": title, "path": "M" + " L".join(f"{x(step)} {y(loss)}" for step, loss in curve), "colour": colour}
        for (title, curve), colour in zip(points.items(), cycle(COLOURS), strict=False)
    ]
    size = {"width": WIDTH, "height": HEIGHT + BELOW}
    return {**size, "curves": paths, "ticks": ticks, "logarithmic": y.logarithmic}


def bars(values: Mapping[str, float]) -> list[dict[str, Any]]:
    """A bar per job, to the scale of the largest."""
    scale = max(map(abs, values.values()), default=0.0) or 1.0
    widths = (max(1.0, round(abs(value) / scale * WIDTH / 2, 1)) for value in values.values())
    return [
        {"text": f"{value:.6g}  {title}", "width": width, "colour": colour}
        for (title, value), width, colour in zip(values.items(), widths, cycle(COLOURS), strict=False)
    ]


def _losses(folder: Path) -> list[tuple[float, float]]:
    """(step, loss), thinned out."""
    points = [(line["step"], line["loss"]) for line in records(folder) if isinstance(line.get("loss"), int | float)]
    stride = -(-len(points) // POINTS) or 1
    return points[::stride] + (points[-1:] if (len(points) - 1) % stride else [])
