"""Initial weights: the parent builds the model once and writes every tensor to one file, or where it is stored already
(pretrained weights); ranks map the files and copy only their slices.

So every parallel run starts from exactly the weights of the single-process run with the same seed, whatever order
constructors draw in, and no rank ever holds an unsharded parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import astuple
from pathlib import Path

import torch
from torch import Tensor

from strategies.core.layout import indices
from strategies.core.program import Program
from strategies.runtime.slices import as_owned
from strategies.runtime.tensor_files import Part, StoredTensor, TensorReader, save
from strategies.runtime.transfer import cut


def write(path: Path, tensors: Mapping[str, Tensor], stored: Mapping[str, StoredTensor] | None = None) -> None:
    """Write unsharded tensors by name, and the file locations of those in `stored`, which override `tensors`."""
    places = dict(stored or {})
    own = {name: tensor.detach().contiguous() for name, tensor in tensors.items() if name not in places}
    save({"tensors": own, "stored": {name: astuple(one) for name, one in places.items()}}, path)


def read_all(path: Path) -> dict[str, Tensor]:
    """Every tensor by name. Those in other files come in the dtype in which they are stored; those in this one are
    mapped: nothing is read before it is used."""
    tensors, stored = _read(path)
    reader = TensorReader()
    return tensors | {name: reader.block(one) for name, one in stored.items()}


def read_slices(
    path: Path,
    program: Program,
    rank: int,
    device: torch.device | str,
    *,
    pretrained: bool = False,
    known: Collection[str] = (),
) -> dict[str, Tensor]:
    """The local slice of every parameter (as nn.Parameter), buffer and constant of `program`, by name, but for those
    that are `known`; with `pretrained` only of those that are in other files."""
    (tensors, stored), reader, found = _read(path), TensorReader(), {}
    for source in program.tensors.values():
        if source.name in known or (pretrained and source.name not in stored):
            continue
        layout, mesh = program.layouts[source.id], program.mesh
        if source.name in stored:
            one = stored[source.name]
            piece = torch.zeros(layout.local_shape(one.shape, mesh), dtype=getattr(torch, source.spec.dtype))
            for block, place in layout.blocks(one.shape, mesh, rank):
                reader.fill(one, block, piece[indices(place)])
            piece = piece.to(device)
        else:
            piece = cut(tensors[source.name], layout, mesh, rank).to(device)
        found[source.name] = as_owned(source, piece)
    return found


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, StoredTensor]]:
    content = torch.load(path, mmap=True, weights_only=True)
    stored = {
        name: StoredTensor(shape, dtype, tuple(Part(*part) for part in parts), key)
        for name, (shape, dtype, parts, key) in content["stored"].items()
    }
    return content["tensors"], stored
