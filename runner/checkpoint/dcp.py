"""Which stored blocks a rank reads for the blocks that it wants, as torch.distributed.checkpoint plans it.

Only its planner is used, which intersects blocks in n log n. Its own metadata is a pickle, which would run code when it
is read, and its readers load a complete stored shard to use one row. Every rank plans by itself: no collective.
Invariant: of a stored part only the rows and columns that are wanted are read, into memory of that size.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from runner.checkpoint.index import Index
from strategies.core.layout import Block
from strategies.runtime.shards import Shards
from strategies.runtime.tensor_files import Reader, StoredTensor


def fill(folder: Path, index: Index, wanted: Shards, bytes_read: dict[str, int]) -> None:
    """Copy the stored values into the views of `wanted`, cast to their dtypes.

    Args:
        folder: where the files of `index` are.
        index: every tensor of `wanted`, with its parts.
        wanted: views by the tensor's key.
        bytes_read: bytes by file; the bytes read here are added.

    Raises:
        StrategyError: a file is missing or damaged.
    """
    reader = Reader()
    for key, pieces in wanted.items():
        entry = index[key]
        properties = TensorProperties(dtype=getattr(torch, entry.dtype))
        chunks = [_chunk(part.block) for part in entry.parts]
        stored = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
        for item in create_read_items_for_chunk_list(key, stored, [_chunk(piece.block) for piece in pieces]):
            assert item.storage_index.index is not None and item.dest_index.index is not None
            part, view = entry.parts[item.storage_index.index], pieces[item.dest_index.index].view
            shape = tuple(stop - start for start, stop in part.block)
            tensor = StoredTensor(str(folder / part.file), key, shape, entry.dtype, part.offset)
            content = reader.block(tensor, _spans(item.storage_offsets, item.lengths))
            view[tuple(slice(*span) for span in _spans(item.dest_offsets, item.lengths))].copy_(content)
            bytes_read[part.file] = bytes_read.get(part.file, 0) + content.nbytes


def _chunk(block: Block) -> ChunkStorageMetadata:
    starts = torch.Size([start for start, _ in block])
    return ChunkStorageMetadata(starts, torch.Size([stop - start for start, stop in block]))


def _spans(starts: torch.Size, lengths: torch.Size) -> Block:
    return tuple((start, start + length) for start, length in zip(starts, lengths, strict=True))
