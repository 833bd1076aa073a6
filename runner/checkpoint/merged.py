"""The merged form: one file of whole weights by the model's own names, which plain torch and transformers read too, and
one of optimizer states.

Written from the parts of the ranks, tensor by tensor and of a large one some rows at a time. Invariant: no more than
`CHUNK` bytes of tensors are in memory, or one row where that is more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from runner.checkpoint import writing
from runner.checkpoint.index import Entry, Part
from runner.checkpoint.manifest import Stamp
from runner.checkpoint.reading import Checkpoint
from runner.checkpoint.writing import Tensors
from strategies.runtime.shards import MODEL

WEIGHTS, STATES, DESCRIPTION = "model.safetensors", "optimizer.safetensors", "config.json"
CHUNK = 2**26


def write(
    source: Checkpoint, target: Path, published: frozenset[str] | None = None, described: str | None = None
) -> tuple[dict[str, Stamp], dict[str, Entry]]:
    """Write all that `source` holds to the folder `target`: stamps by file name, and where every tensor is.

    `published` names what belongs to the weights (None: all of the model); the rest of the model, such as buffers that
    its state dict leaves out, goes to the other file. `described` becomes config.json.
    """

    def is_weight(key: str) -> bool:
        return key.startswith(MODEL) and (published is None or key.removeprefix(MODEL) in published)

    weights = {key.removeprefix(MODEL): key for key in source.tensors if is_weight(key)}
    others = {key: key for key in source.tensors if not is_weight(key)}
    files, index = {}, {}
    for file, names in ((WEIGHTS, weights), (STATES, others)):
        if not names:
            continue
        tensors = [_tensors(name, source, key) for name, key in names.items()]
        files[file], offsets = writing.write(target / file, tensors)
        for name, key in names.items():
            entry = source.tensors[key]
            whole = Part(file, offsets[name], tuple((0, size) for size in entry.shape))
            index[key] = Entry(entry.shape, entry.dtype, (whole,))
    if described is not None:
        files[DESCRIPTION] = writing.write_bytes(target / DESCRIPTION, described.encode())
    return files, index


def _tensors(name: str, source: Checkpoint, key: str) -> Tensors:
    entry = source.tensors[key]
    return Tensors(name, entry.shape, entry.dtype, partial(_chunks, source, key))


def _chunks(source: Checkpoint, key: str) -> Iterator[Tensor]:
    entry = source.tensors[key]
    if not entry.shape:
        yield source.read(key)
        return
    row = math.prod(entry.shape[1:]) * getattr(torch, entry.dtype).itemsize
    rows = max(CHUNK // max(row, 1), 1)
    for start in range(0, entry.shape[0], rows):
        stop = min(start + rows, entry.shape[0])
        yield source.read(key, ((start, stop), *((0, size) for size in entry.shape[1:])))
