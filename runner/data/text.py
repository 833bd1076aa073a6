"""Text as bytes: every file of a folder joined into one memory-mapped file, and windows of it to predict the next byte.

The default text is the source code of the standard library. A folder is joined once, in the order of the file
names, and kept in a cache under a name that changes with the files; the joined file appears by renaming a complete one,
so any number of processes may start at once. The invariant: the same files give the same bytes in the same order, a
file is wholly in the training or in the test part, and reading a sample touches only the bytes that it consists of.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import sys
import sysconfig
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runner import home
from runner.data.visible import is_visible
from runner.errors import ConfigError

Bytes = NDArray[np.uint8]

SEPARATOR = b"\0"
"""Stands between two files."""
NOT_OURS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"})
"""Folders of the standard library that hold other people's code, or text that says little."""
TEST_SHARE = 10
"""One file in this many is in the test part."""


class Windows:
    """Samples {input_ids [length], labels [length]}, int64 bytes; labels are the input one byte on, or with
    `shift=False` the input itself, for models that shift the labels themselves (those of transformers).

    Sample i starts at byte i * length; a partial window at the end is dropped. `train` chooses the part,
    None takes both; the other arguments are those of `corpus`, `path` a folder of the user's with text files.
    Raises ConfigError: as `corpus`, or a text shorter than one window.
    """

    def __init__(
        self,
        length: int,
        train: bool | None = True,
        pattern: str = "*.py",
        limit: int | None = None,
        cache: str | None = None,
        path: str | None = None,
        shift: bool = True,
    ) -> None:
        if length < 1:
            raise ConfigError("MW315", f"data.args.length = {length} must be 1 or more.")
        file = corpus(train, pattern, limit, cache, path)
        size = file.stat().st_size
        if size <= length:
            raise ConfigError(
                "MW315",
                f"data.args.length = {length}, but the text has {size} bytes, and a window needs one more than its "
                "length; choose shorter windows, more files, or data.args.train=null for all of them.",
            )
        self._bytes: Bytes = np.memmap(file, np.uint8, mode="r")
        self._length, self._shift = length, int(shift)

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.read(index, ((slice(0, self._length),),) * 2)

    def read(self, index: int, slices: tuple[tuple[slice, ...], ...]) -> dict[str, Tensor]:
        """Sample `index` with only these positions of inputs and labels; see `runner.data.loader.Read`."""
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} is not one of the {len(self)} windows")
        (inputs,), (labels,) = slices
        start = index * self._length
        return {"input_ids": self._part(start, inputs), "labels": self._part(start + self._shift, labels)}

    def _part(self, start: int, span: slice) -> Tensor:
        return torch.from_numpy(self._bytes[start + span.start : start + span.stop].astype(np.int64))


def corpus(
    train: bool | None = True,
    pattern: str = "*.py",
    limit: int | None = None,
    cache: str | None = None,
    path: str | None = None,
) -> Path:
    """The concatenation of all files of one part; it is created if missing.

    `path` is the folder, None the standard library; files below it whose name matches `pattern` count, in the order of
    their paths, up to `limit` bytes. `cache` is the folder for the result, None `meshwright` in the user's cache.
    Raises ConfigError: no such folder, no file in the part, or a cache that cannot be written.
    """
    if limit is not None and limit < 1:
        raise ConfigError("MW315", f"data.args.limit = {limit} must be 1 or more bytes, or null.")
    folder = home.expanded(sysconfig.get_path("stdlib") if path is None else path)
    if not folder.is_dir():
        raise ConfigError("MW314", f"{folder}: there is no such folder; data.path must be a folder with text files.")
    files = [
        (name, file)
        for name, file in files_below(folder, pattern, skip=NOT_OURS if path is None else frozenset())
        if train is None or train != _in_test(name)
    ]
    if not files:
        part = {True: "training part of the ", False: "test part of the ", None: ""}[train]
        raise ConfigError(
            "MW314",
            f"{folder}: no file for the {part}text is called {pattern!r}; one file in {TEST_SHARE} goes to the test "
            "part, and data.args.train=null takes all.",
        )
    facts = [f"{name} {file.stat().st_size} {file.stat().st_mtime_ns}" for name, file in files]
    digest = hashlib.sha256("\n".join([str(limit), *facts]).encode("utf-8", "surrogateescape")).hexdigest()[:16]

    def joined() -> Iterator[bytes]:
        left = sys.maxsize if limit is None else limit
        for _, file in files:
            content = (file.read_bytes() + SEPARATOR)[:left]
            left -= len(content)
            yield content
            if left <= 0:
                return

    return cached(f"text-{digest}.bytes", joined, cache)


def cached(name: str, make: Callable[[], Iterator[bytes]], cache: str | None = None) -> Path:
    """The file `name` of the cache folder, with the bytes that `make` yields if it was not there before.

    Processes that make it at the same time each write a separate file; the last one stays, and all are equal.
    Raises ConfigError: the cache cannot be written, or there is no home folder for it.
    """
    folder = home.cache() if cache is None else home.expanded(cache)
    if folder is None:
        raise ConfigError(
            "MW804",
            "The joined text cannot be kept, as there is no home folder here. Give a folder as data.args.cache, or in "
            "the environment variable XDG_CACHE_HOME.",
        )
    file = folder / name
    if file.is_file():
        return file
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{name}-", delete=False) as unfinished:
            try:
                unfinished.writelines(make())
                unfinished.flush()
                os.replace(unfinished.name, file)
            except BaseException:
                Path(unfinished.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise ConfigError(
            "MW603",
            f"{folder}: the joined text cannot be kept there: {error.strerror or error}. Give a folder that can be "
            "written as data.args.cache.",
        ) from error
    return file


def files_below(folder: Path, pattern: str, skip: frozenset[str]) -> list[tuple[str, Path]]:
    """Files by their path below `folder`, sorted by it, so that the order is the same on every machine."""
    files = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in skip]  # os.walk does not enter removed folders
        files += [Path(parent, name) for name in fnmatch.filter(names, pattern)]
    found = [(file.relative_to(folder), file) for file in files]
    return sorted((name.as_posix(), file) for name, file in found if is_visible(name))


def _in_test(name: str) -> bool:
    """Decided by the name alone, so that a file stays in its part when other files are added or removed."""
    return zlib.crc32(name.encode("utf-8", "surrogateescape")) % TEST_SHARE == 0
