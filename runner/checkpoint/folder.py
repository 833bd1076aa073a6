"""Folders and their names: which checkpoints there are, and how one appears and disappears at a single moment.

Invariant: a folder called step-... that holds a header is complete. A checkpoint that is being written, replaced or
removed has a hidden name, which `clean` recognises.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

HEADER, INDEX = "checkpoint.json", "index.json"
NAME = re.compile(r"step-(\d{8,})")


def target(folder: Path, step: int) -> Path:
    """The folder of the checkpoint after optimizer step `step`."""
    return folder / f"step-{step:08d}"


def hidden(path: Path, state: str = "partial") -> Path:
    """What a checkpoint is called while it is written, rescued or replaced."""
    return path.parent / f".{path.name}.{state}"


def shown(hidden: Path) -> str:
    """The name that a checkpoint with a hidden name will have."""
    return hidden.name.removeprefix(".").rpartition(".")[0]


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, by steps, ascending."""
    return [path for path in named(folder) if (path / HEADER).is_file()]


def named(folder: Path) -> list[Path]:
    """The folders in `folder` that have the name of a checkpoint, by steps, ascending."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if NAME.fullmatch(path.name) and path.is_dir()), key=number)


def number(path: Path) -> int:
    """The optimizer steps of a checkpoint, by its name."""
    return int(path.name.partition("-")[2])


def clean(folder: Path) -> None:
    """Remove what interrupted saves left in `folder`. For one process, before training starts."""
    for left in sorted(folder.glob(".step-*.replaced")):
        place = folder / shown(left)
        if place.exists():
            erase(left)
        else:  # interrupted between the two renames of `put`
            left.rename(place)
    for left in folder.glob(".step-*.partial"):
        erase(left)


def erase(path: Path) -> None:
    """Remove a file or a folder with its content, if it exists. Raises OSError."""
    try:
        path.unlink()
    except FileNotFoundError:
        return
    except OSError:  # a folder: IsADirectoryError on Linux, PermissionError elsewhere
        shutil.rmtree(path)


def put(partial: Path, path: Path) -> None:
    """Give a finished checkpoint its name; one with the same step (a run that went back) is replaced."""
    replaced = hidden(path, "replaced")
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


def sync(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
