"""Writing a checkpoint's files: streamed to the disk, with their checksums computed on the way.

A safetensors file is 8 bytes with the length of a JSON header, the header {name: {dtype, shape, data_offsets}}, and the
tensors, each row by row. `merged` writes one file of unsharded weights under the model's own names, which plain torch
and transformers can read, and one of optimizer states. Invariant: a file is on the disk when a function returns, and
of a source of tensors no more than `CHUNK` bytes are in memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from runner.checkpoint.index import place
from runner.checkpoint.manifest import BLOCK, Stamp
from runner.checkpoint.reading import TensorSource
from runner.checkpoint.shared_buffers import WrittenFile
from strategies.core.layout import Block
from strategies.runtime.flight_recorder import recorder
from strategies.runtime.shards import MODEL, Shards, full
from strategies.runtime.tensor_files import DTYPES, SIZES, Part, StoredTensor

NAMES = {name: short for short, name in DTYPES.items()}
"""What safetensors calls torch's dtypes."""
WEIGHTS, STATES, DESCRIPTION = "model.safetensors", "optimizer.safetensors", "config.json"
DTYPE, FLOATING = re.compile(r'^(  "(?:torch_)?dtype": )"\w+"', re.MULTILINE), re.compile("float|bfloat")
ADAPTER, ADAPTER_DESCRIPTION = "adapter_model.safetensors", "adapter_config.json"
CHUNK = 2**26


