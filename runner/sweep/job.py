"""One job of a sweep, as recorded in `job.json` in its folder.

Invariant: a job whose status is "done" ended well with the `config.json` beside it, so a job with the same config need
not run again. "running" in a sweep that has ended is a job that was killed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from runner.config.origins import as_typed
from runner.run_folder import CONFIG_FILE
from runner.run_folder.atomic import replace_text

FILE = "job.json"
STARTED = "sweep.json"
GOES_ON = ["train.resume=auto"]
"""Where the continuation of a job begins, wherever the job itself began."""

Status = Literal["running", "done", "failed", "excluded", "stopped"]
EXCLUDED = "MW205"
"""The code of a job whose keys exclude each other, as some of a grid may: a sweep leaves it out."""


@dataclass(frozen=True)
class SweepJob:
    """One job.

    Attributes:
        number: Its index in the sweep, from 0.
        overrides: What makes it differ from the bare command, as typed.
        sweep: The start of the sweep that requested it last, see `Sweep.mark`.
        value: What the verb returns, such as the last loss of training.
        evaluation: The last evaluation, by name.
        error: The first paragraph.
    """

    number: int
    overrides: tuple[str, ...]
    verb: str
    sweep: str
    status: Status = "running"
    value: float | None = None
    evaluation: dict[str, float] | None = None
    seconds: float | None = None
    error: str | None = None

    def write(self, folder: Path) -> None:
        """Replace the job's file atomically."""
        replace_text(folder / FILE, json.dumps(asdict(self), indent=2) + "\n")

    def finished_before(self, folder: Path, config: str) -> SweepJob | None:
        """This job as it ended well in `folder` before, if its config, as text, was the same but for train.resume."""
        before = read(folder)
        if before is None or before.status != "done" or not (folder / CONFIG_FILE).exists():
            return None
        try:
            same = _but_resume((folder / CONFIG_FILE).read_text(encoding="utf-8")) == _but_resume(config)
        except (OSError, ValueError, RecursionError):  # damaged
            return None
        return replace(before, number=self.number, sweep=self.sweep) if same else None


def _but_resume(config: str) -> Any:
    content = json.loads(config)
    if isinstance(content, dict) and isinstance(content.get("train"), dict):
        content["train"] |= {"resume": None}
    return content


def read(folder: Path) -> SweepJob | None:
    """The job of a folder, None where there is none, or its file is damaged: it then runs again."""
    from strategies.core.bounded_files import read_json  # the front end does without it

    try:
        content = read_json(folder / FILE)
        job = SweepJob(**content | {"overrides": tuple(map(str, content["overrides"]))})
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return job if isinstance(job.number, int) and isinstance(job.verb, str) else None


def jobs(sweep: Path) -> list[tuple[Path, SweepJob]]:
    """Every job of a sweep folder, in the order of their numbers."""
    readable = [(path.parent, job) for path in sweep.rglob(FILE) if (job := read(path.parent)) is not None]
    return sorted(readable, key=lambda entry: (entry[1].number, str(entry[0])))


def folder_of(sweep: str, number: int, overrides: Sequence[str]) -> str:
    """The name of a job's folder in the sweep folder: that of the job with the same overrides if there is one, else its
    number, with something added where another job has that one. Calls for different jobs never give the same name."""
    wanted, begins = _divided(typed(overrides))
    for folder, job in jobs(Path(sweep)):
        others, began = _divided(job.overrides)
        if others == wanted and (began == begins or GOES_ON in (began, begins)):
            return str(folder.relative_to(sweep))
    if read(Path(sweep, str(number))) is None:
        return str(number)
    return f"{number}-{hashlib.sha256(repr((wanted, begins)).encode()).hexdigest()[:6]}"


def _divided(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """The overrides that a job and its continuation have in common, and where they begin, in alphabetical order."""
    begins = [override for override in overrides if override.startswith("train.resume=")]
    return sorted(override for override in overrides if override not in begins), begins


def typed(overrides: Sequence[str]) -> tuple[str, ...]:
    """Overrides as they are typed: `words.for_hydra` has put pluses before keys in open mappings, and a null before a
    mapping that replaces another."""
    bare = [as_typed(override) for override in overrides]
    return tuple(one for number, one in enumerate(bare) if not _is_cleared(one, bare[number + 1 :]))


def _is_cleared(override: str, later: Sequence[str]) -> bool:
    """Whether an override sets null what a mapping in braces gives later, itself or in the braces of its section."""
    key, _, value = override.partition("=")
    braces = tuple(f"{one}={{" for one in (key, key.rpartition(".")[0]))
    return value == "null" and any(word.startswith(braces) for word in later)
