"""`checkpoint.json`: what was saved, of which run, and the size and checksum of every file beside it.

Invariant: the header carries a checksum of itself, so that a changed byte anywhere in a checkpoint is found. What fails
is reported in one paragraph that names the checkpoint and those beside it.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter

from runner.checkpoint import folder
from runner.checkpoint.folder import HEADER
from runner.checkpoint.index import Count, validated
from runner.errors import ConfigError
from runner.run_folder.lineage import Lineage
from strategies.core.bounded_files import is_inner_name, parse, read_bytes, read_json
from strategies.core.errors import StrategyError
from strategies.runtime import tensor_files as stored

VERSION = 2
DAMAGED = "damaged.json"
READING = (*stored.READING, pickle.UnpicklingError)
"""What torch and python raise when they read a damaged file."""
BLOCK = 2**22


def _inner(name: str) -> str:
    if not is_inner_name(name):
        raise ValueError(f"{name!r} is outside of the checkpoint")
    return name


@dataclass(frozen=True)
class Stamp:
    """Size and checksum of a file."""

    bytes: Count
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class Header:
    """`position` is the epoch and, within it, the row at which the data continues; `plain` names the files of
    non-tensor state: for each pipeline group, all files with equal content. `metric` is the value by which the best
    checkpoint is chosen, where there is one; `samples` counts the rows of the training data. `run` is empty where that
    was before runs had ids. `pending`: the evaluation after `step` is still to be made."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    step: Count
    position: tuple[Count, Count]
    form: str
    world_size: Annotated[Count, Field(ge=1)]
    plan: Mapping[str, Any]
    config: Mapping[str, Any]
    fingerprint: str
    files: Mapping[Annotated[str, AfterValidator(_inner)], Stamp]
    plain: tuple[tuple[str, ...], ...]
    metric: float | None = None
    samples: int | None = None
    run: str = ""
    history: tuple[tuple[str, Count], ...] = ()
    pending: bool = False
    version: int = VERSION

    @property
    def lineage(self) -> Lineage:
        """The run that saved it."""
        return Lineage(self.run, self.history)


_FORMAT = TypeAdapter(Header)


def to_text(header: Header) -> str:
    """The JSON of a header, with its checksum."""
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
        if (version := _entries(text).get("version", 1)) != VERSION:
            raise ConfigError(
                "MW605",
                f"The checkpoint {path} is of version {version}; this program reads version "
                f"{VERSION}. Load it with the program that wrote it.",
            )
        header = from_text(text)
        if folder.NAME.fullmatch(path.name) and folder.number(path) != header.step:
            raise ConfigError(
                "MW605",
                f"The checkpoint {path} was saved after step {header.step}, so this is not its name; rename the folder "
                f"to {folder.target(path.parent, header.step).name}.",
            )
        return header


def from_text(text: str | bytes) -> Header:
    """What `to_text` has written. Raises ValueError where it was changed."""
    content = _entries(text)
    if content.pop("checksum", None) != _sum_of(content):
        raise ValueError(f"the checksum of {HEADER} is another")
    header = validated(_FORMAT, content)
    if not header.files.keys() >= {*chain(*header.plain)}:
        raise ValueError(f"{HEADER} names files of non-tensor state without size and checksum")
    return header


def _entries(text: str | bytes) -> dict[str, Any]:
    content = parse(text)
    if not isinstance(content, dict):
        raise ValueError(f"{HEADER} holds {json.dumps(content)[:40]} in place of an object")
    return content


def stamp(file: Path) -> Stamp:
    """Current size and checksum of a file."""
    digest, size = hashlib.sha256(), 0
    with file.open("rb") as content:
        while block := content.read(BLOCK):
            digest.update(block)
            size += len(block)
    return Stamp(size, digest.hexdigest())


def faults(path: Path, files: Mapping[str, Stamp]) -> dict[str, str]:
    """The errors in `files` of a checkpoint, by name; empty if all match their checksums. Reads every file."""
    errors = missing(path, files)
    sound = [name for name in files if name not in errors]
    with ThreadPoolExecutor(os.cpu_count()) as threads:  # hashes and reads release the GIL
        stamps = dict(zip(sound, threads.map(lambda name: stamp(path / name), sound), strict=True))
    for name, now in stamps.items():
        if now != (wanted := files[name]):
            errors[name] = f"its checksum is {now.sha256[:12]}... and was {wanted.sha256[:12]}... when it was written"
    return errors


def missing(path: Path, files: Mapping[str, Stamp]) -> dict[str, str]:
    """Faults as `faults` finds them, but by file sizes alone."""
    errors = {}
    for name, wanted in files.items():
        try:
            file = (path / name).lstat()
        except FileNotFoundError:
            errors[name] = "it is missing"
            continue
        if not stat.S_ISREG(file.st_mode):  # a link would lead outside of the checkpoint
            errors[name] = "it is not a regular file"
        elif file.st_size != wanted.bytes:
            errors[name] = f"it has {file.st_size:,} bytes and had {wanted.bytes:,} when it was written"
    return errors


def mark(path: Path, errors: Mapping[str, str]) -> None:
    """Note in a checkpoint which of its files are damaged although their sizes are right, for all who read it."""
    unmark(path)
    (path / DAMAGED).write_text(json.dumps(dict(errors)), encoding="utf-8")


def unmark(path: Path) -> None:
    """Remove the record of `mark`, or whatever else has that name."""
    folder.erase(path / DAMAGED)


def marked(path: Path) -> dict[str, str]:
    """The record of `mark`; empty if it cannot be read."""
    try:
        record = read_json(path / DAMAGED)
    except (OSError, ValueError):
        return {}
    return {name: str(what) for name, what in record.items()} if isinstance(record, dict) else {}


def others_beside(path: Path) -> str:
    """What to load in place of the checkpoint `path`."""
    others = [other for other in folder.complete(path.parent) if other != path]
    if not others:
        return "There is no other beside it."
    names = ", ".join(other.name for other in others)
    return f"Others beside it: {names}; choose one that is not damaged, such as {others[-1]}."


@contextmanager
def damaged(path: Path) -> Iterator[None]:
    """Report any error while reading files as one paragraph."""
    try:
        yield
    except ConfigError:
        raise
    except (*READING, StrategyError) as error:
        text = " ".join(str(error).split())[:300]
        text = f"The checkpoint {path} is damaged ({type(error).__name__}: {text}). {others_beside(path)}"
        raise ConfigError("MW606", text) from error


def _sum_of(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), default=list)
    return hashlib.sha256(text.encode()).hexdigest()
