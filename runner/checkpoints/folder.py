"""Folders and their names: which checkpoints there are, and how one appears and disappears at a single moment.

Invariant: a folder called step-... that holds a header is complete. What is being written, replaced or removed has a
hidden name, which `clean` knows.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from runner.errors import ConfigError

HEADER, INDEX = "checkpoint.json", "index.json"
NAME = re.compile(r"step-(\d{8,})")


def target(folder: Path, step: int) -> Path:
    """Where the checkpoint after optimizer step `step` belongs."""
    return folder / f"step-{step:08d}"


def hidden(path: Path) -> Path:
    """What a checkpoint is called while it is written."""
    return path.parent / f".{path.name}.partial"


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, fewest steps first."""
    return [path for path in named(folder) if (path / HEADER).is_file()]


def named(folder: Path) -> list[Path]:
    """The folders in `folder` that have the name of a checkpoint, fewest steps first."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if NAME.fullmatch(path.name) and path.is_dir()), key=number)


def number(path: Path) -> int:
    """The optimizer steps of a checkpoint, by its name."""
    return int(path.name.partition("-")[2])


def newest(folder: Path) -> Path | None:
    """The complete checkpoint with the most steps in `folder`."""
    return max(complete(folder), key=number, default=None)


def locate(path: Path, key: str = "train.resume") -> Path:
    """The checkpoint that `path` means: itself, or the newest in it or in its `checkpoints`.

    Raises ConfigError, by the name of the `key` that gave it.
    """
    if (path / HEADER).is_file():
        return path
    found = newest(path) or newest(path / "checkpoints")
    if found is None:
        why = "holds no complete checkpoint (step-...)" if path.is_dir() else "does not exist"
        raise ConfigError(
            f"{key} = {str(path)!r}: this folder {why}. Give a run folder, its checkpoints, or one of them."
        )
    return found


def clean(folder: Path) -> None:
    """Remove what interrupted saves left in `folder`. For one process, before training starts."""
    for left in sorted(folder.glob(".step-*.replaced")):
        place = folder / left.name.removeprefix(".").removesuffix(".replaced")
        if place.exists():
            erase(left)
        else:  # interrupted between the two renames of `put`
            left.rename(place)
    for left in folder.glob(".step-*.partial"):
        erase(left)


def erase(path: Path) -> None:
    """Remove a file or a folder with all that is in it, if it is there. Raises OSError."""
    try:
        path.unlink()
    except FileNotFoundError:
        return
    except OSError:  # a folder: IsADirectoryError on Linux, PermissionError elsewhere
        shutil.rmtree(path)


def put(partial: Path, path: Path) -> None:
    """Give a finished checkpoint its name; one with the same step (a run that went back) is replaced."""
    replaced = path.parent / f".{path.name}.replaced"
    if path.exists():
        path.rename(replaced)
    partial.rename(path)
    sync(path.parent)
    with suppress(OSError):  # `clean` removes it later
        erase(replaced)


def remove(path: Path) -> None:
    """Remove a checkpoint; hidden first, so that none is ever seen half removed."""
    gone = hidden(path)
    path.rename(gone)
    erase(gone)


def drop(path: Path, step: int, keep: int | None, better: Callable[[float, float], bool] | None) -> None:
    """Remove all but the last `keep` checkpoints up to `step` in the folder `path`; the best one stays too, where it is
    known what is `better`."""
    if keep is None:
        return
    found = [one for one in complete(path) if number(one) <= step]
    best = None if better is None else _best(found, better)
    for old in found[:-keep]:
        if best is None or old != best[1]:
            remove(old)


def best_metric(found: Sequence[Path], better: Callable[[float, float], bool]) -> float | None:
    """The best metric of the checkpoints `found`; None where none has one."""
    best = _best(found, better)
    return None if best is None else best[0]


def _best(found: Sequence[Path], better: Callable[[float, float], bool]) -> tuple[float, Path] | None:
    """The best metric and the first checkpoint that has it."""
    best: tuple[float, Path] | None = None
    for path in found:
        metric = json.loads((path / HEADER).read_text(encoding="utf-8")).get("metric")
        if metric is not None and (best is None or better(metric, best[0])):
            best = (metric, path)
    return best


def write_text(path: Path, text: str) -> None:
    """Write a small file and flush it to the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
