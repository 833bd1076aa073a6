"""Opening a checkpoint and reading from it, in any process: no process group, no plan, no model.

Invariant: opening one reads only the header and the index; reading a block costs I/O and memory of the block's size,
whatever plan it was stored under.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from runner.checkpoint.folder import HEADER, INDEX
from runner.checkpoint.index import Index, check_files, chosen, from_json
from runner.checkpoint.manifest import Header, damaged, marked, missing, read_header, stamp
from runner.errors import ConfigError, allowed
from strategies.core.bounded_files import read_json
from strategies.core.layout import Block
from strategies.runtime.shards import MODEL, OPTIMIZER, Shards
from strategies.runtime.tensor_files import StoredTensor, TensorReader

MOST_INDEX = 2**28
"""Bytes of an index: it has a line per tensor and rank."""


class TensorSource(Protocol):
    """Tensors by the keys of a checkpoint (`model/NAME`, `optimizer/STATE/NAME`), read block by block."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...

    def read(self, key: str, block: Block | None = None) -> Tensor:
        """The part `block` of a tensor, by default all of it, on the CPU in the stored dtype."""
        ...


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint. `tensors` has shape, dtype and parts by key (`model/NAME`, `optimizer/STATE/NAME`);
    `lost` names files that are missing but not needed, because other files store the same."""

    path: Path
    header: Header
    tensors: dict[str, StoredTensor]
    lost: dict[str, str] = field(default_factory=dict)

    @cached_property
    def _reader(self) -> TensorReader:
        return TensorReader(self.path)

    @property
    def bytes_read(self) -> int:
        """The bytes of tensors that were read so far."""
        return self._reader.bytes_read.total()

    @property
    def step(self) -> int:
        """The optimizer step after which it was saved."""
        return self.header.step

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Parameters and buffers of the model."""
        return tuple(key.removeprefix(MODEL) for key in self.tensors if key.startswith(MODEL))

    def averaged(self, callback: str) -> Checkpoint:
        """This checkpoint with the average that a callback such as `ema` keeps of the weights in place of the weights.

        Raises ConfigError if it keeps none.
        """
        kept = {key: key.partition("/")[2] for key in self.tensors if not key.startswith((MODEL, OPTIMIZER))}
        found = {MODEL + name: self.tensors[key] for key, name in kept.items() if key == f"{callback}/{name}"}
        if not found or not found.keys() <= self.tensors.keys():
            known = sorted({key.partition("/")[0] for key in kept})
            raise ConfigError(
                "MW834",
                f"The checkpoint {self.path} keeps no average of a callback {callback!r}."
                + (allowed(callback, known) or " Train with train.callbacks=[ema]."),
            )
        return replace(self, tensors=self.tensors | found)

    def read(self, key: str, block: Block | None = None) -> Tensor:
        """The part `block` of a tensor, by default all of it: [stop - start, ...] on the CPU, in the stored dtype.

        Raises KeyError for a key that is not there, ConfigError where a file is damaged.
        """
        stored = self.tensors[key]
        with damaged(self.path):
            return self._reader.block(stored, block)

    def fill(self, wanted: Shards) -> None:
        """Copy the stored values into the views of `wanted`, cast to their dtypes; views may be on any device.

        Raises KeyError for a key that is not there, ConfigError where a file is damaged. No collective is called.
        """
        stored = [(self.tensors[key], shard) for key, shards in wanted.items() for shard in shards]
        with damaged(self.path), torch.no_grad():
            for tensor, shard in stored:
                self._reader.fill(tensor, shard.block, shard.view)

    def plain(self) -> Iterator[dict[str, Any]]:
        """The non-tensor state of each pipeline group."""
        for names in self.header.plain:
            yield self.load(next(name for name in names if name not in self.lost))

    def load(self, name: str) -> dict[str, Any]:
        """The content of one of the small torch files. Raises ConfigError where it is damaged."""
        with damaged(self.path):
            content: dict[str, Any] = torch.load(self.path / name, weights_only=True, map_location="cpu")
            return content


def read(path: Path, without: Mapping[str, str] = MappingProxyType({})) -> Checkpoint:
    """Open the checkpoint `path`, a folder step-...; of its files header and index are read, and the sizes looked at.
    Files in `without` (and why) are not used.

    Raises ConfigError if `path` is not a checkpoint, or is damaged beyond what copies in other files can restore.
    """
    header = read_header(path)
    with damaged(path):
        lost = marked(path) | missing(path, header.files) | dict(without)
        if INDEX in lost:
            raise ValueError(f"{INDEX}: {lost[INDEX]}")
        return Checkpoint(path, header, available(header, read_forms(path, header), lost), lost)


def available(header: Header, forms: Sequence[Index], lost: Mapping[str, str]) -> dict[str, StoredTensor]:
    """The tensors in the first form that is complete without the files `lost` (and why). Raises ValueError where there
    is none, or where non-tensor state is lost."""
    if gone := [names[0] for names in header.plain if lost.keys() >= set(names)]:
        raise ValueError(f"{gone[0]}: {lost[gone[0]]}")
    for form in forms[:-1]:
        with suppress(ValueError):
            return chosen(form, lost)
    return chosen(forms[-1], lost)


def read_forms(path: Path, header: Header) -> list[Index]:
    """The content of `index.json`: the same tensors in each of its forms. Raises what reading a damaged
    file raises."""
    if INDEX not in header.files:
        raise ValueError(f"{HEADER} does not name {INDEX}")
    if stamp(path / INDEX) != header.files[INDEX]:
        raise ValueError(f"the checksum of {INDEX} is another")
    forms: list[Index] = [from_json(one) for one in read_json(path / INDEX, MOST_INDEX)]
    if not forms:
        raise ValueError(f"{INDEX} is empty")
    sizes = {name: one.bytes for name, one in header.files.items()}
    for form in forms:
        check_files(form, sizes)
    return forms
