"""What can be converted: a checkpoint, files of whole tensors (safetensors, torch state dicts), DeepSpeed's files.

Invariant: opening one reads headers alone, and a block costs memory of its own size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor

from runner import checkpoint as checkpoints
from runner.checkpoint import Checkpoint
from runner.checkpoint.conversion import deepspeed_files
from runner.checkpoint.index import Entry
from runner.checkpoint.reading import TensorSource
from runner.errors import ConfigError
from strategies.core.errors import StrategyError
from strategies.core.layout import Block
from strategies.runtime.shards import MODEL
from strategies.runtime.tensor_files import Reader, StoredTensor, index


@dataclass(frozen=True)
class Files:
    """Whole tensors in files, by name; all of them are weights."""

    stored: Mapping[str, StoredTensor]

    @cached_property
    def tensors(self) -> dict[str, Entry]:
        return {MODEL + name: Entry(one.shape, one.dtype, ()) for name, one in self.stored.items()}

    @cached_property
    def _reader(self) -> Reader:
        return Reader()

    def read(self, key: str, block: Block | None = None) -> Tensor:
        one = self.stored[key.removeprefix(MODEL)]
        return self._reader.block(one, tuple((0, size) for size in one.shape) if block is None else block)


def opened(path: Path) -> tuple[TensorSource, str]:
    """What `path` holds, and what that is in a few words. The checksums of a checkpoint are looked at.

    Raises ConfigError for what is none of these, or damaged.
    """
    found = _checkpoint(path)
    if found is not None:
        return found, f"the {found.header.form} checkpoint {found.path}"
    if (folder := deepspeed_files.folder_of(path)) is not None:
        taken = deepspeed_files.read(folder)
        return taken, f"the DeepSpeed checkpoint {folder} (its weights; optimizer states are left out)"
    try:
        files = index(path)
        for file in {one.file for one in files.values()}:
            checkpoints.check_file(Path(file))
        return Files(files), f"the weights in {path}"
    except StrategyError as error:
        raise ConfigError("MW604", f"convert: {error} A checkpoint, or what DeepSpeed saves, would do too.") from error


def _checkpoint(path: Path) -> Checkpoint | None:
    """The checkpoint, or newest of a run, that a path means."""
    if not path.is_dir() or not checkpoints.is_one(path):
        return None
    place = checkpoints.locate(path, "convert")
    checkpoints.verify(place)
    return checkpoints.read(place)
