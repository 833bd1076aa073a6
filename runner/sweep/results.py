"""The results of a sweep: a table of its jobs, printed and as `results.csv`, and a page with their curves.

Made from the folder alone, by the command that started the sweep, when all of its jobs have ended.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runner.report.html import render
from runner.report.table import text_table
from runner.report.units import shown_path
from runner.run_folder.lock import SWEEP, Occupant, leave, occupy
from runner.sweep.job import STARTED, SweepJob, jobs
from runner.sweep.pictures import WIDTH, bars, curves

TABLE, PAGE = "results.csv", "report.html"
VALUES = {
    "train": "loss",
    "predict": "loss",
    "plan": "seconds per step",
    "explain": "seconds per step",
    "verify": "difference",
}
"""What the value of a verb is."""
ERROR = 60
"""Characters of an error in the printed table."""


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
        (self.folder / PAGE).write_text(page(self.folder, rows, all_jobs), encoding="utf-8")
        print(printed(rows))
        mine = [job.status for _, job in all_jobs if job.sweep == self.mark]
        done, count = mine.count("done"), self.count or len(mine)
        print(
            f"sweep: {done} of {count} jobs done; results in {shown_path(self.folder / TABLE)} and "
            f"{shown_path(self.folder / PAGE)}",
            flush=True,
        )
        return done == count


def mark_of(folder: Path) -> str:
    """The mark of the sweep that was started last in `folder`."""
    mark: str = json.loads((folder / STARTED).read_text(encoding="utf-8"))["started"]
    return mark


def table(all_jobs: Sequence[SweepJob], folders: Sequence[Path]) -> list[list[str]]:
    """A heading, and a line per job: the varied values, the results, and the error if it failed."""
    given = [dict(_pair(override) for override in job.overrides) for job in all_jobs]
    keys = [
        key for key in dict.fromkeys(key for one in given for key in one) if len({one.get(key) for one in given}) > 1
    ]
    names = list(dict.fromkeys(name for job in all_jobs for name in job.evaluation or {}))
    values = sorted({VALUES.get(job.verb, "value") for job in all_jobs})
    tests = [f"test {name}" for name in names]
    rows = [["job", "folder", "status", *keys, *values, *tests, "seconds", "error"]]
    for job, folder, overrides in zip(all_jobs, folders, given, strict=True):
        own = {VALUES.get(job.verb, "value"): job.value}
        numbers = [own.get(name) for name in values] + [(job.evaluation or {}).get(name) for name in names]
        status = "unfinished" if job.status == "running" else job.status
        seconds = "" if job.seconds is None else f"{job.seconds:.1f}"
        rows.append(
            [
                *(str(job.number), str(folder), status),
                *(overrides.get(key, "") for key in keys),
                *("" if number is None else f"{number:.6g}" for number in numbers),
                *(seconds, job.error or ""),
            ]
        )
    return rows


def printed(rows: Sequence[Sequence[str]]) -> str:
    """The table as text in columns; long errors are cut."""
    return text_table([[*row[:-1], row[-1] if len(row[-1]) <= ERROR else f"{row[-1][: ERROR - 3]}..."] for row in rows])


def page(folder: Path, rows: Sequence[Sequence[str]], all_jobs: Sequence[tuple[Path, SweepJob]]) -> str:
    """The report of a sweep."""
    titles = [_title(job, rows[0]) for _, job in all_jobs]
    values = {title: job.value for title, (_, job) in zip(titles, all_jobs, strict=True) if job.value is not None}
    return render(
        "sweep.html",
        name=folder.name,
        rows=rows,
        curves=curves(dict(zip(titles, (place for place, _ in all_jobs), strict=True))),
        value=VALUES.get(all_jobs[0][1].verb, "value"),
        bars=bars(values),
        bars_width=1.5 * WIDTH,
    )


def _title(job: SweepJob, keys: Sequence[str]) -> str:
    varied = (override for override in job.overrides if override.partition("=")[0] in keys)
    return " ".join((f"#{job.number}", *varied))


def _pair(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key, value
