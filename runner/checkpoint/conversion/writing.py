"""A checkpoint written from what is held elsewhere: merged, or cut up as the ranks of a plan hold it.

Invariant: what is written is a checkpoint as a run would have saved it, and appears at a single moment.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from runner.checkpoint import Checkpoint, folder, writing
from runner.checkpoint import index as indices
from runner.checkpoint.committing import MERGED, SHARDED
from runner.checkpoint.conversion.cutting import Cut
from runner.checkpoint.conversion.huggingface import described
from runner.checkpoint.conversion.sources import Holding
from runner.checkpoint.folder import HEADER, INDEX
from runner.checkpoint.index import Entry, Part, place
from runner.checkpoint.manifest import Header, Stamp, to_text
from runner.checkpoint.merged import CHUNK, DESCRIPTION, STATES, WEIGHTS
from runner.checkpoint.writing import Tensors
from runner.errors import ConfigError
from strategies.core.layout import Block
from strategies.runtime.shards import MODEL

Written = tuple[dict[str, Stamp], dict[str, Entry]]
"""Stamps by file, and where every tensor is."""


def write(source: Holding, target: Path, cut: Cut | None) -> None:
    """Write all that `source` holds as the checkpoint `target`, merged, or as `cut` says. Raises OSError (a full
    disk); then nothing is left. Raises ConfigError where `target` has the name of another step."""
    header = source.header if isinstance(source, Checkpoint) else Header(0, (0, 0), SHARDED, 1, {}, {}, "", {}, ())
    if folder.NAME.fullmatch(target.name) and folder.number(target) != header.step:
        raise ConfigError(
            "MW605",
            f"convert: {target} is the name of another checkpoint than one of step {header.step}; call it "
            f"{folder.target(target.parent, header.step).name}, or anything that is not step-NUMBER.",
        )
    hidden = folder.hidden(target)
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir(parents=True)
    try:
        if cut is None:
            description, published = described(header.config)
            files, index = _merged(source, hidden, _outside(source, published))
            if description is not None:
                files[DESCRIPTION] = writing.write_bytes(hidden / DESCRIPTION, description.encode())
        else:
            files, index = _sharded(source, hidden, cut)
        if isinstance(source, Checkpoint):
            files |= _copied(source, hidden, without=files)
            plain = tuple(tuple(name for name in names if name in files) for names in header.plain)
            header = replace(header, plain=plain)
        files[INDEX] = writing.write_bytes(hidden / INDEX, json.dumps([indices.to_json(index)]).encode())
        form = MERGED if cut is None else SHARDED
        folder.write_text(hidden / HEADER, to_text(replace(header, form=form, files=files)))
        folder.sync(hidden)
        folder.put(hidden, target)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _merged(source: Holding, target: Path, outside: frozenset[str]) -> Written:
    """`outside` are keys of the model that are kept apart from its weights."""
    files: dict[str, Stamp] = {}
    index: dict[str, Entry] = {}
    for file, wanted in ((WEIGHTS, _is_weight(outside)), (STATES, _is_other(outside))):
        keys = [key for key in source.tensors if wanted(key)]
        names = {key: key.removeprefix(MODEL) if file == WEIGHTS else key for key in keys}
        blocks = {key: _all_of(source.tensors[key]) for key in keys}
        if keys:
            files[file] = _write(target / file, source, {names[key]: (key, blocks[key]) for key in keys}, index)
    return files, index


def _is_weight(outside: frozenset[str]) -> Callable[[str], bool]:
    return lambda key: key.startswith(MODEL) and key not in outside


def _is_other(outside: frozenset[str]) -> Callable[[str], bool]:
    return lambda key: not key.startswith(MODEL) or key in outside


def _outside(source: Holding, published: frozenset[str] | None) -> frozenset[str]:
    """Keys of the model that its state dict, which holds `published`, leaves out; where that is not known, those that
    the merged form of a checkpoint has kept apart."""
    keys = [key for key in source.tensors if key.startswith(MODEL)]
    if published is not None:
        return frozenset(key for key in keys if key.removeprefix(MODEL) not in published)
    return frozenset(key for key in keys if any(part.file == STATES for part in source.tensors[key].parts))


def _sharded(source: Holding, target: Path, cut: Cut) -> Written:
    files: dict[str, Stamp] = {}
    index: dict[str, Entry] = {}
    for rank in range(cut.ranks):
        held = dict(cut.held(rank, source.tensors))
        name = f"rank-{rank:05d}.safetensors"
        if held:
            wanted = {place(key, block): (key, block) for key, block in held.items()}
            files[name] = _write(target / name, source, wanted, index)
    return files, index


def _write(path: Path, source: Holding, wanted: Mapping[str, tuple[str, Block]], index: dict[str, Entry]) -> Stamp:
    """Write blocks by their names in the file, and add to `index` where they are."""
    tensors = []
    for name, (key, block) in wanted.items():
        shape = tuple(stop - start for start, stop in block)
        tensors.append(Tensors(name, shape, source.tensors[key].dtype, partial(chunks, source, key, block)))
    stamp, offsets = writing.write(path, tensors)
    for name, (key, block) in wanted.items():
        entry = source.tensors[key]
        before = index[key].parts if key in index else ()
        index[key] = Entry(entry.shape, entry.dtype, (*before, Part(path.name, offsets[name], block)))
    return stamp


def chunks(source: Holding, key: str, block: Block) -> Iterator[Tensor]:
    """The elements of a block, row by row, in pieces of at most `CHUNK` bytes."""
    size = getattr(torch, source.tensors[key].dtype).itemsize
    yield from (source.read(key, one) for one in _divided(block, CHUNK // size))


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


def _copied(source: Checkpoint, target: Path, without: Mapping[str, Stamp]) -> dict[str, Stamp]:
    """The small files beside the tensors: what is no tensor, and the model's own config. Nothing else that the header
    names is carried along."""
    ranks = (f"rank-{rank:05d}.pt" for rank in range(source.header.world_size))
    wanted = [name for name in (*ranks, DESCRIPTION) if name in source.header.files]
    there = [name for name in wanted if name not in without and name not in source.lost]
    return {name: writing.write_bytes(target / name, (source.path / name).read_bytes()) for name in there}


def _all_of(entry: Entry) -> Block:
    return tuple((0, size) for size in entry.shape)
