"""Samples in many files, wherever fsspec finds them: parquet, JSONL and arrow, on a disk or in a bucket.

A file is read in blocks: row groups of parquet, record batches of arrow, thousands of lines of JSONL. Invariant: row
n is the n-th of all files in the order of their paths, and a process reads only the blocks of its rows and keeps the
last ones. How many rows each block has is found once and kept in the cache folder.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.build.targets import describe
from runner.data.lines import tensors_of
from runner.data.text import cached
from runner.data.visible import is_visible
from runner.errors import ConfigError
from strategies.core.errors import closest

LINES = 4096
"""Lines of a block of JSONL."""
Block = Callable[[int], dict[str, Any]]
"""Its row of a number."""


class Shards:
    """Samples {column: value} of all files that `path` names, with numbers and lists of numbers as tensors of the
    column's type (of JSONL int64 and float32), and everything else as it is.

    Shuffled, the blocks of all files are in another order in every epoch, and the rows of `window` blocks are mixed.

    Args:
        path: a file, a folder, a pattern such as s3://bucket/train-*.parquet, or a list of these.
        columns: those that a sample has. None: all.
        window: how many blocks stay in memory.
        storage: what the file system takes, such as {anon: true}.
        cache: the folder for the numbers of rows. None: that of the user.

    Raises:
        ConfigError: no such files, or one that cannot be read.
    """

    def __init__(
        self,
        path: str | Sequence[str],
        columns: Sequence[str] | None = None,
        window: int = 4,
        storage: Mapping[str, Any] | None = None,
        cache: str | None = None,
    ) -> None:
        self._columns, self._window = None if columns is None else [*columns], window
        if window < 1:
            raise ConfigError("MW315", f"data.args.window = {window}; at least one block stays in memory.")
        self._files: list[tuple[Any, str]] = []
        names = []
        for one in [path] if isinstance(path, str) else path:
            for system, file, key in _found(one, dict(storage or {})):
                self._files.append((system, file))
                names.append(key)
        index = hashlib.blake2b(json.dumps(names).encode(), digest_size=16).hexdigest()
        content = cached(f"shards-{index}.json", self._indexed, cache).read_text(encoding="utf-8")
        self._blocks: list[tuple[int, int, int]] = [(*block,) for block in json.loads(content)]
        self._starts = [0, *accumulate(rows for *_, rows in self._blocks)]
        self._kept: OrderedDict[int, Block] = OrderedDict()

    def _indexed(self) -> Iterator[bytes]:
        """All blocks: the file, the place in it, the number of rows."""
        found = []
        for number, (system, file) in enumerate(self._files):
            blocks = self._of(file, partial(_FORMATS[_suffix(file)][0], system, file))
            found += [(number, place, rows) for place, rows in blocks if rows]
        yield json.dumps(found).encode()

    def _of(self, file: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except ConfigError:
            raise
        except ModuleNotFoundError as error:
            raise ConfigError(
                "MW802", f"data: {file} needs {error.name}, which is not installed: pip install 'meshwright[data]'."
            ) from error
        except Exception as error:
            raise ConfigError("MW821", f"data: the shard {file} cannot be read: {describe(error)}.") from error

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = bisect_right(self._starts, index) - 1
        if number not in self._kept:
            shard, place, rows = self._blocks[number]
            system, file = self._files[shard]
            read = partial(_FORMATS[_suffix(file)][1], system, file, place, rows, self._columns)
            self._kept[number] = self._of(file, read)
            if len(self._kept) > self._window:
                self._kept.popitem(last=False)
        self._kept.move_to_end(number)
        shard, _, _ = self._blocks[number]
        row: dict[str, Any] = self._of(self._files[shard][1], partial(self._kept[number], index - self._starts[number]))
        return row

    def shuffled(self, generator: torch.Generator) -> Tensor:
        """An order of the rows, int64 [rows], in which each block is needed for a while and not again."""
        blocks = torch.randperm(len(self._blocks), generator=generator).tolist()
        order = []
        for first in range(0, len(blocks), self._window):
            rows = torch.cat(
                [torch.arange(*self._starts[one : one + 2]) for one in blocks[first : first + self._window]]
            )
            order.append(rows[torch.randperm(len(rows), generator=generator)])
        return torch.cat(order)


def _found(path: str, storage: dict[str, Any]) -> Iterator[tuple[Any, str, str]]:
    """The files that `path` names, in order: the file system, the name there, and what changes with the content."""
    import fsspec  # only where data is in files

    try:
        system, inside = fsspec.core.url_to_fs(path, **storage)
        inside = inside.rstrip("/")
        if system.isdir(inside):
            every = (name for name in system.find(inside) if _suffix(name) in _FORMATS)
            files = sorted(name for name in every if is_visible(PurePosixPath(name.removeprefix(inside))))
        else:
            files = sorted(system.glob(inside)) if fsspec.core.has_magic(inside) else [inside]
        found = [(system, name, f"{name} {system.ukey(name)}") for name in files]
    except Exception as error:
        raise ConfigError("MW821", f"data: {path} cannot be read: {describe(error)}.") from error
    if not found:
        raise ConfigError("MW821", f"data: there is no file {path}; a folder, a pattern or a file is right.")
    for _, name, _ in found:
        if _suffix(name) not in _FORMATS:
            raise ConfigError("MW821", f"data: {name} is none of {', '.join(f'*.{one}' for one in _FORMATS)}.")
    yield from found


def _suffix(name: str) -> str:
    return name.rpartition(".")[2]


def _row_groups(system: Any, name: str) -> list[tuple[int, int]]:
    from pyarrow import parquet

    with system.open(name, "rb") as file:
        content = parquet.ParquetFile(file).metadata
        return [(number, content.row_group(number).num_rows) for number in range(content.num_row_groups)]


def _row_group(system: Any, name: str, place: int, rows: int, columns: Sequence[str] | None) -> Block:
    from pyarrow import parquet

    with system.open(name, "rb") as file:
        opened = parquet.ParquetFile(file)
        _refuse_unknown(columns, opened.schema_arrow.names, name)
        return _table(opened.read_row_group(place, columns=columns))


def _batches(file: Any) -> Iterator[Any]:
    """The record batches of an arrow file or, as Hugging Face writes it, of a stream."""
    from pyarrow import ArrowInvalid, ipc

    try:
        opened = ipc.open_file(file)
    except ArrowInvalid:
        file.seek(0)
        yield from ipc.open_stream(file)
        return
    for number in range(opened.num_record_batches):
        yield opened.get_batch(number)


def _record_batches(system: Any, name: str) -> list[tuple[int, int]]:
    with system.open(name, "rb") as file:
        return [(number, batch.num_rows) for number, batch in enumerate(_batches(file))]


def _record_batch(system: Any, name: str, place: int, rows: int, columns: Sequence[str] | None) -> Block:
    import pyarrow

    with system.open(name, "rb") as file:
        batch = next(batch for number, batch in enumerate(_batches(file)) if number == place)
    table = pyarrow.table(batch)
    _refuse_unknown(columns, table.column_names, name)
    return _table(table if columns is None else table.select(columns))


def _refuse_unknown(columns: Sequence[str] | None, known: Iterable[str], where: str) -> None:
    """Raises ConfigError for a column that a file or line does not have."""
    for column in columns or ():
        if column not in known:
            raise ConfigError("MW821", f"data: {where} has no column {column!r}.{closest(column, known)}")


def _table(table: Any) -> Block:
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    return lambda row: {name: _value(column[row]) for name, column in columns.items()}


def _value(cell: Any) -> Any:
    """The value of an arrow scalar."""
    from pyarrow import types

    if (_is_list(cell.type) or types.is_map(cell.type)) and cell.is_valid:
        values = cell.values
        if types.is_primitive(values.type) and not values.null_count:
            return torch.from_numpy(np.array(values.to_numpy(zero_copy_only=False)))
        plain, nulls = cell.as_py(), values.null_count
        while _is_list(values.type):
            values = values.flatten()
            nulls += values.null_count
        if nulls or not types.is_primitive(values.type):
            return plain
        return torch.from_numpy(np.array(plain, values.type.to_pandas_dtype()))
    if cell.is_valid and (types.is_integer(cell.type) or types.is_floating(cell.type) or types.is_boolean(cell.type)):
        return torch.from_numpy(np.array(cell.as_py(), cell.type.to_pandas_dtype()))
    return cell.as_py()


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _lines(system: Any, name: str) -> list[tuple[int, int]]:
    found, place, count = [], 0, 0
    with system.open(name, "rb") as file:
        first = 0
        for line in file:
            if count == LINES:
                found.append((first, count))
                first, count = place, 0
            count += bool(line.strip())
            place += len(line)
    return [*found, (first, count)]


def _block_of_lines(system: Any, name: str, place: int, rows: int, columns: Sequence[str] | None) -> Block:
    lines: list[bytes] = []
    with system.open(name, "rb") as file:
        file.seek(place)
        while len(lines) < rows:
            line = file.readline()
            if not line:
                raise ValueError(f"it ends after {len(lines)} of the {rows} lines from byte {place} on")
            if line.strip():
                lines.append(line)

    def row(number: int) -> dict[str, Any]:
        where = f"{name}, line {number + 1} from byte {place} on"
        try:
            values = json.loads(lines[number])
        except ValueError as error:
            raise ConfigError("MW821", f"data: {where} is no JSON: {error}.") from error
        if not isinstance(values, dict):
            raise ConfigError("MW821", f'data: {where} is no JSON object, {{"column": value, ...}}.')
        _refuse_unknown(columns, values, where)
        return tensors_of(values if columns is None else {name: values[name] for name in columns}, where)

    return row


_FORMATS: dict[str, tuple[Callable[..., list[tuple[int, int]]], Callable[..., Block]]] = {
    "parquet": (_row_groups, _row_group),
    "jsonl": (_lines, _block_of_lines),
    "arrow": (_record_batches, _record_batch),
}
"""By the end of a file's name: its blocks (place, rows), and how one is read."""
