"""Documents of text: files of a folder, and lines of JSONL files, local or at an address of fsspec.

A text file is one document, or several with a separator between them; so is a line of a JSONL file, in one of its
fields. Files may be compressed (.gz, .bz2, .xz). The invariant: the same files give the same documents in the same
order on every machine, and a document stays in its part when others are added or removed: equal ones are in one part.
"""

from __future__ import annotations

import fnmatch
import json
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import fsspec

from runner import home
from runner.data.text import NOT_OURS, TEST_SHARE, files_below
from runner.data.visible import is_visible
from runner.errors import ConfigError

PATTERNS = ("*.txt", "*.md", "*.jsonl", "*.txt.*", "*.jsonl.*")
"""The files of a folder that hold text, if no pattern is given."""


class Documents:
    """The documents of `path`: a file, a folder or an address such as s3://bucket/folder; None: the source code of the
    standard library.

    Args:
        path: where they are.
        pattern: the names of files of a folder that count; None: those of text and JSONL, or *.py of the library.
        field: the field of a JSONL line that holds its text.
        separator: what stands between the documents of a text file; None: a file is one.
        train: the training part, the test part (one document in ten), or with None both.
        limit: stop after the document with which the texts have this many characters; None: all.

    Raises:
        ConfigError: nothing there, or no file with such a name.
    """

    def __init__(
        self,
        path: str | None = None,
        pattern: str | None = None,
        field: str = "text",
        separator: str | None = None,
        train: bool | None = None,
        limit: int | None = None,
    ) -> None:
        if limit is not None and limit < 1:
            raise ConfigError("MW315", f"limit = {limit} must be 1 or more characters, or null.")
        place = sysconfig.get_path("stdlib") if path is None else path
        if "://" not in place:
            place = str(home.expanded(place).absolute())
        try:
            self._system, root = fsspec.url_to_fs(place)
            if path is None:
                own = files_below(Path(root), pattern or "*.py", NOT_OURS)
                self._files = [(name, str(file)) for name, file in own]
            elif self._system.isfile(root):
                self._files = [(PurePosixPath(root).name, root)]
            else:
                self._files = _below(self._system, root, PATTERNS if pattern is None else [pattern])
        except (OSError, ImportError, ValueError) as error:
            raise ConfigError("MW314", f"{place} cannot be read: {_reason(error)}.") from error
        if not self._files:
            raise ConfigError(
                "MW314",
                f"{place}: there is no file with text called {pattern or ' or '.join(PATTERNS[:3])}; give a file, "
                "a folder of .txt or .jsonl files, or a pattern that fits yours.",
            )
        if separator == "":
            raise ConfigError("MW315", "data.args.separator is empty; give what stands between documents, or null.")
        self._field, self._separator, self._train, self._limit = field, separator, train, limit

    def facts(self) -> list[str]:
        """What changes when the documents do: names, sizes and times of change, and which are chosen."""
        return [
            repr((self._field, self._separator, self._train, self._limit)),
            *(f"{name} {self._system.ukey(file)}" for name, file in self._files),
        ]

    def __iter__(self) -> Iterator[str]:
        """The texts, without those of white space alone. Raises ConfigError: a file that cannot be read, is no UTF-8,
        or has a line without the field."""
        left = self._limit
        for name, file in self._files:
            for text in self._of(name, file):
                if not text.strip() or self._train == in_test(text):
                    continue
                yield text
                if left is not None and (left := left - len(text)) <= 0:
                    return

    def _of(self, name: str, file: str) -> Iterator[str]:
        try:
            with self._system.open(file, mode="rb", compression="infer") as opened:
                if ".jsonl" not in PurePosixPath(name).suffixes:
                    text = opened.read().decode()
                    yield from [text] if self._separator is None else text.split(self._separator)
                    return
                for number, line in enumerate(opened, 1):
                    if line.strip():
                        yield self._in_line(f"{file}, line {number}", line)
        except UnicodeDecodeError as error:
            raise ConfigError(
                "MW314", f"{file} is no UTF-8 text (byte {error.start}); convert it, or give a pattern without it."
            ) from error
        except (OSError, EOFError, ValueError) as error:
            raise ConfigError("MW314", f"{file} cannot be read: {_reason(error)}.") from error

    def _in_line(self, where: str, line: bytes) -> str:
        try:
            value = json.loads(line)
        except UnicodeDecodeError:
            raise
        except ValueError as error:
            raise ConfigError("MW314", f"{where} is no JSON: {error}.") from error
        text = value.get(self._field) if isinstance(value, dict) else None
        if not isinstance(text, str):
            if isinstance(value, dict) and self._field in value:
                raise ConfigError(
                    "MW314", f"{where} has {type(text).__name__} under {self._field!r}, where a string is expected."
                )
            has = ", ".join(map(repr, value)) if isinstance(value, dict) else type(value).__name__
            raise ConfigError(
                "MW314",
                f"{where} has no text under {self._field!r}; it holds {has}. Name the field that holds the text as "
                "data.args.field (of `run tokenize`: field).",
            )
        return text


def in_test(text: str) -> bool:
    """Whether a text is in the test part; decided by its bytes, so equal ones are in one part."""
    return zlib.crc32(text.encode("utf-8", "surrogateescape")) % TEST_SHARE == 0


def _below(system: fsspec.AbstractFileSystem, root: str, patterns: Sequence[str]) -> list[tuple[str, str]]:
    """Files by their path below `root`, sorted by it."""
    if not system.isdir(root):
        raise FileNotFoundError(f"there is no such file or folder: {root}")
    files = []
    for file in system.find(root):
        name = PurePosixPath(Path(file).as_posix()).relative_to(PurePosixPath(Path(root).as_posix()))
        if is_visible(name) and any(fnmatch.fnmatch(name.name, pattern) for pattern in patterns):
            files.append((name.as_posix(), file))
    return sorted(files)


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error).rstrip(".")
