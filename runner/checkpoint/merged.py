"""The merged form: one file of unsharded weights under the model's own names, which plain torch and transformers can
read, and one of optimizer states.

Written from any source of tensors, a block at a time. Invariant: no more than `CHUNK` bytes of tensors are in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from runner.checkpoint import writing
from runner.checkpoint.manifest import Stamp
from runner.checkpoint.reading import TensorSource
from runner.checkpoint.writing import Unwritten
from strategies.core.layout import Block
from strategies.runtime.shards import MODEL
from strategies.runtime.tensor_files import StoredTensor

WEIGHTS, STATES, DESCRIPTION = "model.safetensors", "optimizer.safetensors", "config.json"
CHUNK = 2**26


def write(
    source: TensorSource, target: Path, outside: frozenset[str] = frozenset(), described: str | None = None
) -> tuple[dict[str, Stamp], dict[str, StoredTensor]]:
    """Write all tensors of `source` in the merged form.

    Args:
        source: where the tensors are read.
        target: the folder to which the files go.
        outside: keys of the model that are not weights, such as buffers that its state dict leaves out; they go to the
            file of the optimizer's states.
        described: becomes config.json.

    Returns:
        Stamps by file name, and where every tensor is.
    """
    weights = {key: key.removeprefix(MODEL) for key in source.tensors if key.startswith(MODEL) and key not in outside}
    others = {key: key for key in source.tensors if key not in weights}
    files: dict[str, Stamp] = {}
    index: dict[str, StoredTensor] = {}
    for file, names in ((WEIGHTS, weights), (STATES, others)):
        if names:
            blocks = [_whole(source, key, name) for key, name in names.items()]
            files[file], entries = writing.write(target / file, blocks)
            index |= entries
    if described is not None:
        files[DESCRIPTION] = writing.write_bytes(target / DESCRIPTION, described.encode())
    return files, index


def unpublished(source: TensorSource, published: frozenset[str]) -> frozenset[str]:
    """Keys of the model that its state dict, which holds the names `published`, leaves out."""
    keys = (key for key in source.tensors if key.startswith(MODEL))
    return frozenset(key for key in keys if key.removeprefix(MODEL) not in published)


def block_of(source: TensorSource, key: str, name: str, block: Block) -> Unwritten:
    """A block of a tensor of `source`, to be written under `name` in chunks of at most `CHUNK` bytes."""
    entry = source.tensors[key]
    return Unwritten(name, key, entry.shape, entry.dtype, block, partial(_chunks, source, key, block))


def _whole(source: TensorSource, key: str, name: str) -> Unwritten:
    return block_of(source, key, name, tuple((0, size) for size in source.tensors[key].shape))


def _chunks(source: TensorSource, key: str, block: Block) -> Iterator[Tensor]:
    size = getattr(torch, source.tensors[key].dtype).itemsize
    yield from (source.read(key, part) for part in _divided(block, CHUNK // size))


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
