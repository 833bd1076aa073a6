"""Committing a checkpoint: every rank writes a mark next to its files, and rank 0, once all marks exist, merges them
and renames the folder to its final name.

Marks are files, so saving needs no collective and can run in the background. Invariant: a folder gets its name
when every element of every tensor is in some file that is on the disk, and not before.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from runner.checkpoint import branch, folder, index, merged, writing
from runner.checkpoint.folder import HEADER, INDEX
from runner.checkpoint.index import Index
from runner.checkpoint.manifest import Header, Stamp, to_text
from runner.checkpoint.reading import Checkpoint
from strategies.runtime.tensor_files import StoredTensor

PAUSE = 0.02
LONG = 0.25
"""Seconds between two looks at what other ranks have written: at first, and after a while."""
SHARDED, MERGED, BOTH = "sharded", "merged", "both"


class SaveFailed(RuntimeError):
    """A checkpoint could not be written. The text says which rank and why."""


@dataclass(frozen=True)
class SaveOptions:
    """How to save: the `form`, how many copies of what replicas hold, how many checkpoints to `keep`. `best` says which
    metric is better ("min" or "max"), where the best one is kept too."""

    form: str = SHARDED
    copies: int = 1
    keep: int | None = None
    best: str | None = None


@dataclass(frozen=True)
class Mark:
    """The files that a rank has written. `stage` is its pipeline group; `plain` its file of non-tensor state, if other
    ranks need it; `copies` those of its files that are copies, with the files of which they are; `run` the id of its
    run."""

    rank: int
    stage: int
    files: Mapping[str, Stamp]
    tensors: Index
    plain: str | None
    copies: Mapping[str, str] = field(default_factory=dict)
    run: str = ""


def leave(partial: Path, mark: Mark) -> None:
    """Mark that a rank has written its files."""
    content = {
        "rank": mark.rank,
        "stage": mark.stage,
        "files": {name: asdict(stamp) for name, stamp in mark.files.items()},
        "index": index.to_json(mark.tensors),
        "plain": mark.plain,
        "copies": dict(mark.copies),
        "run": mark.run,
    }
    _appear(partial / _name(mark.rank, "done"), json.dumps(content))


def give_up(partial: Path, rank: int, error: BaseException) -> None:
    """Mark that a rank cannot write its files; if even that fails, the other ranks notice that it is down."""
    try:
        _appear(partial / _name(rank, "failed"), f"{type(error).__name__}: {error}")
    except OSError:
        return


def copy_of(partial: Path, rank: int, name: str, timeout: float) -> tuple[str, Stamp]:
    """Copy the file that another `rank` writes, when it is there, to `name`: the file that was copied, and a stamp.

    Raises SaveFailed where that rank gave up, or `timeout` seconds passed.
    """
    source = partial / f"rank-{rank:05d}.safetensors"
    for late in _looks(partial, timeout):
        if source.is_file():
            break
        _check_alive(partial, rank)
        if late:
            raise SaveFailed(f"rank {rank} has written nothing of its part of {shown(partial)} for {timeout:g} s")
    return source.name, writing.copy(source, partial / name)


def _looks(partial: Path, timeout: float) -> Iterator[bool]:
    """Poll with increasing intervals; True when nothing has been written for `timeout` seconds."""
    began = moved = time.monotonic()
    size = -1
    while True:
        now = time.monotonic()
        if (written := _size(partial)) != size:
            size, moved = written, now
        yield now > moved + timeout
        time.sleep(min(LONG, max(PAUSE, (now - began) / 10)))


def _size(partial: Path) -> int:
    """The bytes of all files at this moment."""
    with suppress(FileNotFoundError), os.scandir(partial) as files:
        return sum(file.stat().st_size for file in files)
    return 0


def _check_alive(partial: Path, rank: int) -> None:
    failed = partial / _name(rank, "failed")
    if failed.is_file():
        raise SaveFailed(
            f"rank {rank} could not write its part of {shown(partial)}: {failed.read_text(encoding='utf-8')}"
        )


def await_marks(partial: Path, world: int, timeout: float) -> list[Mark]:
    """The marks of all ranks, in order. Raises SaveFailed where one of them gave up, or `timeout` seconds passed."""
    missing = list(range(world))
    for late in _looks(partial, timeout):
        for rank in list(missing):
            _check_alive(partial, rank)
            if (partial / _name(rank, "done")).is_file():
                missing.remove(rank)
        if not missing:
            break
        if late:
            raise SaveFailed(f"rank {missing[0]} has written nothing of its part of {shown(partial)} for {timeout:g} s")
    return [_read(partial / _name(rank, "done")) for rank in range(world)]


def marks_in(partial: Path, world: int) -> list[Mark]:
    """The marks of those of `world` ranks that have written their files."""
    names = [partial / _name(rank, "done") for rank in range(world)]
    return [_read(name) for name in names if name.is_file()]


def commit(
    partial: Path,
    marks: list[Mark],
    header: Header,
    wanted: SaveOptions,
    published: frozenset[str] | None,
    described: str | None,
) -> Path:
    """Put the files together and give the folder its name; drop older checkpoints. Returns its place.

    Raises SaveFailed where an element is in no file, OSError where the disk is full.
    """
    if strangers := [mark for mark in marks if mark.run != header.run]:
        raise SaveFailed(
            f"{shown(partial)}: rank {strangers[0].rank} is of run {strangers[0].run}, and rank 0 of {header.run}; two "
            "runs save in one folder"
        )
    target = folder.target(partial.parent, header.step)
    files = {name: stamp for mark in marks for name, stamp in mark.files.items()}
    copies = {copy: file for mark in marks for copy, file in mark.copies.items()}
    if unlike := [copy for copy, file in copies.items() if files[copy] != files[file]]:
        raise SaveFailed(f"{shown(partial)}: {unlike[0]} is not like the file of which it is a copy")
    parts = index.with_copies(_joined(marks), copies)
    try:
        chosen = index.chosen(parts)
    except ValueError as error:
        raise SaveFailed(f"{shown(partial)} is not complete: {error}") from error
    stages = sorted({mark.stage for mark in marks})
    plain = [[mark.plain for mark in marks if mark.stage == stage and mark.plain is not None] for stage in stages]
    header = replace(header, files=files, plain=tuple(map(tuple, plain)))
    content = [parts]
    if wanted.form != SHARDED:
        source = Checkpoint(partial, header, chosen)
        outside = frozenset[str]() if published is None else merged.unpublished(source, published)
        made, whole = merged.write(source, partial, outside, described)
        files |= made
        content.append(whole)
    if wanted.form == MERGED:
        for name in {part.file for entry in parts.values() for part in entry.parts}:
            (partial / name).unlink()
            del files[name]
        content = content[1:]
    text = json.dumps([index.to_json(one) for one in content])
    files[INDEX] = writing.write_bytes(partial / INDEX, text.encode())
    for mark in marks:
        (partial / _name(mark.rank, "done")).unlink(missing_ok=True)
    folder.write_text(partial / HEADER, to_text(replace(header, files=files)))
    folder.sync(partial)
    folder.put(partial, target)
    branch.drop(target.parent, header.step, wanted.keep, better_of(wanted.best), header.lineage)
    return target


def better_of(best: str | None) -> Callable[[float, float], bool] | None:
    """Whether one value of a metric is better than another, for "min" or "max"."""
    if best is None:
        return None
    return (lambda one, other: one < other) if best == "min" else (lambda one, other: one > other)


def _joined(marks: list[Mark]) -> dict[str, StoredTensor]:
    """The entries stored by all ranks. For a tensor stored by several pipeline groups, that of the first group."""
    found: dict[str, StoredTensor] = {}
    for stage in sorted({mark.stage for mark in marks}):
        group = index.joined(mark.tensors for mark in marks if mark.stage == stage)
        found |= {key: entry for key, entry in group.items() if key not in found}
    return found


def _read(path: Path) -> Mark:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    stamps = {name: Stamp(**stamp) for name, stamp in content["files"].items()}
    tensors = index.from_json(content["index"])
    return Mark(content["rank"], content["stage"], stamps, tensors, content["plain"], content["copies"], content["run"])


def _appear(path: Path, text: str) -> None:
    """Write a file atomically."""
    hidden = path.with_name(f".{path.name}")
    folder.write_text(hidden, text)
    hidden.rename(path)


def _name(rank: int, what: str) -> str:
    return f"rank-{rank:05d}.{what}"


def shown(partial: Path) -> str:
    """The name that a checkpoint will have."""
    return partial.name.removeprefix(".").removesuffix(".partial")
