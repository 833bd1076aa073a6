"""`checkpoint.json`: what was saved, of which run, and the size and checksum of every file beside it.

Invariant: the header carries a checksum of itself, so that a changed byte anywhere in a checkpoint is found. What fails
is reported in one paragraph that names the checkpoint and those beside it.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from runner.checkpoint import folder
from runner.checkpoint.folder import HEADER
from runner.errors import ConfigError
from runner.run_folder.lineage import Ancestry, Lineage
from strategies.core.bounded_files import is_count, is_inner_name, parse, read_bytes, read_json
from strategies.core.errors import StrategyError
from strategies.runtime import tensor_files as stored

VERSION = 2
DAMAGED = "damaged.json"
READING = (*stored.READING, pickle.UnpicklingError)
"""What torch and python raise when they read a damaged file."""
BLOCK = 2**22


@dataclass(frozen=True)
class Stamp:
    """Size and checksum of a file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Header:
    """`position` is the epoch and, within it, the row at which the data continues; `plain` names the files of
    non-tensor state: for each pipeline group, all files with equal content. `metric` is the value by which the best
    checkpoint is chosen, where there is one; `samples` counts the rows of the training data."""

    step: int
    position: tuple[int, int]
    form: str
    world_size: int
    plan: Mapping[str, Any]
    config: Mapping[str, Any]
    fingerprint: str
    files: Mapping[str, Stamp]
    plain: tuple[tuple[str, ...], ...]
    metric: float | None = None
    samples: int | None = None
    run: str = ""
    history: Ancestry = ()
    version: int = field(default=VERSION)

    @property
    def lineage(self) -> Lineage:
        """The run that saved it; one without an id where that was before runs had any."""
        return Lineage(self.run, self.history)


def to_text(header: Header) -> str:
    content = asdict(header)
    return json.dumps(content | {"checksum": _sum_of(content)}, indent=1)


def read_header(path: Path) -> Header:
    """The header of the checkpoint `path`. Raises ConfigError if there is none, or a damaged one."""
    if not (path / HEADER).exists():
        raise ConfigError(
            "MW604", f"{path} is not a checkpoint: it has no {HEADER}. Give a folder that is called step-... ."
        )
    with damaged(path):
        text = read_bytes(path / HEADER)
        if (version := parse(text).get("version", 1)) != VERSION:
            raise ConfigError(
                "MW605",
                f"The checkpoint {path} is of version {version}; this program reads version "
                f"{VERSION}. Load it with the program that wrote it.",
            )
        found = from_text(text)
        if folder.NAME.fullmatch(path.name) and folder.number(path) != found.step:
            raise ConfigError(
                "MW605",
                f"The checkpoint {path} was saved after step {found.step}, so this is not its name; rename the folder "
                f"to {folder.target(path.parent, found.step).name}.",
            )
        return found


def from_text(text: str | bytes) -> Header:
    """What `to_text` has written. Raises ValueError where it was changed."""
    content = parse(text)
    if content.pop("checksum", None) != _sum_of(content):
        raise ValueError(f"the checksum of {HEADER} is another")
    files = {name: Stamp(**stamp) for name, stamp in content.pop("files").items()}
    read = {"files": files, "plain": tuple(map(tuple, content["plain"])), "position": tuple(content["position"])}
    found = Header(**content | read | {"history": tuple(map(tuple, content.get("history", ())))})
    for name, one in found.files.items():
        if not is_inner_name(name):
            raise ValueError(f"{HEADER} names a file outside of the checkpoint: {name!r}")
        if not is_count(one.bytes) or not re.fullmatch("[0-9a-f]{64}", one.sha256):
            raise ValueError(f"{HEADER} has no size and checksum of {name}")
    counts = len(found.position) == 2 and all(map(is_count, (found.step, *found.position)))
    if not counts or not is_count(found.world_size, 1) or not {*chain(*found.plain)} <= found.files.keys():
        raise ValueError(f"{HEADER} has no step, position, world_size or files that could be right")
    if not isinstance(found.run, str) or not all(is_count(last) for _, last in found.history):
        raise ValueError(f"{HEADER} has no run or history that could be right")
    if not isinstance(found.plan, dict) or not isinstance(found.config, dict):
        raise ValueError(f"{HEADER} has no plan or config")
    return found


def stamp(file: Path) -> Stamp:
    """Current size and checksum of a file."""
    found, size = hashlib.sha256(), 0
    with file.open("rb") as content:
        while block := content.read(BLOCK):
            found.update(block)
            size += len(block)
    return Stamp(size, found.hexdigest())


def faults(path: Path, files: Mapping[str, Stamp]) -> dict[str, str]:
    """The errors in `files` of a checkpoint, by name; empty if all match their checksums. Reads every file."""
    found = missing(path, files)
    for name, wanted in files.items():
        if name not in found and (now := stamp(path / name)) != wanted:
            found[name] = f"its checksum is {now.sha256[:12]}... and was {wanted.sha256[:12]}... when it was written"
    return found


def missing(path: Path, files: Mapping[str, Stamp]) -> dict[str, str]:
    """Like `faults`, but compares only file sizes."""
    found = {}
    for name, wanted in files.items():
        try:
            file = (path / name).lstat()
        except FileNotFoundError:
            found[name] = "it is missing"
            continue
        if not stat.S_ISREG(file.st_mode):  # a link would lead outside of the checkpoint
            found[name] = "it is not a regular file"
        elif file.st_size != wanted.bytes:
            found[name] = f"it has {file.st_size:,} bytes and had {wanted.bytes:,} when it was written"
    return found


def mark(path: Path, found: Mapping[str, str]) -> None:
    """Note in a checkpoint which of its files are damaged although their sizes are right, for all who read it."""
    unmark(path)
    folder.write_text(path / DAMAGED, json.dumps(dict(found)))


def unmark(path: Path) -> None:
    """Remove the record of `mark`, or whatever else has that name."""
    folder.erase(path / DAMAGED)


def marked(path: Path) -> dict[str, str]:
    """The record of `mark`; empty if it cannot be read."""
    try:
        found = read_json(path / DAMAGED)
    except (OSError, ValueError):
        return {}
    return {name: str(what) for name, what in found.items()} if isinstance(found, dict) else {}


@contextmanager
def damaged(path: Path) -> Iterator[None]:
    """Report any error while reading files as one paragraph."""
    try:
        yield
    except ConfigError:
        raise
    except (*READING, StrategyError) as error:
        text = " ".join(str(error).split())[:300]
        others = ", ".join(other.name for other in folder.complete(path.parent) if other != path)
        raise ConfigError(
            "MW606",
            f"The checkpoint {path} is damaged ({type(error).__name__}: {text}). "
            + (
                f"Others beside it: {others}; choose one with train.resume=PATH."
                if others
                else "There is no other beside it."
            ),
        ) from error


def _sum_of(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=list)
    return hashlib.sha256(text.encode()).hexdigest()
