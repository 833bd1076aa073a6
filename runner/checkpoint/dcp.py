"""torch.distributed.checkpoint's planner and storage for pieces: any blocks of any tensor, wherever they are stored.

DCP intersects the blocks that are wanted with those that are stored; this file tells it both and reads what it asks
for, and writes a rank's pieces to one file. Invariant: of a stored part only the rows and columns that are wanted are
read, into memory of that size.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from runner.checkpoint import writing
from runner.checkpoint.index import Entry, Index, Part, place
from runner.checkpoint.manifest import Stamp
from runner.checkpoint.writing import Tensors
from strategies.core.layout import Block
from strategies.runtime.shards import Shard, Shards
from strategies.runtime.tensor_files import Reader, StoredTensor


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
        return None

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
        stored = StoredTensor(str(self.folder / part.file), item.storage_index.fqn, shape, entry.dtype, part.offset)
        pairs = zip(item.storage_offsets, item.lengths, strict=True)
        found = reader.block(stored, tuple((start, start + length) for start, length in pairs))
        self.counter[part.file] = self.counter.get(part.file, 0) + found.nbytes
        return found


class PieceFiller(LoadPlanner):
    """Plans to fill the views of pieces."""

    def __init__(self) -> None:
        self._wanted: Shards = {}
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

    def _piece(self, index: MetadataIndex) -> Shard:
        assert index.index is not None
        return self._wanted[index.fqn][index.index]


@dataclass
class PieceWriter(StorageWriter):
    """Writes the pieces of one rank to `folder/name`; `stamp` and `index` tell what was written."""

    folder: Path
    name: str
    stamp: Stamp | None = None
    index: dict[str, Entry] = field(default_factory=dict)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return Path(checkpoint_id).is_dir()

    def reset(self, checkpoint_id: Any = None) -> None:
        self.stamp, self.index = None, {}

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        return None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        named = {place(item.index.fqn, _block(item)): item for item in plan.items}
        tensors = [_tensors(name, item, planner) for name, item in named.items()]
        self.stamp, offsets = writing.write(self.folder / self.name, tensors)
        for one in tensors:
            item = named[one.name]
            assert item.tensor_data is not None
            key, shape = item.index.fqn, tuple(item.tensor_data.size)
            before = self.index.get(key, Entry(shape, one.dtype, ()))
            part = Part(self.name, offsets[one.name], _block(item))
            self.index[key] = Entry(shape, one.dtype, (*before.parts, part))
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(named[one.name].index, one.bytes, None) for one in tensors])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        return None


class PieceSaver(SavePlanner):
    """Plans to save every piece that it is given."""

    def __init__(self) -> None:
        self._given: Shards = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self._given = state_dict

    def create_local_plan(self) -> SavePlan:
        return SavePlan(
            [_item(key, number, piece) for key, pieces in self._given.items() for number, piece in enumerate(pieces)]
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, Metadata({})  # every rank saves by itself; the parts are put together in `committing`

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        assert write_item.index.index is not None
        return self._given[write_item.index.fqn][write_item.index.index].view


def fill(folder: Path, index: Index, wanted: Shards, counter: dict[str, int]) -> None:
    """Overwrite the views of `wanted` by what the files of `folder` hold. Raises what reading raises."""
    with _plainly():
        load(dict(wanted), storage_reader=PieceReader(folder, index, counter), planner=PieceFiller(), no_dist=True)


def store(folder: Path, name: str, pieces: Shards) -> tuple[Stamp, dict[str, Entry]]:
    """Write `pieces` to `folder/name`; what was written, and where every part is. Raises what writing raises."""
    writer = PieceWriter(folder, name)
    with _plainly():
        save(dict(pieces), storage_writer=writer, planner=PieceSaver(), no_dist=True)
    assert writer.stamp is not None
    return writer.stamp, writer.index


@contextmanager
def _plainly() -> Iterator[None]:
    """Every rank calls DCP by itself: nothing to be warned of, and errors as they are. Warnings are switched off for
    good, because that is safe beside other threads."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    try:
        yield
    except CheckpointException as error:
        (cause, _), *_ = error.failures.values()
        raise cause from error


def _item(key: str, number: int, piece: Shard) -> WriteItem:
    chunk = _chunk(piece.block)
    data = TensorWriteData(chunk, TensorProperties.create_from_tensor(piece.view), torch.Size(piece.shape))
    return WriteItem(MetadataIndex(key, chunk.offsets, number), WriteItemType.SHARD, tensor_data=data)


def _tensors(name: str, item: WriteItem, planner: SavePlanner) -> Tensors:
    assert item.tensor_data is not None
    dtype = str(item.tensor_data.properties.dtype).removeprefix("torch.")
    return Tensors(name, tuple(item.tensor_data.chunk.sizes), dtype, lambda: [_resolved(planner, item)])


def _resolved(planner: SavePlanner, item: WriteItem) -> Tensor:
    found = planner.resolve_data(item)
    assert isinstance(found, Tensor)
    return found


def _block(item: WriteItem) -> Block:
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return tuple((start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))


def _metadata(shape: tuple[int, ...], dtype: str, parts: Any) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        TensorProperties(dtype=getattr(torch, dtype)), torch.Size(shape), [_chunk(part.block) for part in parts]
    )


def _chunk(block: Block) -> ChunkStorageMetadata:
    starts = torch.Size([start for start, _ in block])
    return ChunkStorageMetadata(starts, torch.Size([stop - start for start, stop in block]))
