"""Checkpoints built from full tensors and sharded as a test requires."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from runner.checkpoint import index
from runner.checkpoint import manifest as header
from runner.checkpoint.folder import HEADER, INDEX
from strategies.core.layout import Block
from strategies.runtime import tensor_files as stored
from strategies.runtime.tensor_files import Part, StoredTensor

Cut = Callable[[Tensor], list[Block]]


def uncut(tensor: Tensor) -> list[Block]:
    return [tuple((0, size) for size in tensor.shape)]


def halves(tensor: Tensor) -> list[Block]:
    """Two uneven shards along the last dim, if there is one."""
    if not tensor.dim() or tensor.shape[-1] < 2:
        return uncut(tensor)
    (*before, (_, size)) = uncut(tensor)[0]
    return [(*before, (0, size // 3 + 1)), (*before, (size // 3 + 1, size))]


def checkpoint(folder: Path, tensors: Mapping[str, Tensor], cut: Cut = uncut, step: int = 7) -> Path:
    """A checkpoint of `tensors` by key (`model/NAME`), with shard k of every tensor in file k."""
    path = folder / f"step-{step:08d}"
    path.mkdir(parents=True)
    parts: dict[str, list[tuple[str, Block]]] = {key: [] for key in tensors}
    files: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        for number, block in enumerate(cut(tensor)):
            name = f"rank-{number:05d}.safetensors"
            piece = tensor[tuple(slice(*one) for one in block)].clone().contiguous()
            files.setdefault(name, {})[index.place(key, block)] = piece
            parts[key].append((name, block))
    for name, content in files.items():
        save_file(content, path / name)
    where = {name: stored.index(path / name) for name in files}
    entries = {
        key: StoredTensor(
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            tuple(
                Part(name, where[name][index.place(key, block)].parts[0].offset, block) for name, block in parts[key]
            ),
        )
        for key, tensor in tensors.items()
    }
    (path / INDEX).write_text(json.dumps([index.to_json(entries)]), encoding="utf-8")
    stamps = {name: header.stamp(path / name) for name in [*files, INDEX]}
    manifest = header.Header(step, (0, step * 16), "sharded", len(files), {}, {}, "", stamps, ())
    (path / HEADER).write_text(header.to_text(manifest), encoding="utf-8")
    return path
