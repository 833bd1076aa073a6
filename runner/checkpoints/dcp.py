"""torch.distributed.checkpoint's planner and storage for pieces: any blocks of any tensor, wherever they are stored.

DCP intersects the blocks that are wanted with those that are stored; this file tells it both and reads what it asks
for. Invariant: of a stored part only the rows and columns that are wanted are read, into memory of that size, and every
wanted element is written once.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from runner.checkpoints.index import Index
from runner.checkpoints.pieces import Piece, Pieces
from strategies.engine.stored import Reader, Stored
from strategies.layout import Block


@dataclass(frozen=True)
class PieceReader(StorageReader):
    """Reads the parts of `index` from `folder`; `counter` counts the bytes by file."""

    folder: Path
    index: Index
    counter: dict[str, int]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return Path(checkpoint_id).is_dir()

    def reset(self, checkpoint_id: Any = None) -> None:
        self.counter.clear()

    def read_metadata(self) -> Metadata:
        return Metadata({key: _metadata(entry.shape, entry.dtype, entry.parts) for key, entry in self.index.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        return None

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        reader = Reader()
        for item in plan.items:
            planner.resolve_tensor(item).copy_(self._read(item, reader))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, item: ReadItem, reader: Reader) -> Tensor:
        entry = self.index[item.storage_index.fqn]
        assert item.storage_index.index is not None
        part = entry.parts[item.storage_index.index]
        shape = tuple(stop - start for start, stop in part.block)
        stored = Stored(str(self.folder / part.file), item.storage_index.fqn, shape, entry.dtype, part.offset)
        pairs = zip(item.storage_offsets, item.lengths, strict=True)
        found = reader.block(stored, tuple((start, start + length) for start, length in pairs))
        self.counter[part.file] = self.counter.get(part.file, 0) + found.nbytes
        return found


class PieceFiller(LoadPlanner):
    """Plans to fill the views of pieces."""

    def __init__(self) -> None:
        self._wanted: Pieces = {}
        self._metadata = Metadata({})

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self._wanted, self._metadata = state_dict, metadata

    def create_local_plan(self) -> LoadPlan:
        stored: Mapping[str, Any] = self._metadata.state_dict_metadata
        items: list[ReadItem] = []
        for key, pieces in self._wanted.items():
            items += create_read_items_for_chunk_list(key, stored[key], [_chunk(piece.block) for piece in pieces])
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError(f"{read_item.dest_index.fqn} is no tensor; only tensors are pieces")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        piece = self._piece(read_item.dest_index)
        pairs = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return piece.view[tuple(slice(start, start + length) for start, length in pairs)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        return None

    def _piece(self, index: MetadataIndex) -> Piece:
        assert index.index is not None
        return self._wanted[index.fqn][index.index]


def _metadata(shape: tuple[int, ...], dtype: str, parts: Any) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        TensorProperties(dtype=getattr(torch, dtype)), torch.Size(shape), [_chunk(part.block) for part in parts]
    )


def _chunk(block: Block) -> ChunkStorageMetadata:
    starts = torch.Size([start for start, _ in block])
    return ChunkStorageMetadata(starts, torch.Size([stop - start for start, stop in block]))
