"""A checkpoint written from what is held elsewhere: merged, or cut up as the ranks of a plan hold it.

Invariant: what is written is a checkpoint as a run would have saved it, and appears at a single moment.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from runner.checkpoint import Checkpoint, folder, merged, writing
from runner.checkpoint.committing import MERGED, SHARDED
from runner.checkpoint.conversion.cutting import Cut
from runner.checkpoint.conversion.huggingface import described
from runner.checkpoint.folder import HEADER, INDEX
from runner.checkpoint.index import Entry, Index, joined, place, to_json
from runner.checkpoint.manifest import Header, Stamp, to_text
from runner.checkpoint.merged import DESCRIPTION, STATES
from runner.checkpoint.reading import TensorSource
from runner.errors import ConfigError
from strategies.runtime.shards import MODEL


def write(source: TensorSource, target: Path, cut: Cut | None) -> None:
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
            files, index = merged.write(source, hidden, _outside(source, published), description)
        else:
            files, index = _sharded(source, hidden, cut)
        if isinstance(source, Checkpoint):
            files |= _copied(source, hidden, without=files)
            plain = tuple(tuple(name for name in names if name in files) for names in header.plain)
            header = replace(header, plain=plain)
        files[INDEX] = writing.write_bytes(hidden / INDEX, json.dumps([to_json(index)]).encode())
        form = MERGED if cut is None else SHARDED
        folder.write_text(hidden / HEADER, to_text(replace(header, form=form, files=files)))
        folder.sync(hidden)
        folder.put(hidden, target)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def _outside(source: TensorSource, published: frozenset[str] | None) -> frozenset[str]:
    """Keys of the model that its state dict, which holds `published`, leaves out; where that is not known, those that
    the merged form of a checkpoint stores apart."""
    if published is not None:
        return merged.unpublished(source, published)
    apart = (key for key, entry in source.tensors.items() if any(part.file == STATES for part in entry.parts))
    return frozenset(key for key in apart if key.startswith(MODEL))


def _sharded(source: TensorSource, target: Path, cut: Cut) -> tuple[dict[str, Stamp], dict[str, Entry]]:
    files: dict[str, Stamp] = {}
    indices: list[Index] = []
    for rank in range(cut.ranks):
        name = f"rank-{rank:05d}.safetensors"
        blocks = [
            merged.block_of(source, key, place(key, block), block) for key, block in cut.held(rank, source.tensors)
        ]
        if blocks:
            files[name], index = writing.write(target / name, blocks)
            indices.append(index)
    return files, joined(indices)


def _copied(source: Checkpoint, target: Path, without: Mapping[str, Stamp]) -> dict[str, Stamp]:
    """The small files beside the tensors: what is no tensor, and the model's own config. Nothing else that the header
    names is carried along."""
    ranks = (f"rank-{rank:05d}.pt" for rank in range(source.header.world_size))
    wanted = [name for name in (*ranks, DESCRIPTION) if name in source.header.files]
    there = [name for name in wanted if name not in without and name not in source.lost]
    return {name: writing.write_bytes(target / name, (source.path / name).read_bytes()) for name in there}