@dataclass(frozen=True)
class Companions:
    """What a library needs beside merged weights to load them.

    Attributes:
        texts: small files by name, such as the config.json of transformers.
        adapter: tensors that are written once more, into a file of their own as peft has it: their names in that file
            by those in the model.
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    adapter: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Unwritten:
    """A block to be written under `name`, of the tensor `key`, which has `shape` and torch's `dtype`. `chunks()` yields
    the elements of the block row by row, in one tensor or several."""

    name: str
    key: str
    shape: tuple[int, ...]
    dtype: str
    block: Block
    chunks: Callable[[], Iterable[Tensor]]


def write(
    path: Path, blocks: Sequence[Unwritten], opened: Callable[[Path], WrittenFile] | None = None
) -> tuple[Stamp, dict[str, StoredTensor]]:
    """Write a safetensors file.

    Args:
        path: the file.
        blocks: the content, each block under a unique name.
        opened: opens the file; None: as `Stamped`.

    Returns:
        Size and checksum of the file, and the tensors of `blocks` with the parts that it holds.

    Raises:
        OSError: the disk is full.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, position = {}, 0
    ordered = sorted(blocks, key=lambda one: -SIZES[one.dtype])  # wide numbers first: each is aligned as its dtype
    for one in ordered:
        sizes = [stop - start for start, stop in one.block]
        offsets[one.name], end = position, position + SIZES[one.dtype] * math.prod(sizes)
        header[one.name] = {"dtype": NAMES[one.dtype], "shape": sizes, "data_offsets": (position, end)}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (opened or Stamped)(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for one in ordered:
            for chunk in one.chunks():
                file.write(memoryview(raw(chunk)))
    index: dict[str, StoredTensor] = {}
    for one in blocks:
        entry = index.setdefault(one.key, StoredTensor(one.shape, one.dtype))
        part = Part(path.name, 8 + len(text) + offsets[one.name], one.block)
        index[one.key] = replace(entry, parts=(*entry.parts, part))
    return file.stamp, index


def of_shards(shards: Shards) -> list[Unwritten]:
    """The shards of a rank, each block once."""
    blocks = {}
    for key, several in shards.items():
        for one in several:
            name, dtype = place(key, one.block), str(one.view.dtype).removeprefix("torch.")
            blocks[name] = Unwritten(name, key, tuple(one.shape), dtype, one.block, partial(list, [one.view]))
    return list(blocks.values())


def write_bytes(path: Path, content: bytes) -> Stamp:
    """Write a small file."""
    with Stamped(path) as file:
        file.write(content)
    return file.stamp


def copy(source: Path, path: Path) -> Stamp:
    """Write `path` like the file `source`."""
    with source.open("rb") as content, Stamped(path) as file:
        while block := content.read(BLOCK):
            file.write(block)
    return file.stamp


class Stamped:
    """A file that is written once, flushed to the disk, and checksummed while it is written. It gets its final name
    when it is complete."""

    def __init__(self, path: Path) -> None:
        self._path, self._sum, self._size = path, hashlib.sha256(), 0
        self._hidden = path.with_name(f".{path.name}")

    def __enter__(self) -> Stamped:
        self._file = self._hidden.open("wb")
        return self

    def write(self, content: bytes | memoryview) -> None:
        for begin in range(0, len(content), BLOCK):  # on a slow disk every block is a sign of progress
            block = content[begin : begin + BLOCK]
            self._file.write(block)
            self._sum.update(block)
            recorder.advance(len(block))
        self._size += len(content)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._hidden.rename(self._path)
                recorder.advance()

    @property
    def stamp(self) -> Stamp:
        return Stamp(self._size, self._sum.hexdigest())


def raw(tensor: Tensor) -> bytes | memoryview:
    """The bytes of a tensor on any device, row by row."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""


def merged(
    source: TensorSource,
    target: Path,
    published: frozenset[str] | None = None,
    companions: Companions | None = None,
) -> tuple[dict[str, Stamp], dict[str, StoredTensor]]:
    """Write all tensors of `source` in the merged form.

    Args:
        source: where the tensors are read.
        target: the folder to which the files go.
        published: the names in the model's state dict; None for all of the model, but what `source`, where it is a
            merged checkpoint, has among the optimizer's states. Others go to the file of the optimizer's states.
        companions: what a library needs beside the weights.

    Returns:
        Stamps by file name, and where every tensor is.
    """

    def is_weight(key: str, entry: StoredTensor) -> bool:
        if not key.startswith(MODEL):
            return False
        if published is not None:
            return key.removeprefix(MODEL) in published
        return not any(part.file == STATES for part in entry.parts)

    names = {key: key.removeprefix(MODEL) for key, entry in source.tensors.items() if is_weight(key, entry)}
    others = {key: key for key in source.tensors if key not in names}
    files: dict[str, Stamp] = {}
    index: dict[str, StoredTensor] = {}
    for file, stored in ((WEIGHTS, names), (STATES, others)):
        if stored:
            blocks = [block_of(source, key, name, full(source.tensors[key].shape)) for key, name in stored.items()]
            files[file], entries = write(target / file, blocks)
            index |= entries
    companions = companions or Companions()
    dtypes = {entry.dtype for key, entry in source.tensors.items() if key in names and FLOATING.match(entry.dtype)}
    for file, text in companions.texts.items():
        if file == DESCRIPTION and len(dtypes) == 1:  # transformers loads weights in the dtype that it reads here
            text = DTYPE.sub(rf'\g<1>"{next(iter(dtypes))}"', text, count=1)
        files[file] = write_bytes(target / file, text.encode())
    if companions.adapter:
        keys = {f"{MODEL}{name}": saved for name, saved in companions.adapter.items()}
        blocks = [block_of(source, key, saved, full(source.tensors[key].shape)) for key, saved in keys.items()]
        files[ADAPTER], _ = write(target / ADAPTER, blocks)
    return files, index


def block_of(source: TensorSource, key: str, name: str, block: Block) -> Unwritten:
    """A block of a tensor of `source`, to be written under `name` in chunks of at most `CHUNK` bytes."""
    entry = source.tensors[key]
    return Unwritten(name, key, entry.shape, entry.dtype, block, partial(_chunks, source, key, block))


def _chunks(source: TensorSource, key: str, block: Block) -> Iterator[Tensor]:
    size = SIZES[source.tensors[key].dtype]
    return (source.read(key, part) for part in _divided(block, CHUNK // size))


def _divided(block: Block, most: int) -> Iterator[Block]:
    """`block` in blocks of at most `most` elements that follow each other row by row."""
    if math.prod(stop - start for start, stop in block) <= most:
        yield block
        return
    (start, stop), *inner = block
    row = math.prod(b - a for a, b in inner)
    rows = max(most // row, 1)
    for first in range(start, stop, rows):
        bounds = (first, min(first + rows, stop))
        yield from ((bounds, *one) for one in _divided(tuple(inner), most)) if row > most else ((bounds, *inner),)
