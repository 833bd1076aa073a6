"""The outcome of a benchmark part: claims with their goals, a table, figures. Plain data, JSON in and out."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Setting:
    """How to measure: `quick` skips slow cases; pictures and pages are written into `folder`."""

    folder: Path
    quick: bool = False

    @property
    def pictures(self) -> Path:
        found = self.folder / "search"
        found.mkdir(parents=True, exist_ok=True)
        return found


@dataclass(frozen=True)
class Claim:
    """A goal, the measured value, and whether it meets the goal."""

    goal: str
    measured: str
    met: bool


@dataclass(frozen=True)
class Outcome:
    """`pictures` and `pages` are names of files, relative to the folder of the page."""

    claims: tuple[Claim, ...]
    head: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    pictures: tuple[str, ...] = ()
    pages: tuple[str, ...] = ()


@dataclass(frozen=True)
class Record:
    """An outcome with where it comes from: the part's name and title, the date, the command, wall seconds."""

    name: str
    title: str
    date: str
    command: str
    seconds: float
    outcome: Outcome = field(default_factory=lambda: Outcome(()))

    def write(self, folder: Path) -> None:
        (folder / f"{self.name}.json").write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def read(file: Path) -> Record:
    """What `Record.write` wrote."""
    content = json.loads(file.read_text(encoding="utf-8"))
    found = content.pop("outcome")
    outcome = Outcome(
        tuple(Claim(**one) for one in found["claims"]),
        tuple(found["head"]),
        tuple(map(tuple, found["rows"])),
        tuple(found["pictures"]),
        tuple(found["pages"]),
    )
    return Record(**content, outcome=outcome)
